"""Which parameters are updated by one of torch's fused kernels, and together: the analysis behind ``FuseUpdate``."""

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
from .optimizer_formulas import Kernel, kernels
from .terms import Found, solutions

aten = torch.ops.aten

_KERNELS = tuple(kernels())
_DTYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


@dataclass(frozen=True)
class Chain:
    """One parameter's update: what computes it, from which values (``found``), and the nodes of its new values.

    Where ``unless`` holds, a tensor without dims, all but the count stays as it was (a skipped step); the new count in
    ``new`` is the one before that is decided.
    """

    parameter: Input
    kernel: Kernel
    found: Found
    new: dict[str, fx.Node]  # by the name of the list
    unless: fx.Node | None = None


def groups(program: Program) -> list[list[Chain]]:
    """The chains that one op can do: same kernel, dtype, device, placement, hyper-parameters and unit.

    Groups stand in the order in which their last gradient comes about, chains in the order of the inputs.
    """
    position = {node: k for k, node in enumerate(program.graph.nodes)}
    unit = {name: k for k, names in enumerate(program.units) for name in names}
    everything = chains(program)
    turn = _turns(program.graph, everything)
    found: dict[Hashable, list[Chain]] = defaultdict(list)
    for chain in everything:
        found[(turn[chain.parameter.name], unit.get(chain.parameter.name), *_key(chain))].append(chain)
    return sorted(found.values(), key=lambda group: max(position[chain.found["g"]] for chain in group))


def chains(program: Program) -> list[Chain]:
    """The update of each parameter that a kernel computes."""
    reader = _Reader(program)
    return [chain for declared in reader.declared if (chain := reader.chain(declared)) is not None]


def _turns(graph: fx.Graph, everything: list[Chain]) -> dict[str, int]:
    """By parameter, how many updates come one after the other before its own can begin.

    Where one optimizer's new parameters lead to another's gradients, the two do not go together.
    """
    new = {node for chain in everything for node in chain.new.values()}
    depth: dict[fx.Node, int] = {}
    for node in graph.nodes:
        depth[node] = max((depth[needed] for needed in node.all_input_nodes), default=0) + (node in new)
    return {
        chain.parameter.name: max(depth[value] for value in chain.found.values() if isinstance(value, fx.Node))
        for chain in everything
    }


class _Reader:
    """Looks for the kernel of one parameter after the other; the one that fitted last is tried first."""

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
        # Of what every rank has whole, a rank may update a part.
        self.nodes |= _by_name(program.graph, "part_of")
        self.new |= _by_name(program.graph, "update_of")
        self.state: dict[str, list[Input]] = defaultdict(list)
        for declared in self.declared:
            if declared.role is Role.OPTIMIZER_STATE and declared.of is not None and declared.name in self.new:
                self.state[declared.of].append(declared)
        self.names = {node: name for name, node in self.nodes.items()}
        self.selected = {name: _selected(value, self.nodes[name]) for name, value in self.new.items()}
        self.computed = {computed for _, computed in self.selected.values()}
        self.order = list(_KERNELS)

    def chain(self, declared: Input) -> Chain | None:
        node, new = self.nodes[declared.name], self.new.get(declared.name)
        if declared.role is not Role.PARAMETER or new is None or not _fits(node, self.layouts):
            return None
        for kernel in self.order:
            chain = self._chain_of(declared, kernel)
            if chain is not None:
                self.order.sort(key=lambda each: each is not kernel)
                return chain
        return None

    def _chain_of(self, declared: Input, kernel: Kernel) -> Chain | None:
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
                return Chain(declared, kernel, found, new, unless)
        return None

    def _is(
        self, kernel: Kernel, name: str, new: tuple[fx.Node | None, fx.Node], found: Found, unless: fx.Node | None
    ) -> bool:
        """Whether a new value is the kernel's, and selected as the parameter is."""
        selected, computed = new
        if selected is not unless and name != kernel.counts:
            return False
        return any(True for _ in solutions(kernel.updates[name], computed, found, _nothing, self.computed))


def _admits(kernel: Kernel, name: str, value: Any, parameter: fx.Node, own: set[fx.Node], layouts: Layouts) -> bool:
    """Whether an unknown of a kernel may stand for ``value`` in the update of ``parameter``."""
    val: Any = value.meta.get("val") if isinstance(value, fx.Node) else value
    if name == kernel.counts:
        here = parameter.meta["val"].device  # the kernels of a GPU cannot read counts that the CPU keeps
        return value in own and val.ndim == 0 and val.dtype is torch.float32 and val.device == here
    if name in kernel.state:
        return value in own and _alike(val, parameter.meta["val"]) and layouts.is_contiguous(value)
    if name == "g":
        return _alike(val, parameter.meta["val"])
    return isinstance(val, (float, int, torch.SymFloat)) and not isinstance(val, bool)


def _selected(value: fx.Node, old: fx.Node) -> tuple[fx.Node | None, fx.Node]:
    """(where the old value is kept, the new value elsewhere); None if it is new everywhere."""
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
    said, val = condition.meta["val"], value.meta["val"]
    return (condition, new) if said.ndim == 0 and said.device == val.device else (None, value)


def _nothing(name: str, value: Any) -> bool:
    """All unknowns are known from the parameter's own update."""
    return False


def _by_name(graph: fx.Graph, key: str) -> dict[str, fx.Node]:
    """The last node of each parameter that ``key`` in its ``meta`` names."""
    return {node.meta[key]: node for node in graph.nodes if key in node.meta}


def _fits(node: fx.Node, layouts: Layouts) -> bool:
    """Whether the kernels take this parameter, or a rank's part of it: they know only dense memory."""
    return layouts.is_contiguous(node) and node.meta["val"].dtype in _DTYPES


def _alike(val: Any, other: torch.Tensor) -> bool:
    return isinstance(val, torch.Tensor) and (val.shape, val.dtype, val.device) == (
        other.shape,
        other.dtype,
        other.device,
    )


def _key(chain: Chain) -> tuple[Hashable, ...]:
    val = chain.found["p"].meta["val"]
    numbers = tuple(_number(chain.found, said) for said in chain.kernel.options.values())
    kernel = (chain.kernel.op, tuple(chain.new))
    return chain.unless, val.dtype, val.device, tuple(map(str, chain.parameter.placement)), kernel, numbers


def _number(found: Found, said: Any) -> Hashable:
    """What the op is given: a node, or a number told from others by its type."""
    value = found[said] if isinstance(said, str) else said
    return value if isinstance(value, fx.Node) else (type(value), repr(value))
