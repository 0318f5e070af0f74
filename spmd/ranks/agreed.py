"""Between steps: what all ranks agree on, for batches and numbers that must be equal on all of them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from .._torch import get_proxy_mode, tree_flatten_with_path, tree_unflatten
from .consensus import MeshRanks
from .world import world


def shared_rng(seed: int | None = None) -> random.Random:
    """A generator that draws the same on all ranks, as Python's ``random``: for numbers that a step must get equal.

    ``seed``: where it starts; None lets rank 0 choose. All ranks call it together, once, and then draw as often as
    each other: ``lam = rng.betavariate(0.2, 0.2)``. For torch: ``torch.Generator().manual_seed(rng.getrandbits(63))``.
    """
    if seed is not None and type(seed) is not int:
        raise TypeError(f"expected seed to be an int or None, got {seed!r}")
    proposed = random.SystemRandom().getrandbits(63) if seed is None else seed
    first, *others = all_gather(proposed, "spmd.shared_rng()")
    if seed is not None and any(other != first for other in others):
        raise ValueError(f"expected one seed on all ranks of spmd.shared_rng(), got {[first, *others]}")
    return random.Random(first)


def pad_to_longest(
    batch: Any, *, dim: int = 1, value: float = 0, values: Mapping[str, float] | None = None, multiple: int = 1
) -> Any:
    """Pad the tensors of a batch at the end of ``dim`` to the longest that any rank has; all ranks call it together.

    For collators that pad each rank's batch by itself: ``batch = spmd.pad_to_longest(batch, values={"labels": -100})``.
    Tensors may be nested in dicts, lists and tuples, and each is padded to its own length, with ``value``, or that
    which ``values`` has for its key. Tensors without this dim stay as they are. Lengths change from call to call, and
    each takes a program: ``multiple=64`` pads to the next multiple, so that there are few (docs/first-hour.md, Shapes).

    Raises ``ValueError`` for a name that is no key of the batch, a multiple below 1, and where ranks pass batches of
    other structures.
    """
    leaves, spec = tree_flatten_with_path(batch)
    keys = [str(getattr(path[-1], "key", getattr(path[-1], "idx", ""))) if path else "" for path, _ in leaves]
    values = dict(values or {})
    if multiple < 1:
        raise ValueError(f"expected multiple to be 1 or more, got {multiple}")
    sizes = [_size(leaf, dim) for _, leaf in leaves]
    gathered = all_gather([keys, sizes], "spmd.pad_to_longest()")
    if any(other != keys for other, _ in gathered):
        found = [other for other, _ in gathered]
        raise ValueError(f"expected batches of one structure on all ranks, got the keys {found}")
    if unknown := values.keys() - set(keys):
        raise ValueError(f"values has {sorted(unknown)}, but the batch has the keys {sorted(set(keys))}")
    longest = [-(-max(each) // multiple) * multiple for each in zip(*(other for _, other in gathered), strict=True)]
    padded = [
        _pad(leaf, dim, length, values.get(key, value))
        for (_, leaf), key, length in zip(leaves, keys, longest, strict=True)
    ]
    return tree_unflatten(padded, spec)


def _size(leaf: Any, dim: int) -> int:
    """The size of a tensor along ``dim``, -1 of what has no such dim."""
    return leaf.shape[dim] if isinstance(leaf, torch.Tensor) and -leaf.ndim <= dim < leaf.ndim else -1


def _pad(leaf: Any, dim: int, length: int, value: float) -> Any:
    size = _size(leaf, dim)
    if size in (-1, length):
        return leaf
    inner = leaf.ndim - 1 - dim % leaf.ndim
    return F.pad(leaf, [0, 0] * inner + [0, length - size], value=value)


def all_gather(own: Any, what: str, mesh: DeviceMesh | None = None) -> list[Any]:
    """The JSON data of each rank of a mesh, by default of the world, in their order."""
    if get_proxy_mode() is not None:
        raise RuntimeError(f"{what} was called inside of a compiled step: call it before the step, and pass the result")
    connection = MeshRanks.of(mesh or world("cpu"), None).connect(what)
    if connection is None:
        return [own]
    return [json.loads(text) for text in connection.all_gather_text(json.dumps(own), what)]
