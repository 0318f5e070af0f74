"""Texts that ranks compare while they compile."""

from __future__ import annotations

from typing import Any

from passes import Memory, Program, Table
from passes.ir.bundle import Bundle

from ..call.call import Call
from ..call.rng import describe_seed
from ..capture import Captured
from ..ranks.equal_values import contents, number


def describe_for_agreement(
    captured: Captured, program: Program, table: Table, call: Call, bundle: Bundle | None = None, entry: str = ""
) -> str:
    """Text that must be equal on all ranks: seed, costs, the captured program, its constants and draws, collectives.

    ``entry``: of the cache, that the program was read from; what it was compiled to was compared when it was stored.
    """
    initial = [f"{slot.input.name} was made for this call" for slot in call.slots if call.initial.holds(slot)]
    initial += [f"{slot.input.name} is on the meta device" for slot in call.slots if slot.get().is_meta]
    costs = f"passes.Table, measured costs of communication: sha256 {table.digest}"
    inputs = [f"{i.name}: {i.dtype}{list(i.shape)} {i.placement}" for i in captured.program.inputs]
    inputs += [f"{hyper.name} = {number(hyper.get())}" for hyper in call.hyper_parameters]
    inputs += [f"{x.name} = {contents(x.value)}" for x in call.inputs if all(p.is_replicate() for p in x.placement)]
    inputs += [f"{i.name} in {i.memory} memory" for i in program.inputs if i.memory is not Memory.DEVICE]
    constants = [
        f"a tensor that is no argument but found by its name, so that it must be equal on all ranks (pass rows of the "
        f"batch as arguments): {contents(constant)}"
        for constant in captured.constants
    ]
    numbers = _numbers(captured, call)
    outputs = [
        f"output {o.name}: {o.dtype}{list(o.shape)}{', left pending' * o.pending}" for o in captured.program.outputs
    ]
    lines = [describe_seed(), costs, *inputs, *initial, *numbers, *constants, *outputs]
    if entry:
        return "\n".join([*lines, f"from the entry {entry} of the cache"])
    captured_nodes = captured.program.graph.nodes
    draws = [f"{node.name} is draw {node.meta['draw']}" for node in captured_nodes if "draw" in node.meta]
    traffic = [f"{node.target} {node.meta['collective']}" for node in program.collectives()]
    traffic += [f"the bundle {bundle.name}: {bundle.digest()}"] if bundle is not None else []
    code = [captured.code, *draws, *traffic]
    if program.assignment is not None:  # a solver of the user's may choose other placements on other ranks
        code.append(f"the assignment of nodes: sha256 {program.assignment.digest}")
    return "\n".join([*lines, *code])


def text_of(captured: Captured, call: Call, entry: str = "") -> str:
    """The captured program and the numbers that it reads: what Python values among the arguments make of it."""
    return "\n".join([*_numbers(captured, call), entry or captured.code])


def _numbers(captured: Captured, call: Call) -> list[str]:
    numbers: list[Any] = [*captured.carried.numbers, *captured.carried.arguments(call.given)]
    return [f"{number.name} = {number.get()}" for number in numbers]
