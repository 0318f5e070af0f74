"""Check the first call of a program: what passes and backend made of it, beside the program that they began with.

Both run on copies of the call's own values, on all ranks, with all communication; state stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch

from passes import Input, OutputKind, PassError, Program, RankMismatchError
from passes.ir.interpret import interpret

from ._torch import DisableAutocast
from .call.state import Arguments
from .compiled import Compiled
from .differences import difference, rounding_of
from .lowering.lower import input_refs


def check_first_call(compiled: Compiled, arguments: Arguments, name: str) -> None:
    """Raise ``PassError`` on all ranks if the program computes something else on any than before its passes ran."""
    live = compiled.guards.live(arguments)
    assert live is not None, "a program fits the call that it was compiled for"
    found = _first_difference(compiled, compiled.values(arguments, live))
    sentence = f"{name} computes something else than before its passes ran: {found}" if found else ""
    connection = compiled.connection
    others = connection.all_gather_text(sentence, f"the check of {name}") if connection is not None else [sentence]
    wrong = next(filter(None, others), "")
    if not wrong:
        return
    compiled.drop()
    if connection is not None:
        connection.is_in_call = False  # all ranks know, and none has changed anything
    advice = "spmd.verify(step, ...) names the pass, and passes=() runs none. State is as it was before the call"
    raise (PassError if sentence else RankMismatchError)(f"{sentence or wrong}. {advice}")


def _first_difference(compiled: Compiled, values: dict[str, Any]) -> str:
    """The first result or update that differs on this rank by more than rounding."""
    before, after = compiled.partitioned, compiled.program
    inputs = [_copy(declared, values) for declared in after.inputs]
    with torch.no_grad(), DisableAutocast():
        expected = interpret(before, *(_copy(declared, values) for declared in before.inputs))
        returned = iter(compiled.executable(inputs))
    refs, rounding = input_refs(after), rounding_of(_dtypes(before))
    for output, value in zip(before.outputs, expected, strict=True):
        actual = refs[output.name].of(inputs) if output.kind is OutputKind.UPDATE else next(returned)
        if isinstance(value, torch.Tensor) and output.kind is OutputKind.UPDATE:
            value = value.to(actual.dtype)
        found = difference(value, actual, rounding)
        if found is not None:
            return f"{output.name}: {found.says}"
    return ""


def _copy(declared: Input, values: dict[str, Any]) -> Any:
    """A copy of an input; of a flat one, put together from its parts."""
    if declared.parts:
        parts = sorted(declared.parts, key=lambda part: part.offset)
        return torch.cat([values[part.input.name].reshape(-1) for part in parts])
    value = values[declared.name]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _dtypes(program: Program) -> list[torch.dtype]:
    vals = (node.meta.get("val") for node in program.graph.nodes)
    return [val.dtype for val in vals if isinstance(val, torch.Tensor)]
