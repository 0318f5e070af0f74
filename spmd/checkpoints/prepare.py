"""Prepare a save: read this rank's parts of tensors, and plain values; compare those that ranks must agree on."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from passes.ir.program import is_sharded

from .._torch import local_tensor
from ..call.nested_state import tensors_in
from ..ranks.world import describe as describe_mesh
from ..state import master_copies
from ..state.background_reads import span_of
from ..state.bound_programs import bound_spans
from ..state.distribute import as_dtensor, part_of
from .objects import Objects
from .together import Together
from .trees import describe_leaf, divide, leaves
from .values import check


@dataclass(frozen=True)
class Prepared:
    """``ties``: further names of tied tensors. ``trees``: plain values, by the name of each object.

    ``trained``: the names of parameters and optimizer state. ``live``: those of them that programs are bound to, which
    a save in the background reads where they lie. Buffers are not among them: eager code writes to those, too.
    """

    tensors: dict[str, torch.Tensor]
    ties: dict[str, str]
    trees: dict[str, Any]
    trained: frozenset[str] = frozenset()
    live: frozenset[str] = frozenset()


def prepare(state: Mapping[str, Any], ranks: Together, *, compares_trained: bool = True) -> Prepared:
    """Read the state of this rank, and compare it with that of the others. Nothing is written yet.

    ``compares_trained``: False leaves it to the caller to compare the values of trained tensors. Raises ``ValueError``
    on all ranks if something that is not split differs between them: one copy is stored.
    """
    found: list[Prepared] = []
    lines: list[str] = []

    def read() -> str:
        found.append(_read(state))
        left_out = frozenset() if compares_trained else found[0].trained
        lines.extend(_lines(found[0], left_out) if ranks.size > 1 else ())
        return _digest(lines)

    _compare(ranks.run(read), lines, ranks)
    return found[0]


def compare(lines: list[str], ranks: Together) -> None:
    """Raise ``ValueError`` on all ranks unless these lines are the same on all."""
    _compare(ranks.run(lambda: _digest(lines)), lines, ranks)


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _compare(digests: list[str], lines: list[str], ranks: Together) -> None:
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        texts = ranks.run(lambda: lines if ranks.rank in (0, other) else None)
        one, another = next(
            pair for pair in zip_longest(texts[0], texts[other], fillvalue="nothing") if len({*pair}) > 1
        )
        ranks.fail(
            ValueError(
                f"expected all ranks to save the same, but rank 0 has {one}, and rank {other} has {another} (of a "
                "tensor, its checksum). One value is stored for all ranks: give what is equal on all, or a DTensor"
            )
        )


def _read(state: Mapping[str, Any]) -> Prepared:
    objects = Objects.of(state)
    tensors: dict[str, torch.Tensor] = {}
    trees = {}
    for name, tree in objects.trees.items():
        trees[name], found = divide(tree, name, objects.ties)
        tensors |= found
    check(trees)
    tensors |= _updated_parts(objects, tensors)
    of_optimizers = tuple(f"{name}." for name in objects.optimizers)
    trained = [name for name in tensors if name in objects.parameters or name.startswith(of_optimizers)]
    return Prepared(tensors, objects.ties, trees, frozenset(trained), _live({name: tensors[name] for name in trained}))


def _live(trained: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """The tensors on the CPU that lie in state that programs are bound to."""
    spans = bound_spans()
    starts = [start for start, _ in spans]

    def is_live(local: torch.Tensor) -> bool:
        if local.device.type != "cpu" or local.is_inference() or not local.is_contiguous() or not local.numel():
            return False
        start, end = span_of(local)
        k = bisect_right(starts, start) - 1
        return k >= 0 and end <= spans[k][1]

    return frozenset(name for name, tensor in trained.items() if is_live(local_tensor(tensor)))


def _updated_parts(objects: Objects, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters that each rank has whole and updates a part of, as its state is split: each rank saves its part.

    Of what ranks hold rounded (``gather_dtype``), these are the exact values.
    """
    exact = {name: master_copies.exact(p) for name, p in objects.parameters.items() if name in tensors}
    found: dict[str, torch.Tensor] = {name: parts for name, parts in exact.items() if parts is not None}
    for optimizer in objects.optimizers.values():
        for name, parameter in objects.parameters.items():
            if isinstance(parameter, DTensor) or name not in tensors or name in found:
                continue
            for each in tensors_in(optimizer.state.get(parameter, {})):
                if isinstance(each, DTensor) and each.shape == parameter.shape and is_sharded(tuple(each.placements)):
                    found[name] = part_like(parameter.detach(), each)
    return found


def part_like(whole: torch.Tensor, other: DTensor) -> DTensor:
    """This rank's part of a whole tensor, split as another one."""
    mesh, placements = other.device_mesh, tuple(other.placements)
    return as_dtensor(part_of(whole, placements, describe_mesh(mesh)), placements, mesh, whole.shape, whole.stride())


def _lines(prepared: Prepared, left_out: frozenset[str]) -> list[str]:
    """The entries that must be equal on all ranks, a line each; without the values of those ``left_out``."""
    lines = [
        f"{name} = {tensor.dtype}{list(tensor.shape)}" if name in left_out else line_of(name, tensor)
        for name, tensor in prepared.tensors.items()
    ]
    for key, tree in prepared.trees.items():
        lines += [line_of(name, leaf) for name, leaf in leaves(tree, key)]
    return lines


def line_of(name: str, leaf: Any) -> str:
    """The text of a leaf by which ranks compare it."""
    return f"{name} = {describe_leaf(leaf)}"
