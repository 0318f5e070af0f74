"""The values of one rank by the names of a program's inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from passes import Program
from passes.ir.numbers import unpack

Values = dict[str, Any]


def by_name(program: Program, inputs: Sequence[Any]) -> Values:
    """The inputs of a program by name; in the place of one that holds several these."""
    found: Values = {}
    for declared, value in zip(program.inputs, inputs, strict=True):
        if declared.parts:
            for part in declared.parts:
                found[part.input.name] = value.narrow(0, part.offset, part.numel).view(part.shape)
        elif declared.numbers:
            found |= unpack(declared, value)
        else:
            found[declared.name] = value
    return found
