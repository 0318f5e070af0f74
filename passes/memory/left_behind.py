"""Gradients that a step leaves behind in the place of those of the call before: how many bytes, and where they lie."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..analysis.aliases import storages
from ..ir.program import Program
from ..runtime.arena import reserve, view_at


def replaced_bytes(program: Program, device: torch.device) -> int:
    """This rank's bytes of the gradients on ``device`` that the call before left, and that live until state is written.

    The caller copies gradients into the same memory, or it goes once state may be written: it is not there twice.
    """
    return sum(val.nbytes for val in _replaced(program) if val.device == device)


def _replaced(program: Program) -> Iterator[torch.Tensor]:
    for value, output in zip(program.output_values(), program.outputs, strict=True):
        if output.replaces:
            yield value.meta["val"]


def in_planned_memory(program: Program) -> list[bool]:
    """For each output, whether the caller copies it since it lies in an arena, which the next program overwrites."""
    if not any(output.replaces for output in program.outputs):
        return [False] * len(program.outputs)
    found = storages(program.graph)
    pairs = zip(program.output_values(), program.outputs, strict=True)
    return [
        output.replaces and any(piece.target in (reserve, view_at) for piece in found[value]) for value, output in pairs
    ]
