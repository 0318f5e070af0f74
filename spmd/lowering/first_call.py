"""Check the first call of a program: what passes and backend made of it, beside the program that they began with.

Both run on copies of the call's own values, on all ranks, with all communication; state stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch

from passes import Input, OutputKind, Program
from passes.ir.interpret import interpret
from passes.ir.numbers import pack

from .._torch import DisableAutocast
from ..ranks.differences import difference, rounding_of
from .lower import Executable, input_refs


def first_difference(before: Program, after: Program, executable: Executable, values: dict[str, Any]) -> str:
    """The first result or update that differs on this rank by more than rounding; empty if none does."""
    devices = [getattr(node.meta["val"], "device", None) for node in after.placeholders]
    inputs = [_copy(*pair, values) for pair in zip(after.inputs, devices, strict=True)]
    with torch.no_grad(), DisableAutocast():
        expected = interpret(before, *(_copy(declared, None, values) for declared in before.inputs))
        returned = iter(executable(inputs))
    refs, rounding = input_refs(after), rounding_of(_dtypes(before))
    for output, value in zip(before.outputs, expected, strict=True):
        actual = refs[output.name].of(inputs) if output.kind is OutputKind.UPDATE else next(returned)
        if isinstance(value, torch.Tensor) and output.kind is OutputKind.UPDATE:
            value = value.to(actual.dtype)
        found = difference(value, actual, rounding)
        if found is not None:
            return f"{output.name}: {found.says}"
    return ""


def _copy(declared: Input, device: torch.device | None, values: dict[str, Any]) -> Any:
    """A copy of an input; of a flat one, put together from its parts; of numbers, packed on their ``device``."""
    if declared.numbers:
        return pack(declared, values).to(device)
    if declared.parts:
        parts = sorted(declared.parts, key=lambda part: part.offset)
        return torch.cat([values[part.input.name].reshape(-1) for part in parts])
    value = values[declared.name]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _dtypes(program: Program) -> list[torch.dtype]:
    vals = (node.meta.get("val") for node in program.graph.nodes)
    return [val.dtype for val in vals if isinstance(val, torch.Tensor)]
