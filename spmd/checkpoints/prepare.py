"""What a save is about to write: this rank's parts of tensors by name, and plain values that all ranks have."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from passes.ir.program import is_sharded

from ..lowering.distribute_state import as_dtensor, part_of
from ..ranks.world import describe as describe_mesh
from .objects import Objects
from .together import Together
from .trees import describe_leaf, divide, leaves
from .values import check


@dataclass(frozen=True)
class Prepared:
    """``ties``: further names of tied tensors. ``trees``: plain values, by the name of each object."""

    tensors: dict[str, torch.Tensor]
    ties: dict[str, str]
    trees: dict[str, Any]


def prepare(state: Mapping[str, Any], ranks: Together) -> Prepared:
    """Read the state of this rank, and compare it with that of the others. Nothing is written yet.

    Raises ``ValueError`` on all ranks if something that is not split differs between them: one copy is stored.
    """
    found: list[Prepared] = []
    lines: list[str] = []

    def read() -> str:
        found.append(_read(state))
        lines.extend(_lines(found[0]) if ranks.size > 1 else ())
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    digests = ranks.run(read)
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
    return found[0]


def _read(state: Mapping[str, Any]) -> Prepared:
    objects = Objects.of(state)
    tensors: dict[str, torch.Tensor] = {}
    trees = {}
    for name, tree in objects.trees.items():
        trees[name], found = divide(tree, name, objects.ties)
        tensors |= found
    check(trees)
    return Prepared(tensors | _exact_parts(objects, tensors), objects.ties, trees)


def _exact_parts(objects: Objects, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters of which each rank updates a part, as its state is split: of a whole copy, that part is exact.

    The other parts of the copy are what other ranks sent, maybe rounded (``gather_dtype``).
    """
    found: dict[str, torch.Tensor] = {}
    for optimizer in objects.optimizers.values():
        for name, parameter in objects.parameters.items():
            if isinstance(parameter, DTensor) or name not in tensors:
                continue
            for each in optimizer.state.get(parameter, {}).values():
                if isinstance(each, DTensor) and each.shape == parameter.shape and is_sharded(tuple(each.placements)):
                    found[name] = _part_like(parameter.detach(), each)
    return found


def _part_like(whole: torch.Tensor, other: DTensor) -> DTensor:
    mesh, placements = other.device_mesh, tuple(other.placements)
    return as_dtensor(part_of(whole, placements, describe_mesh(mesh)), placements, mesh, whole.shape, whole.stride())


def _lines(prepared: Prepared) -> list[str]:
    """What must be equal on all ranks, a line each."""
    lines = [f"{name} = {describe_leaf(tensor)}" for name, tensor in prepared.tensors.items()]
    for key, tree in prepared.trees.items():
        lines += [f"{name} = {describe_leaf(leaf)}" for name, leaf in leaves(tree, key)]
    return lines
