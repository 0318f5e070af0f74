"""Branches on state: conditions on 0-dim state, evaluated while tracing and again at every call.

``if self.n_averaged == 0`` is a branch on a tensor, which a graph cannot hold. But where the tensor is computed from
0-dim state alone, its value can be computed before the step runs. The trace takes the branch that the live state
selects, and guards the condition: for another value another program is compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from passes.analysis.reachability import ancestors

from .._torch import TorchDispatchMode, disable_modes, get_proxy_mode
from ..call.state import Slot
from .provenance import proxy_node
from .values.value_checks import is_check

aten = torch.ops.aten
_READ_VALUE = (aten.is_nonzero.default, aten._local_scalar_dense.default)


@dataclass(frozen=True)
class Branch:
    """One condition: the state it reads, its graph, and the value for which the step was traced."""

    reads: tuple[str, ...]  # names of state
    condition: fx.GraphModule
    taken: bool

    def holds(self, state: Mapping[str, Tensor]) -> bool:
        """Whether a call with this state takes the same branch."""
        return _evaluate(self.condition, [state[name] for name in self.reads]) is self.taken


class StateBranches(TorchDispatchMode):
    """Evaluates conditions on 0-dim state from live state while ``make_fx`` traces, and collects them in ``found``.

    Make it before fakes replace the state.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.scalars = {k: (slot.input.name, slot.get()) for k, slot in enumerate(slots) if not slot.input.shape}
        self.found: list[Branch] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READ_VALUE and args[0].dtype is torch.bool:
            if is_check(sys._getframe(1)):
                return False
            branch = self._branch(args[0])
            if branch is not None:
                self.found.append(branch)
                return branch.taken
        return func(*args, **(kwargs or {}))

    def _branch(self, tensor: Tensor) -> Branch | None:
        """The branch on ``tensor``, or None if it is computed from anything but 0-dim state."""
        mode = get_proxy_mode()
        node = proxy_node(tensor, mode.tracer) if mode is not None else None
        if node is None:
            return None
        placeholders = node.graph.find_nodes(op="placeholder")
        scalars = {placeholders[k]: named for k, named in self.scalars.items()}
        needed = ancestors([node])
        read = [n for n in placeholders if n in needed]
        computed = all(n.op == "call_function" for n in needed if n not in scalars)
        if not read or not computed:
            return None
        condition = extract(node, needed, read)
        taken = _evaluate(condition, [scalars[n][1] for n in read])
        return Branch(tuple(scalars[n][0] for n in read), condition, taken)


def extract(node: fx.Node, needed: set[fx.Node], read: Sequence[fx.Node]) -> fx.GraphModule:
    """The part of the graph that computes ``node`` from ``read``, as a graph of its own."""
    graph = fx.Graph()
    copies = {each: graph.placeholder(each.name) for each in read}
    for each in node.graph.nodes:
        if each in needed and each.op == "call_function":
            copies[each] = graph.node_copy(each, copies.__getitem__)
    graph.output(copies[node])
    return fx.GraphModule(torch.nn.Module(), graph)


def _evaluate(condition: fx.GraphModule, tensors: Sequence[Tensor]) -> bool:
    """The value of a condition, on clones of ``tensors``, since the extracted part of the step may write."""
    with disable_modes(), torch.no_grad():
        return bool(condition(*(tensor.clone() for tensor in tensors)))
