"""Bind each traced value at the end of a step to what it is: a result, an update of an input, or new state."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from passes import Output, OutputKind, Program, Role
from passes.ir.program import is_pending

from .._torch import tree_flatten, tree_unflatten
from ..call.nested_state import Path, leaves_of
from ..call.state import Slot, gradient_name, state_name
from ..python_state.effects.carried import Carried
from ..python_state.effects.writes import bound
from ..python_state.traced import is_traced
from .captured import Captured, FromOutput, NewState
from .final_state import FinalState, NewEntry
from .functional import take_write_backs
from .hyper_conditions import HyperGuards


def bind_outputs(
    program: Program,
    final: FinalState,
    slots: list[Slot],
    guards: HyperGuards,
    constants: list[torch.Tensor],
    carried: Carried,
) -> Captured:
    """Declare the program's outputs, which its graph returns in the order of ``final.traced()``."""
    written = take_write_backs(program.graph)
    outputs = _Outputs(program.output_values())
    results = [
        outputs.add(Output(OutputKind.RESULT, f"result.{index}", Role.RESULT)) if is_traced(leaf) else leaf
        for index, leaf in enumerate(final.results)
    ]
    cleared, reduced = _bind_updates(outputs, slots, final, program.placeholders)
    _bind_written_arguments(outputs, program, written)
    parameters = {slot.input.name for slot in slots if slot.input.role is Role.PARAMETER}
    new_state = [*reduced, *_bind_gradients(outputs, final), *_bind_optimizer_state(outputs, final, parameters)]
    # A rank may log or print by itself what all ranks return: their programs are the same then.
    known = {id(leaf): output for leaf, output in zip(final.results, results, strict=True) if is_traced(leaf)}
    writes = bound(final.writes, known, lambda name: outputs.add(Output(OutputKind.NEW, name, Role.RESULT)))
    for number in range(len(final.asked)):
        outputs.add(Output(OutputKind.RESULT, f"asked.{number}", Role.RESULT))
    watched = {
        key: outputs.add(Output(OutputKind.RESULT, f"watched.{number}", Role.RESULT))
        for number, key in enumerate(final.watched)
    }
    program.set_outputs(outputs.values, outputs.declared)
    return Captured(
        program,
        guards,
        constants,
        results,
        final.result_spec,
        new_state,
        cleared,
        carried,
        writes,
        final.requires_grad,
        watched=watched,
    )


class _Outputs:
    """The outputs declared so far, each with its value; values come in the order of the graph's outputs."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._remaining = iter(values)
        self.values: list[Any] = []
        self.declared: list[Output] = []
        self.updated: set[str] = set()  # the parameters among them, which stand before gradients

    def take(self) -> Any:
        """The next value."""
        return next(self._remaining)

    def add(self, output: Output) -> FromOutput:
        """Declare ``output`` to be the next value."""
        return self.bind(output, self.take())

    def bind(self, output: Output, value: Any) -> FromOutput:
        """Declare ``output`` to be ``value``."""
        val = value.meta["val"] if isinstance(value, fx.Node) else value
        if isinstance(val, torch.Tensor):
            output = replace(output, shape=tuple(val.shape), dtype=val.dtype)
        self.values.append(value)
        self.declared.append(output)
        if output.role is Role.PARAMETER:
            self.updated.add(output.name)
        return FromOutput(sum(each.kind is not OutputKind.UPDATE for each in self.declared) - 1)


def _bind_updates(
    outputs: _Outputs, slots: list[Slot], final: FinalState, placeholders: list[fx.Node]
) -> tuple[list[str], list[NewState]]:
    """Bind updates of state; return the parameters whose gradient is cleared, and gradients that are pending no more.

    A reduced gradient does not fit the memory of its summands: it is new.
    """
    cleared, reduced = [], []
    for placeholder, slot, end in zip(placeholders, slots, final.slots, strict=False):
        if not is_traced(end):
            cleared.append(slot.input.of or "")
            continue
        value, described = outputs.take(), slot.input
        if value is placeholder:
            continue
        was_pending = described.role is Role.GRADIENT and is_pending(described.placement)
        output = Output(OutputKind.UPDATE, described.name, described.role, of=described.of)
        if not was_pending:
            outputs.bind(output, value)
        elif described.of in final.pending and described.of not in outputs.updated:
            outputs.bind(replace(output, pending=True), value)
        else:
            new = outputs.bind(replace(output, kind=OutputKind.NEW), value)
            reduced.append(NewState(described.of or "", new))
    return cleared, reduced


def _bind_written_arguments(outputs: _Outputs, program: Program, written: dict[fx.Node, fx.Node]) -> None:
    for node, declared in zip(program.placeholders, program.inputs, strict=True):
        if node in written and not declared.role.is_state:
            outputs.bind(Output(OutputKind.UPDATE, declared.name, declared.role), written[node])


def _bind_gradients(outputs: _Outputs, final: FinalState) -> list[NewState]:
    new_state, pending = [], final.pending - outputs.updated
    for name in final.gradients:
        output = Output(OutputKind.NEW, gradient_name(name), Role.GRADIENT, of=name, pending=name in pending)
        new_state.append(NewState(name, outputs.add(output)))
    return new_state


def _bind_optimizer_state(outputs: _Outputs, final: FinalState, parameters: Collection[str]) -> list[NewState]:
    skips = [
        outputs.add(Output(OutputKind.RESULT, f"skipped.{index}", Role.RESULT)) for index in range(len(final.skips))
    ]
    new_state = []
    for entry in final.optimizer_state:
        leaves, spec = tree_flatten(entry.value)
        paths = [nested for nested, _ in leaves_of(tree_unflatten(range(len(leaves)), spec))]
        values = [
            outputs.add(_new_output(entry, nested, parameters)) if is_traced(leaf) else leaf
            for nested, leaf in zip(paths, leaves, strict=True)
        ]
        unless = None if entry.unless is None else skips[entry.unless]
        value = tree_unflatten(values, spec)
        new_state.append(NewState(entry.parameter, value, entry.optimizer, entry.key, unless))
    return new_state


def _new_output(entry: NewEntry, nested: Path, parameters: Collection[str]) -> Output:
    key, owner = (entry.key, entry.parameter) if entry.key is not None else (entry.parameter, "")
    of = entry.parameter if entry.parameter in parameters else None
    return Output(OutputKind.NEW, state_name(entry.optimizer, key, owner, nested), Role.OPTIMIZER_STATE, of=of)
