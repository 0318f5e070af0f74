"""State that each rank has for itself, such as the place of its data loader: small, and loaded by as many ranks.

The values of all ranks are exchanged as text, so that a checkpoint has one value on all ranks, as of all other state.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

import torch

from .objects import has_state
from .together import Together
from .trees import map_leaves
from .values import check

NAME = "per_rank"  # under which a checkpoint has it
_MOST = 64_000_000  # bytes of a rank


def gather(given: Mapping[str, Any] | None, ranks: Together) -> dict[str, Any]:
    """``{NAME: the text of each rank}`` for a checkpoint; nothing where ``given`` is None. All ranks call it.

    Raises ``TypeError`` or ``ValueError`` on all for what cannot be saved.
    """
    texts = ranks.run(lambda: None if given is None else _encoded(_trees(given)))
    if all(text is None for text in texts):
        return {}
    if any(text is None for text in texts):
        ranks.fail(ValueError("expected per_rank on all ranks, or on none: some passed it and some did not"))
    return {NAME: texts}


def check_fit(given: Mapping[str, Any] | None, stored: Mapping[str, Any], size: int) -> None:
    """Raise ``ValueError`` unless a checkpoint has these objects, of as many ranks as load it."""
    if given is None:
        return
    texts = stored.get(NAME)
    if texts is None:
        raise ValueError("per_rank: missing in the checkpoint, which was saved without it")
    if len(texts) != size:
        raise ValueError(
            f"per_rank was saved by {len(texts)} ranks, and {size} load it: what each has for itself fits no other "
            "number. Leave per_rank out, and begin the epoch of the loader anew"
        )
    missing = sorted(given.keys() - _decoded(texts[0]).keys())
    if missing:
        raise ValueError(f"per_rank: {', '.join(missing)} missing in the checkpoint")


def restore(given: Mapping[str, Any] | None, stored: Mapping[str, Any], rank: int) -> None:
    """Let the objects of this rank load what it saved."""
    trees = _decoded(stored[NAME][rank]) if given else {}
    for name, each in (given or {}).items():
        if has_state(each):
            each.load_state_dict(trees[name])
        elif isinstance(each, dict):
            each.clear()
            each.update(trees[name])
        else:
            each[:] = trees[name]


def _trees(given: Mapping[str, Any]) -> dict[str, Any]:
    trees = {}
    for name, each in given.items():
        if not has_state(each) and not isinstance(each, (dict, list)):
            raise TypeError(
                f"expected per_rank[{name!r}] to have state_dict and load_state_dict, or to be a dict or a list, got "
                f"{each!r}"
            )
        tree = each.state_dict() if has_state(each) else each
        trees[name] = map_leaves(tree, lambda _, x: x.cpu() if isinstance(x, torch.Tensor) else x, name)
    check(trees)
    return trees


def _encoded(trees: dict[str, Any]) -> str:
    file = io.BytesIO()
    torch.save(trees, file)
    if file.tell() > _MOST:
        raise ValueError(
            f"expected per_rank to be at most {_MOST // 1_000_000} MB on each rank, got {file.tell() // 1_000_000} MB: "
            "write what is larger to a file of each rank"
        )
    return base64.b64encode(file.getvalue()).decode()


def _decoded(text: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    return found
