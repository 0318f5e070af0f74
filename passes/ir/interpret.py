"""Run a program node by node: the meaning that every pass must keep and every backend must reproduce."""

from __future__ import annotations

from typing import Any

from torch import fx

from .program import Program


def interpret(program: Program, *inputs: Any) -> tuple[Any, ...]:
    """Run ``program`` on one value per input, real or fake, and return one value per output.

    Collectives need their process groups. Raises ``TypeError`` where the number of inputs is another.
    """
    if len(inputs) != len(program.inputs):
        raise TypeError(f"{program.name} takes {len(program.inputs)} inputs, got {len(inputs)}")
    returned = fx.Interpreter(program.graph_module).run(*inputs, enable_io_processing=False)
    return tuple(returned) if isinstance(returned, (list, tuple)) else (returned,)
