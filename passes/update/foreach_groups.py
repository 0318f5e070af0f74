"""Structurally equal ops of an update, grouped: the analysis behind ``FuseForeach``.

An op over a list is the op on each entry, and a pointwise op on numbers in a row is the op on each number. So any two
structurally equal updates may share it: their values need not be equal.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from ..ir import ops
from ..ir.effects import is_pure
from ..ir.ops import Trait, has
from ..ir.program import Program
from ..ir.roles import Phase, Role
from ..ir.schemas import is_tensor
from .optimizer_kernels import kernels

aten = torch.ops.aten

Group = list[fx.Node]

_PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar}
_KERNELS = {op for kernel in kernels() for op in (kernel.op, kernel.op_with_tensor)}


def over_lists(node: fx.Node) -> Any:
    """The op that does to lists what ``node`` does to tensors of one device; None if there is none."""
    among_tensors, with_number = ops.over_lists(node.target)
    if not node.args or not is_tensor(node.args[0]):
        return None
    if len({each.meta["val"].device for each in node.all_input_nodes if is_tensor(each)}) > 1:
        return None
    if len(node.args) < 2 or is_tensor(node.args[1]):
        return among_tensors
    return with_number if not node.kwargs and not _is_rounded_over_lists(node) else None


def _is_rounded_over_lists(node: fx.Node) -> bool:
    """Whether the in-place op over lists rounds the number to the tensors' dtype first, as no other variant does."""
    dtype = node.meta["val"].dtype
    return node.target in _PRODUCTS and dtype.is_floating_point and dtype.itemsize < 4


def in_a_row(node: fx.Node) -> bool:
    """Whether ``node`` computes a tensor without dims from such tensors, as it would from rows of them."""
    if not has(node.target, Trait.POINTWISE_KERNEL) and node.target is not aten._to_copy.default:
        return False
    operands = [each.meta["val"] for each in node.all_input_nodes if is_tensor(each)]
    lists = any(isinstance(value, (list, tuple)) for value in node.args)
    return bool(operands) and not lists and not any(val.ndim for val in (*operands, node.meta["val"]))


def groups(program: Program, max_elements: int) -> list[Group]:
    """Nodes of the update that one op can compute: no member depends on another, also not through other groups.

    Members are the same op with the same numbers on structurally equal operands, in one unit. Where memory is cached
    (on a CPU), only tensors of parameters of up to ``max_elements`` elements (of the global parameter, so that ranks
    agree). Each group follows those that it depends on.
    """
    numbering = _ValueNumbering(program, max_elements)
    found: dict[Hashable, Group] = defaultdict(list)
    for node in program.graph.nodes:
        if (key := numbering.key(node)) is not None:
            found[key].append(node)
    return sorted((each for each in found.values() if len(each) > 1), key=lambda each: numbering.depth[each[0]])


class _ValueNumbering:
    """Numbers values of a graph, visited in order, such that structurally equal ones have equal numbers."""

    def __init__(self, program: Program, max_elements: int) -> None:
        self.max_elements = max_elements
        self.kept = set(program.output_node.all_input_nodes)  # must have memory of its own, so it goes into no row
        self.depth: dict[fx.Node, int] = {}
        self.numbers: dict[Hashable, int] = {}  # by structure
        self.number: dict[fx.Node, int] = {}
        self.owner = _owners(program)
        self.unit = {name: k for k, names in enumerate(program.units) for name in names}
        self.elements = {name: math.prod(declared.shape) for name, (declared, _) in program.values().items()}

    def key(self, node: fx.Node) -> Hashable:
        """Equal for the nodes of a group; None for a node of no group."""
        owner = self.owner.get(node)
        may = node.op == "call_function" and owner is not None and self._may(node)
        # A list op is deeper than the list ops that it depends on, so they cannot depend on each other in a circle.
        self.depth[node] = max((self.depth[needed] for needed in node.all_input_nodes), default=0) + may
        if not may or owner is None:
            return None
        val = node.meta["val"]
        arguments = self._structure(node.args), self._structure(tuple(sorted(node.kwargs.items())))
        structure = node.target, *arguments, val.dtype, val.device
        self.number[node] = self.numbers.setdefault(structure, len(self.numbers))
        if val.ndim and val.device.type == "cpu" and self.elements[owner] > self.max_elements:
            return None
        return self.depth[node], self.unit.get(owner), self.number[node]

    def _may(self, node: fx.Node) -> bool:
        if any(map(is_tensor, node.kwargs.values())):
            return False  # each may have its own
        return over_lists(node) is not None or (in_a_row(node) and node not in self.kept)

    def _structure(self, value: Any) -> Hashable:
        if isinstance(value, tuple):
            return tuple(map(self._structure, value))
        if not isinstance(value, fx.Node):
            return type(value), repr(value)
        if not is_tensor(value):
            return value  # one number for all
        val = value.meta["val"]
        return self.number.get(value, "given"), val.ndim == 0, val.dtype


def _owners(program: Program) -> dict[fx.Node, str]:
    """The parameter that a tensor of the update belongs to: it is computed from it, or else for it."""
    owner: dict[fx.Node, str] = {}
    values = program.values()
    for declared, node in values.values():
        name = declared.name if declared.role is Role.PARAMETER else declared.of
        if name in values and name is not None:
            owner[node] = name
    updates = [node for node in program.graph.nodes if node.meta.get("phase") == Phase.UPDATE]
    updates = [node for node in updates if is_pure(node) and is_tensor(node) and not _serves_kernel(node)]
    for nodes, others in ((updates, "all_input_nodes"), (updates[::-1], "users")):
        for node in nodes:
            found = next((owner[each] for each in getattr(node, others) if each in owner), None)
            if found is not None:
                owner.setdefault(node, found)
    return owner


def _serves_kernel(node: fx.Node) -> bool:
    """Whether a fused kernel alone reads ``node``: then it belongs to all parameters that the kernel updates."""
    return bool(node.users) and all(user.target in _KERNELS for user in node.users)
