"""Overrides: replace submodules while tracing, and edit the graph after partition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from passes import CaptureError, PassError, Program, Role
from passes.ir.infer_shapes import fill_vals
from passes.ir.program import Input, output_values

from ._torch import own_children
from .interpreter.source_lines import named_at
from .unexpected_errors import errors_of


class Override:
    """A replacement of submodules that cannot or should not be traced as they are, or an edit of the graph.

    Override one method or both; by themselves they do nothing.

    ``replacement`` is asked for every submodule (not the root), parents before children; the first override that
    returns another object wins, and what it returned is not descended into. The user's model is restored after
    tracing; parameters of a replaced module stay the optimizer's, without gradient, unless the replacement holds the
    same ones.
    """

    def replacement(self, fqn: str, orig_submodule: nn.Module) -> nn.Module:
        """The module to trace instead of ``orig_submodule``, whose name in its model is ``fqn``."""
        return orig_submodule

    def transform(self, gm: fx.GraphModule, flat_state: list[torch.Tensor]) -> fx.GraphModule:
        """Edit the partitioned graph, once per program.

        ``flat_state`` are the live local state tensors that map, in order, to the first ``len(flat_state)``
        placeholders; both may be added to and removed from. The outputs keep their number and order.
        """
        return gm


@contextmanager
def replaced(
    modules: dict[str, nn.Module], overrides: Sequence[Override], watch: AbstractContextManager[None]
) -> Iterator[None]:
    """Replace modules as the overrides say, for the length of a trace. They are asked inside of ``watch``."""
    undo: list[tuple[dict[str, Any], str, nn.Module]] = []
    try:
        with watch:
            for module in modules.values():
                _replace_in(module, "", overrides, undo, set())
        yield
    finally:
        for holder, key, original in reversed(undo):
            holder[key] = original


def _replace_in(
    module: nn.Module,
    prefix: str,
    overrides: Sequence[Override],
    undo: list[tuple[dict[str, Any], str, nn.Module]],
    seen: set[int],
) -> None:
    if id(module) in seen:
        return
    seen.add(id(module))
    for key, child in list(own_children(module).items()):
        if child is None:
            continue
        fqn = f"{prefix}{key}"
        new = _replacement(fqn, child, overrides)
        if new is child:
            _replace_in(child, f"{fqn}.", overrides, undo, seen)
        else:
            undo.append((own_children(module), key, child))
            own_children(module)[key] = new


def _replacement(fqn: str, child: nn.Module, overrides: Sequence[Override]) -> nn.Module:
    for override in overrides:
        with errors_of(CaptureError, f"{type(override).__name__}.replacement, asked for {fqn},"):
            new = override.replacement(fqn, child)
        if not isinstance(new, nn.Module):
            raise TypeError(f"expected {type(override).__name__}.replacement({fqn!r}) to return a module, got {new!r}")
        if new is not child:
            return new
    return child


def transform(
    program: Program, overrides: Sequence[Override], local_state: Callable[[], Sequence[torch.Tensor]]
) -> tuple[Program, dict[str, torch.Tensor]]:
    """Run the overrides' transforms on ``program`` and its state, which is asked for only if there are any.

    Returns the program, with the inputs that the transforms left, and the state that they added, by input name.
    """
    transforming = [override for override in overrides if type(override).transform is not Override.transform]
    if not transforming:
        return program, {}
    if program.earlier:
        raise PassError(
            f"expected rows that {len(program.in_order())} micro-batches divide, since "
            f"{type(transforming[0]).__name__}.transform edits one graph, and parts of other lengths have their own: "
            "pass batches that divide evenly, or drop the last one"
        )
    state = local_state()
    flat_state = list(state)
    for override in transforming:
        before = list(flat_state)
        who = type(override).__name__
        with errors_of(PassError, f"{who}.transform"):
            module = override.transform(program.graph_module, flat_state)
        program = _take_over(program, module, before, flat_state, who)
    known = {id(tensor) for tensor in state}
    named = zip(program.inputs, flat_state, strict=False)
    return program, {declared.name: tensor for declared, tensor in named if id(tensor) not in known}


def transform_graph_module(
    program: Program, transformation: Callable[[fx.GraphModule], fx.GraphModule] | None
) -> Program:
    """``program`` with the graph that the user's ``gm_transformation`` returns; the same for all that a call runs."""
    return program if transformation is None else program.map(partial(_transformed, transformation=transformation))


def _transformed(program: Program, transformation: Callable[[fx.GraphModule], fx.GraphModule]) -> Program:
    with errors_of(PassError, f"gm_transformation={named_at(transformation)}"):
        module = transformation(program.graph_module)
    if not isinstance(module, fx.GraphModule):
        raise PassError(f"expected gm_transformation to return a GraphModule, got {module!r}")
    return replace(program, graph_module=module, history=[*program.history, "98 gm_transformation"])


def _take_over(
    program: Program, module: Any, before: list[torch.Tensor], after: list[torch.Tensor], who: str
) -> Program:
    if not isinstance(module, fx.GraphModule):
        raise PassError(f"expected {who}.transform to return a GraphModule, got {module!r}")
    returned = len(output_values(module.graph))
    if returned != len(program.outputs):
        raise PassError(f"{who}.transform changed the number of outputs from {len(program.outputs)} to {returned}")
    known = {id(tensor): declared for tensor, declared in zip(before, program.inputs, strict=False)}
    state = [known.get(id(t)) or _unknown(k, t) for k, t in enumerate(after)]
    inputs = [*state, *program.inputs[len(before) :]]
    placeholders = module.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(inputs):
        raise PassError(
            f"after {who}.transform the graph has {len(placeholders)} placeholders, but flat_state and the arguments "
            f"are {len(inputs)}: add to or remove from both"
        )
    program.graph_module, program.inputs = module, inputs
    program.history.append(f"01 {who}.transform")
    fill_vals(program)
    module.graph.lint()
    module.recompile()
    return program


def _unknown(index: int, tensor: torch.Tensor) -> Input:
    return Input(Role.UNKNOWN, f"flat_state.{index}", tuple(tensor.shape), tensor.dtype)
