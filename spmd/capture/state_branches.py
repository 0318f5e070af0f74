"""Branches on state: conditions on small state, answered while tracing and asked again at every call.

``if self.n_averaged == 0`` is a branch on a tensor, which a graph cannot hold. But where the tensor follows from state
without dims alone, its value is at hand before the step runs. The trace takes the way that the live state says, and the
program runs only while the answer stays the same; another answer is another program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import TorchDispatchMode, disable_modes, get_proxy_mode
from ..call.state import Slot
from .provenance import proxy_node

aten = torch.ops.aten
_ASKS = (aten.is_nonzero.default, aten._local_scalar_dense.default)


@dataclass(frozen=True)
class Branch:
    """One condition: what it reads, how it is computed, and which way the trace took."""

    reads: tuple[str, ...]  # state, by name
    condition: fx.GraphModule
    taken: bool

    def holds(self, state: Mapping[str, Tensor]) -> bool:
        """Whether a call with this state takes the same way."""
        return _answer(self.condition, [state[name] for name in self.reads]) is self.taken


class StateBranches(TorchDispatchMode):
    """Answers conditions on small state from live state while ``make_fx`` traces, and keeps them in ``found``.

    Make it before fakes stand in for the state.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.small = {k: (slot.input.name, slot.get()) for k, slot in enumerate(slots) if not slot.input.shape}
        self.found: list[Branch] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKS and args[0].dtype is torch.bool:
            branch = self._branch(args[0])
            if branch is not None:
                self.found.append(branch)
                return branch.taken
        return func(*args, **(kwargs or {}))

    def _branch(self, tensor: Tensor) -> Branch | None:
        """The condition that ``tensor`` is, unless it follows from other things than small state."""
        mode = get_proxy_mode()
        node = proxy_node(tensor, mode.tracer) if mode is not None else None
        if node is None:
            return None
        placeholders = node.graph.find_nodes(op="placeholder")
        small = {placeholders[k]: named for k, named in self.small.items()}
        needed = ancestors(node)
        read = [n for n in placeholders if n in needed]
        computed = all(n.op == "call_function" for n in needed if n not in small)
        if not read or not computed:
            return None
        condition = cut_out(node, needed, read)
        taken = _answer(condition, [small[n][1] for n in read])
        return Branch(tuple(small[n][0] for n in read), condition, taken)


def ancestors(node: fx.Node) -> set[fx.Node]:
    """``node`` and all that it follows from."""
    needed: set[fx.Node] = set()
    pending = [node]
    while pending:
        each = pending.pop()
        if each not in needed:
            needed.add(each)
            pending += each.all_input_nodes
    return needed


def cut_out(node: fx.Node, needed: set[fx.Node], read: Sequence[fx.Node]) -> fx.GraphModule:
    """The part of the graph that computes ``node``, as a graph of its own."""
    graph = fx.Graph()
    copies = {each: graph.placeholder(each.name) for each in read}
    for each in node.graph.nodes:
        if each in needed and each.op == "call_function":
            copies[each] = graph.node_copy(each, copies.__getitem__)
    graph.output(copies[node])
    return fx.GraphModule(torch.nn.Module(), graph)


def _answer(condition: fx.GraphModule, tensors: Sequence[Tensor]) -> bool:
    """The value of a condition; it works on clones, since the part of the step that it is cut from may write."""
    with disable_modes(), torch.no_grad():
        return bool(condition(*(tensor.clone() for tensor in tensors)))
