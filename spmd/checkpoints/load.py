"""``spmd.load`` and ``spmd.from_pretrained``: read files into live state of any layout, each rank its own parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._torch import tree_flatten
from ..call.refuse_saves import RefusedSaves, readable
from ..call.rng import set_rng_state
from ..call.state import Arguments
from ..deferral.pending import finish_pending
from ..initialized import check_planned, make_room
from ..modes.base import ParallelMode
from ..modes.shares import StyleName
from ..ranks.failures import StateIs
from ..state import master_copies
from .background import wait_for_last
from .fit import check_fit
from .folders import foreign_files, newest, path_of
from .names import Names
from .objects import Objects, has_state
from .optimizers import load_optimizer
from .per_rank import check_fit as check_per_rank
from .per_rank import restore
from .pretrained import PretrainedModel
from .schedulers import regrouped
from .stored import Stored
from .targets import Targets
from .together import Together, together
from .trees import is_meta, leaves


def load(
    folder: str | os.PathLike[str], *, strict: bool = True, per_rank: Mapping[str, Any] | None = None, **state: Any
) -> int | None:
    """Load the newest complete checkpoint of a folder into ``state``; all ranks call it. Returns its step, or None.

    ``folder`` is what ``spmd.save`` was given, or one checkpoint in it. ``state``: by the names that it was saved with,
    all or some of the objects. Each rank reads its parts, whatever the layout was when they were saved. A dict or list
    of plain values gets the stored content; a tensor, the stored values; what cannot change is compared. The random
    state of compiled steps (``spmd.set_rng_state``) is loaded, too. A model on the meta device is given its layout by
    ``spmd.materialize`` first. ``per_rank``: objects that get what this rank saved for itself.

    With ``strict``, names that are missing on either side, shapes and dtypes that differ, are all listed by name in
    a ``ValueError``, before anything changes; without it, what is in both is loaded, cast where dtypes differ.

    Raises ``FileNotFoundError`` if there is no complete checkpoint, and ``SpmdError`` with the name of a file that is
    damaged. No code in the files is executed.
    """
    path = path_of(folder)
    wait_for_last()
    finish_pending()
    with together(f"loading {path}", restores_state=True) as ranks:
        checkpoint = Path(ranks.first(lambda: str(_find(path))))
        return _load(checkpoint, state, strict, ranks, per_rank)


def from_pretrained(
    folder: str | os.PathLike[str],
    parallel_mode: ParallelMode | StyleName | None = None,
    *,
    model: Callable[..., nn.Module] | None = None,
    config: Any = None,
    dtype: torch.dtype | None = None,
    names: Names | None = None,
) -> nn.Module:
    """Make a model from a folder of Hugging Face's, each rank reading the parts that it keeps; all ranks call it.

    ``folder``: has ``config.json`` and safetensors files, one or several with an index, as ``save_pretrained`` and
    ``spmd.export`` write. ``parallel_mode``: that of the step, which places parameters. No rank holds the whole model,
    or a file: a rank's memory is its parts, and one parameter of those that the model's code makes.

    ``model``: a class of transformers, as ``AutoModelForCausalLM``, which gets the configuration; by default the class
    that the configuration names. Or a function without arguments that makes any module, and needs no configuration.
    ``config``: a configuration to use instead of the folder's. ``dtype``: that of floating-point parameters; by default
    what the configuration says, else what the files have, or what a function makes; values in files are cast.
    ``names``: a table of names in the files, for those that are not the model's: ``{"*.qkv.*": ("*.q.*", "*.k.*",
    "*.v.*")}`` for rows of three tensors that are one in the model, ``{("*.gate.*", "*.up.*"): "*.gate_up.*"}`` for the
    reverse, ``{"*": "model.*"}`` for other names, ``{"*.experts.up": ("*.experts.#.w1.weight",)}`` for an entry of the
    files for each index of the first dim. ``spmd.export`` with the same table writes the files' names again.

    Parameters start on the meta device; buffers are those that the model's code makes. Tied parameters stay tied.
    Models of transformers are in evaluation mode, as from there: call ``.train()``. Make the optimizer after this.

    Raises ``FileNotFoundError`` where there is no such folder, ``ValueError`` with all names that are missing, left
    over or of another shape, and ``SpmdError`` with the name of a file that is damaged, on all ranks.
    """
    path = path_of(folder)
    check_planned(parallel_mode, "spmd.from_pretrained")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"expected dtype to be a floating-point torch.dtype or None, got {dtype!r}")
    with together(f"reading {path}") as ranks:
        reads: list[PretrainedModel] = []
        ranks.run(lambda: reads.append(PretrainedModel(path, model, config, dtype, names)))
        (read,) = reads
        device = make_room(read.model, parallel_mode, "spmd.from_pretrained")
        ranks.run(lambda: read.fill(device))
    return read.model


def _find(folder: Path) -> Path:
    found = newest(folder)
    if found is None and not foreign_files(folder):
        raise FileNotFoundError(f"there is no complete checkpoint in {folder}, and no safetensors file")
    return found or folder


def _load(
    checkpoint: Path, state: Mapping[str, Any], strict: bool, ranks: Together, per_rank: Mapping[str, Any] | None
) -> int | None:
    loads: list[_Load] = []

    def prepare() -> None:
        loads.append(_Load.of(checkpoint, state, strict))
        check_per_rank(per_rank, loads[0].stored.trees, ranks.size)

    ranks.run(prepare)
    (work,) = loads
    trained = Arguments([], tree_flatten(())[1], work.objects.modules, work.objects.optimizers, {})
    ranks.state = StateIs.MIXED if trained.modules or trained.optimizers else StateIs.BEFORE
    try:
        for targets in work.passes():
            work.stored.files.read(targets, ranks)
        ranks.run(work.apply)
        ranks.run(lambda: restore(per_rank, work.stored.trees, ranks.rank))
    except BaseException:
        if ranks.state is StateIs.MIXED:
            RefusedSaves(trained, f"loading {checkpoint} did not end", ranks.standing)
        raise
    ranks.state = StateIs.AFTER
    return work.stored.step


@dataclass(frozen=True)
class _Load:
    """A load of which everything has been checked that can be without a change."""

    stored: Stored
    objects: Objects
    targets: Targets

    @classmethod
    def of(cls, checkpoint: Path, state: Mapping[str, Any], strict: bool) -> _Load:
        with readable():
            objects = Objects.of(state)
        _check_loadable(objects)
        stored = Stored.read(checkpoint, objects)
        check_fit(objects, stored, str(checkpoint), strict)
        return cls(stored, objects, Targets.of(objects, stored.trees))

    def passes(self) -> list[dict[str, torch.Tensor]]:
        """The targets by the names that files have for them: one that was tied may belong to several."""
        found: list[dict[str, torch.Tensor]] = []
        for path, tensor in self.targets.tensors.items():
            source = self.stored.source(path)
            free = next((targets for targets in found if source not in targets), None)
            if free is None:
                found.append(free := {})
            free[source] = tensor
        return found

    def apply(self) -> None:
        """Let all objects load what was read: models, then optimizers, then what refers to these."""
        loaded, given = self.targets.trees, self.objects.given
        for name, module in self.objects.modules.items():
            module.load_state_dict(loaded[name])
        read = {self.objects.ties.get(name, name) for name in self.targets.tensors}
        for name, parameter in self.objects.parameters.items():
            if name in read:
                master_copies.take(parameter)
        for name, optimizer in self.objects.optimizers.items():
            load_optimizer(optimizer, loaded[name], self.objects.groups[name])
        for name, each in given.items():
            if name not in self.objects.modules and name not in self.objects.optimizers:
                _load_other(each, regrouped(name, loaded[name], self.objects, self.stored.trees))
        if self.stored.rng is not None:
            set_rng_state(self.stored.rng)


def _check_loadable(objects: Objects) -> None:
    meta = [name for tree in objects.trees.items() for name, leaf in leaves(tree[1], tree[0]) if is_meta(leaf)]
    if meta:
        raise ValueError(
            f"{', '.join(meta[:8])}{', ...' * (len(meta) > 8)} on the meta device: give the model its layout by "
            "spmd.materialize(model, parallel_mode), and make the optimizer after that"
        )


def _load_other(each: Any, loaded: Any) -> None:
    if has_state(each):
        each.load_state_dict(loaded)
    elif isinstance(each, dict):
        each.clear()
        each.update(loaded)
    elif isinstance(each, list):
        each[:] = loaded
    elif isinstance(each, torch.Tensor) and loaded is not each:
        with torch.no_grad():
            each.copy_(loaded)
