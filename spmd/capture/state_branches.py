"""Branches on state: conditions on 0-dim state, evaluated while tracing and again at every call.

``if self.n_averaged == 0`` is a branch on a tensor, which a graph cannot hold. But where the tensor is computed from
0-dim state, a buffer of one element, or tensors that are no inputs (plain attributes), alone, its value can be computed
before the step runs. The trace takes the branch that the live state selects, and guards the condition: for another
value another program is compiled.

``self.initialized.item()`` is a symbol, which the step may log. If it branches on that, the step is traced again with
the value in its place (``fixed``), and the value is guarded. State that each call changes by itself, such as a counter,
would need a program for each value: that is refused.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from passes import Input, Role
from passes.analysis.reachability import ancestors, arguments_of
from passes.ir.ops import Trait, has
from passes.ir.schemas import schema

from .._torch import (
    GuardOnDataDependentSymNode,
    OpOverload,
    TorchDispatchMode,
    disable_modes,
    get_proxy_mode,
    tree_flatten,
)
from ..call.refusals import refuse
from ..call.state import Slot
from ..interpreter.source_lines import user_line
from .provenance import proxy_node
from .tensor_attributes import is_users
from .unsupported import Refused
from .values.value_checks import is_check

aten = torch.ops.aten
_READ_VALUE = (aten.is_nonzero.default, aten._local_scalar_dense.default)


@dataclass(frozen=True)
class Branch:
    """One condition, or number: the state it reads, its graph, and the value for which the step was traced."""

    reads: tuple[str, ...]  # names of state
    condition: fx.GraphModule
    taken: bool | int | float

    def holds(self, state: Mapping[str, Tensor]) -> bool:
        """Whether a call with this state takes the same branch."""
        return _evaluate(self.condition, [state[name] for name in self.reads]) == self.taken


class StateBranches(TorchDispatchMode):
    """Evaluates conditions on 0-dim state from live state while ``make_fx`` traces, and collects them in ``found``.

    Make it before fakes replace the state. ``fixed``: which of the numbers that the step takes out of tensors are.
    """

    def __init__(self, slots: Sequence[Slot], fixed: Collection[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.scalars = {k: (slot.input.name, slot.get()) for k, slot in enumerate(slots) if _is_scalar(slot.input)}
        self.found: list[Branch] = []
        self._fixed = fixed
        self._lines: dict[str, str] = {}  # at which the step takes the numbers that are fixed, by state
        self._numbers: list[Any] = []  # symbols of all that the step has taken, None where it is fixed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READ_VALUE and args[0].dtype is torch.bool:
            if is_check(sys._getframe(1)):
                return False
            branch = self._branch(args[0])
            if branch is not None:
                self.found.append(branch)
                return branch.taken
        if func is not aten._local_scalar_dense.default:
            return func(*args, **(kwargs or {}))
        branch = self._branch(args[0]) if len(self._numbers) in self._fixed else None
        if branch is not None:
            self.found.append(branch)
            self._numbers.append(None)
            self._lines |= dict.fromkeys(branch.reads, user_line(sys._getframe(1)))
            return branch.taken
        number = func(*args, **(kwargs or {}))
        is_of_state = isinstance(number, (torch.SymInt, torch.SymFloat)) and self._read_by(args[0]) is not None
        self._numbers.append(number.node.expr if is_of_state else None)
        return number

    def branched_on(self, error: Exception) -> set[int]:
        """The numbers taken out of state whose value the step asked for when it raised ``error``."""
        condition = error.cond if isinstance(error, GuardOnDataDependentSymNode) else None
        symbols = condition.free_symbols if condition is not None else ()
        numbers = enumerate(self._numbers)
        return {k for k, number in numbers if number is not None and not number.free_symbols.isdisjoint(symbols)}

    def check_end(self, values: Sequence[Any]) -> None:
        """Raise ``Refused`` for a number of state that the step changes by itself. ``values``: of state, at the end."""
        mode = get_proxy_mode()
        placeholders = {name: k for k, (name, _) in self.scalars.items()}
        for name in {name for branch in self.found if type(branch.taken) is not bool for name in branch.reads}:
            node = proxy_node(values[placeholders[name]], mode.tracer) if mode is not None else None
            if node is not None and _follows_from(node, node.graph.find_nodes(op="placeholder")[placeholders[name]]):
                refuse(
                    Refused,
                    f"it branches on the value of {name}{self._at(name)}, which is another one at each call. Compare "
                    f"the tensor itself (if {name.rpartition('.')[2]} == 0, not .item() or int(...)), or count in a "
                    "plain attribute (self.calls += 1), and branch on that.",
                )

    def _at(self, name: str) -> str:
        return f" at {line}" if (line := self._lines.get(name)) else ""

    def _branch(self, tensor: Tensor) -> Branch | None:
        """The branch on ``tensor``, or None if it is computed from anything but 0-dim state and constants."""
        found = self._read_by(tensor)
        if found is None:
            return None
        node, needed, read, scalars, constants = found
        condition = extract(node, needed, read, constants)
        taken = _evaluate(condition, [scalars[n][1] for n in read])
        return Branch(tuple(scalars[n][0] for n in read), condition, taken)

    def _read_by(self, tensor: Tensor) -> _Read | None:
        """The part of the graph that computes ``tensor`` from 0-dim state and tensors of the user's, or None."""
        mode = get_proxy_mode()
        node = proxy_node(tensor, mode.tracer) if mode is not None else None
        if mode is None or node is None:
            return None
        placeholders = node.graph.find_nodes(op="placeholder")
        scalars = {placeholders[k]: named for k, named in self.scalars.items()}
        needed = with_writes(ancestors([node]))  # one element may be written through a view of its own
        read = [n for n in placeholders if n in needed]
        constants = known_constants(needed, mode)
        computed = all(n.op == "call_function" for n in needed if n not in scalars and n not in constants)
        is_live = read or any(map(is_users, constants.values()))
        return (node, needed, read, scalars, constants) if is_live and computed else None


_Read = tuple[fx.Node, set[fx.Node], list[fx.Node], dict[fx.Node, tuple[str, Tensor]], dict[fx.Node, Tensor]]
_OVERWRITING = {aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, aten.copy_.default}


def _is_scalar(declared: Input) -> bool:
    return not declared.shape or (declared.role is Role.BUFFER and math.prod(declared.shape) == 1)


def _follows_from(node: fx.Node, source: fx.Node) -> bool:
    """Whether a value is computed from another, rather than written over it."""
    pending, seen = [node], set[fx.Node]()
    while pending:
        each = pending.pop()
        if each is source and each is not node:
            return True
        if each not in seen:
            seen.add(each)
            pending += each.all_input_nodes[1:] if each.target in _OVERWRITING else each.all_input_nodes
    return False


def with_writes(needed: set[fx.Node], reads: Callable[[fx.Node], Iterable[fx.Node]] = arguments_of) -> set[fx.Node]:
    """These nodes, the ops that write into one of them, or into a view of one, and what those ``reads``."""
    graph = next(iter(needed)).graph
    while True:
        views, found = set(needed), set[fx.Node]()
        for node in graph.nodes:
            if node in needed:
                continue
            is_op = isinstance(node.target, OpOverload)
            is_view = node.target is operator.getitem or (is_op and has(node.target, Trait.VIEW))
            if is_view and not views.isdisjoint(node.all_input_nodes[:1]):
                views.add(node)
            elif is_op and has(node.target, Trait.MUTABLE) and not views.isdisjoint(_written(node)):
                found |= ancestors([node], reads)
        if found <= needed:
            return needed
        needed = needed | found


def _written(node: fx.Node) -> list[fx.Node]:
    """The nodes that an op writes into."""
    assert isinstance(node.target, OpOverload)
    described = schema(node.target)
    given = {**node.kwargs, **dict(zip(described.names, node.args, strict=False))}
    return [leaf for each in described.arguments if each.written for leaf in tree_flatten(given.get(each.name))[0]]


def known_constants(nodes: set[fx.Node], mode: Any) -> dict[fx.Node, Tensor]:
    """Those of ``nodes`` that are tensors of known values, each with that."""
    found = {each: getattr(mode.tracer.root, str(each.target), None) for each in nodes if each.op == "get_attr"}
    return {each: value for each, value in found.items() if isinstance(value, Tensor)}


def own_constants(nodes: set[fx.Node], mode: Any) -> dict[fx.Node, Tensor]:
    """Those of them that the step itself made."""
    return {each: value for each, value in known_constants(nodes, mode).items() if not is_users(value)}


def extract(
    node: fx.Node, needed: set[fx.Node], read: Sequence[fx.Node], constants: Mapping[fx.Node, Tensor] | None = None
) -> fx.GraphModule:
    """The part of the graph that computes ``node`` from ``read`` and ``constants``, as a graph of its own."""
    graph, root = fx.Graph(), torch.nn.Module()
    copies = {each: graph.placeholder(each.name) for each in read}
    for each, value in (constants or {}).items():
        root.register_buffer(str(each.target), value)
    for each in node.graph.nodes:
        if each in needed and each not in copies:
            copies[each] = graph.node_copy(each, copies.__getitem__)
    graph.output(copies[node])
    return fx.GraphModule(root, graph)


def _evaluate(condition: fx.GraphModule, tensors: Sequence[Tensor]) -> bool | int | float:
    """The value of a condition, on clones of ``tensors``, since the extracted part of the step may write."""
    with disable_modes(), torch.no_grad():
        value: bool | int | float = condition(*(tensor.clone() for tensor in tensors)).item()
    return value
