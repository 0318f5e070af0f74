"""Match the updates of parameters with torch's fused kernels, and group them: the analysis behind ``FuseUpdate``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..analysis.strides import Layouts
from ..ir.program import Input, OutputKind, Program
from ..ir.roles import Role
from .formula_terms import Bindings, solutions
from .optimizer_kernels import Kernel, kernels

aten = torch.ops.aten

_KERNELS = [each for each in kernels() if not each.options.get("is_first_step")]  # a step is compiled for all others


@dataclass(frozen=True)
class Match:
    """One parameter's update: the kernel that computes it, from which values (``found``), and its new values.

    Where ``unless`` holds, a tensor without dims, all but the count stays as it was (a skipped step); ``new`` has the
    count as it is before that is selected.
    """

    parameter: Input
    kernel: Kernel
    found: Bindings
    new: dict[str, fx.Node]  # by the name of the list
    unless: fx.Node | None = None


def groups(program: Program) -> list[list[Match]]:
    """The matches that one op can compute: same kernel, dtype, device, placement, hyper-parameters and unit.

    Groups are in the order in which their last gradient is computed, matches in the order of the inputs.
    """
    position = {node: k for k, node in enumerate(program.graph.nodes)}
    unit = {name: k for k, names in enumerate(program.units) for name in names}
    everything = matches(program)
    depth = _depths(program.graph, everything)
    found: dict[Hashable, list[Match]] = defaultdict(list)
    for match in everything:
        found[(depth[match.parameter.name], unit.get(match.parameter.name), *_key(match))].append(match)
    return sorted(found.values(), key=lambda group: max(position[match.found["g"]] for match in group))


def matches(program: Program) -> list[Match]:
    """The update of each parameter that a kernel computes."""
    matcher = _Matcher(program)
    return [match for declared in matcher.declared if (match := matcher.match(declared)) is not None]


def _depths(graph: fx.Graph, everything: list[Match]) -> dict[str, int]:
    """By parameter, the number of updates that its own depends on, one after the other.

    Where one optimizer's gradients depend on another's new parameters, the two are not grouped.
    """
    new = {node for match in everything for node in match.new.values()}
    depth: dict[fx.Node, int] = {}
    for node in graph.nodes:
        depth[node] = max((depth[needed] for needed in node.all_input_nodes), default=0) + (node in new)
    return {
        match.parameter.name: max(depth[value] for value in match.found.values() if isinstance(value, fx.Node))
        for match in everything
    }


class _Matcher:
    """Matches one parameter after the other; the kernel that matched last is tried first."""

    def __init__(self, program: Program) -> None:
        values = program.values()
        self.layouts = Layouts(program.graph)
        self.declared = [declared for declared, _ in values.values()]
        self.nodes = {name: node for name, (_, node) in values.items()}
        self.new = {
            output.name: value
            for output, value in zip(program.outputs, program.output_values(), strict=True)
            if output.kind is OutputKind.UPDATE and isinstance(value, fx.Node)
        }
        # A rank may update a part of a parameter that every rank has whole; in a stage also one that another program
        # reads, of which this one has what that computed.
        self.nodes |= _by_name(program.graph, "part_of")
        self.new |= {name: new for name, new in _by_name(program.graph, "update_of").items() if name in self.nodes}
        self.state: dict[str, list[Input]] = defaultdict(list)
        for declared in self.declared:
            if declared.role is Role.OPTIMIZER_STATE and declared.of is not None and declared.name in self.new:
                self.state[declared.of].append(declared)
        self.names = {node: name for name, node in self.nodes.items()}
        self.selected = {name: _selected(value, self.nodes[name]) for name, value in self.new.items()}
        self.computed = {computed for _, computed in self.selected.values()}
        self.order = list(_KERNELS)

    def match(self, declared: Input) -> Match | None:
        """The kernel that computes the update of an input, and from what; None if there is none."""
        node, new = self.nodes[declared.name], self.new.get(declared.name)
        if declared.role is not Role.PARAMETER or new is None or not self.layouts.is_contiguous(node):
            return None  # kernels take dense memory only
        for kernel in self.order:
            match = self._match_kernel(declared, kernel) if kernel.computes(node.meta["val"]) else None
            if match is not None:
                self.order.sort(key=lambda each: each is not kernel)
                return match
        return None

    def _match_kernel(self, declared: Input, kernel: Kernel) -> Match | None:
        own = {self.nodes[each.name] for each in self.state[declared.name]}
        node = self.nodes[declared.name]

        def admits(name: str, value: Any) -> bool:
            return _admits(kernel, name, value, node, own, self.layouts)

        unless, computed = self.selected[declared.name]
        for found in solutions(kernel.updates["p"], computed, {"p": node}, admits, self.computed):
            names = {"p": declared.name} | {name: self.names[found[name]] for name in kernel.state}
            if all(self._is(kernel, name, self.selected[own], found, unless) for name, own in names.items()):
                new = {name: self.new[own] for name, own in names.items()}
                if kernel.counts is not None:
                    new[kernel.counts] = self.selected[names[kernel.counts]][1]
                return Match(declared, kernel, found, new, unless)
        return None

    def _is(
        self, kernel: Kernel, name: str, new: tuple[fx.Node | None, fx.Node], found: Bindings, unless: fx.Node | None
    ) -> bool:
        """Whether a new value is the kernel's, and selected as the parameter is."""
        selected, computed = new
        if selected is not unless and name != kernel.counts:
            return False
        return any(True for _ in solutions(kernel.updates[name], computed, found, _admits_nothing, self.computed))


def _admits(kernel: Kernel, name: str, value: Any, parameter: fx.Node, own: set[fx.Node], layouts: Layouts) -> bool:
    """Whether an unknown of a kernel may be bound to ``value`` in the update of ``parameter``."""
    val: Any = value.meta.get("val") if isinstance(value, fx.Node) else value
    if name == kernel.counts:
        here = parameter.meta["val"].device  # the kernels of a GPU cannot read counts that the CPU keeps
        return value in own and val.ndim == 0 and val.dtype is torch.float32 and val.device == here
    if name in kernel.state:
        return value in own and _same_type(val, parameter.meta["val"]) and layouts.is_contiguous(value)
    if name == "g":
        return _same_type(val, parameter.meta["val"])
    return isinstance(val, (float, int, torch.SymFloat)) and not isinstance(val, bool)


def _selected(value: fx.Node, old: fx.Node) -> tuple[fx.Node | None, fx.Node]:
    """(the condition under which the old value is kept, the new value else); None if it is never kept."""
    chosen = value
    while chosen.target is aten.copy.default:
        chosen = chosen.all_input_nodes[-1]
    if chosen.target is not aten.where.self:
        return None, value
    condition, kept, new = chosen.args
    while isinstance(kept, fx.Node) and kept.target is aten.clone.default:
        kept = kept.args[0]
    if kept is not old or not isinstance(condition, fx.Node) or not isinstance(new, fx.Node):
        return None, value
    flag, val = condition.meta["val"], value.meta["val"]
    return (condition, new) if flag.ndim == 0 and flag.device == val.device else (None, value)


def _admits_nothing(name: str, value: Any) -> bool:
    """All unknowns are bound by the parameter's own update."""
    return False


def _by_name(graph: fx.Graph, key: str) -> dict[str, fx.Node]:
    """The last node of each parameter that ``key`` in its ``meta`` names."""
    return {node.meta[key]: node for node in graph.nodes if key in node.meta}


def _same_type(val: Any, other: torch.Tensor) -> bool:
    return isinstance(val, torch.Tensor) and (val.shape, val.dtype, val.device) == (
        other.shape,
        other.dtype,
        other.device,
    )


def _key(match: Match) -> tuple[Hashable, ...]:
    val = match.found["p"].meta["val"]
    numbers = tuple(_number(match.found, option) for option in match.kernel.options.values())
    kernel = (match.kernel.op, tuple(match.new))
    return match.unless, val.dtype, val.device, tuple(map(str, match.parameter.placement)), kernel, numbers


def _number(found: Bindings, option: Any) -> Hashable:
    """The op's argument for an option: a node, or a number with its type."""
    value = found[option] if isinstance(option, str) else option
    return value if isinstance(value, fx.Node) else (type(value), repr(value))
