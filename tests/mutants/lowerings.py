"""Wrong versions of what turns a program into a function over live memory, each of one step of that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from spmd.lowering import codegen, lower
from spmd.lowering.arenas import Arenas

aten = torch.ops.aten
WRITE, ARGUMENTS, IS_FIXED, DIRECT = (
    codegen._Writer._write,
    codegen._Writer._arguments,
    codegen._Writer._is_fixed,
    codegen.direct,
)


@dataclass(frozen=True)
class Lowering:
    """A function of the lowering, a wrong version of it, and the options of a step that it lowers."""

    owner: Any
    name: str
    wrong: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    mode: dict[str, Any] = field(default_factory=dict)


def without_an_op(self: Any, node: fx.Node) -> None:
    """Dropped: the function does not run one kind of op, and finds in its result what was there before."""
    if node.target is not aten.tanh.out:
        WRITE(self, node)
    else:
        self.each_call.append(f"{self.names[node]} = {self._value(node.kwargs['out'])}")


def computed_once(self: Any, node: fx.Node) -> bool:
    """Stale: what depends on state alone is computed when the program is bound, though state changes."""
    inputs = node.all_input_nodes
    return IS_FIXED(self, node) or (bool(inputs) and node.op != "output" and self._all_fixed(inputs))


def in_another_order(self: Any, node: fx.Node, skip: int = 0) -> str:
    """Swapped: two tensors among the arguments."""
    if node.target in (aten.sub.Tensor, aten.sub.out, aten.div.out):
        node.args = (node.args[1], node.args[0], *node.args[2:])
    return ARGUMENTS(self, node, skip)


def another_function(node: fx.Node) -> Callable[..., Any]:
    """Swapped: the function that stands for an op computes something else."""
    return torch.sigmoid if node.target in (aten.tanh.out, aten.tanh.default) else DIRECT(node)


def without_memory(self: Arenas, nbytes: int, *rest: Any) -> torch.Tensor:
    """Off by one: memory is too short by a value."""
    return torch.empty(nbytes - 8, dtype=torch.uint8)


def negated(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    """A backend that computes something else."""
    return lambda *args: [-each for each in gm(*args)]


LOWERINGS: dict[str, Lowering] = {
    "an op is dropped": Lowering(codegen._Writer, "_write", without_an_op),
    "an op is stale": Lowering(codegen._Writer, "_is_fixed", computed_once),
    "arguments are swapped": Lowering(codegen._Writer, "_arguments", in_another_order, {"passes": ()}),
    "functions are swapped": Lowering(codegen, "direct", another_function),
    "memory is too short": Lowering(Arenas, "reserve", without_memory),
    "accumulators are stale": Lowering(lower, "empty_accumulators", lambda *_: None, mode={"micro_batches": 2}),
    "regions are wrong": Lowering(codegen, "direct", DIRECT, {"backend": negated}),
}
"""By what is wrong. The numbers of the step catch all, or an error."""
