"""Experts: the parameters that are split over the axes of the role "experts", and where they lie.

The user names them, or they are what grouped and batched matrix products read: a weight of three dims, the first of
which counts experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod

import torch
from torch import fx
from torch.distributed.tensor import Shard

from passes import AxisRole, Mesh, PlacementError, Program, Role
from passes.ir.program import Placements
from passes.ir.schemas import name_of

from ..partitioner.experts.axis import EXPERTS_AXIS
from ..partitioner.experts.weights import weights_of
from ..ranks.axis_roles import Roles

_GROUPED = {"_grouped_mm", "grouped_mm_fallback"}
_BATCHED = {"bmm", "baddbmm"}
_BY_NUMBER = {"index", "index_select", "embedding"}  # rows of a weight by the number of their expert


def experts_on_one_axis(roles: Roles) -> tuple[Roles, tuple[str, ...]]:
    """Roles in which several axes of experts are one, which is named by them (``dp_ep``); and the names of these axes.

    Raises ``ValueError`` unless they have the same roles.
    """
    names = tuple(name for name, has in roles.items() if EXPERTS_AXIS in has)
    if len(names) < 2:
        return roles, ()
    if any(roles[name] != roles[names[0]] for name in names):
        listed = "; ".join(f"{name} has {', '.join(roles[name])}" for name in names)
        raise ValueError(
            f'expected several axes with the role "experts" to have the same roles, since they are one axis, got: '
            f"{listed}. Give all of them the same roles, or that of experts to one axis"
        )
    one = {"_".join(names): roles[names[0]]}
    return {name: has for name, has in roles.items() if name not in names} | one, names


def expert_placements(
    program: Program, named: Collection[str] | None, given: Mapping[str, Placements]
) -> dict[str, Placements]:
    """The placements of experts, by name: those ``given``, and split on dim 0 over the axes of experts.

    Raises ``PlacementError`` where no parameter is an expert, or their number does not divide.
    """
    axes = program.mesh.axes_with(EXPERTS_AXIS)
    if not axes:
        return {}
    _check_order(program.mesh, axes)
    names = _found(program) if named is None else named
    parameters = [i for i in program.inputs if i.role is Role.PARAMETER]
    ranks = prod(program.mesh.axes[k].size for k in axes)
    placements = {}
    for each in (i for i in parameters if i.name in names):
        if not each.shape or each.shape[0] % ranks:
            raise PlacementError(
                f"expected {each.name} to have experts in dim 0, as many on each of {ranks} ranks, got the shape "
                f"{tuple(each.shape)}: choose a number of ranks that divides them, or name the experts with experts="
            )
        placements[each.name] = tuple(Shard(0) if k in axes else p for k, p in enumerate(given[each.name]))
    if not placements:
        raise PlacementError(
            f'axes gives {", ".join(program.mesh.axes[k].name for k in axes)} the role "experts", but no parameter '
            "is read by a grouped or batched matrix product, or looked up by number: name those whose dim 0 is the "
            "expert with experts='*.experts.*'. Modules of an nn.ModuleList are no such experts: stack their "
            "parameters (docs/experts.md)"
        )
    return placements


def _check_order(mesh: Mesh, axes: Sequence[int]) -> None:
    """Raise ``PlacementError`` where an axis behind that of experts splits tokens."""
    behind = [k for k in mesh.axes_with(AxisRole.BATCH, AxisRole.SEQUENCE) if k > axes[0]]
    if behind:
        raise PlacementError(
            f"expected the axis of experts, {mesh.axes[axes[0]].name}, to stand behind all that split the batch or "
            f"the sequence, but {mesh.axes[behind[0]].name} follows it: make a mesh with the axis of experts last"
        )


def _found(program: Program) -> frozenset[str]:
    """The parameters of three dims that grouped and batched products read, all of one number of experts.

    And those of three dims of which rows are looked up by number: of as many experts, where products read some.
    """
    inputs = zip(program.placeholders, program.inputs, strict=True)
    shapes = {i.name: i.shape for i in program.inputs if i.role is Role.PARAMETER and len(i.shape) == 3}
    order = list(program.graph.nodes)
    weights = weights_of(order, {node: i.name for node, i in inputs if i.name in shapes})
    multiplied = _read(order, weights, _factors)
    counts = {shapes[name][0] for name in multiplied}
    looked_up = {name for name in _read(order, weights, _tables) if not counts or shapes[name][0] in counts}
    found = {name: shapes[name][0] for name in shapes if name in multiplied | looked_up}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{name} ({count})" for name, count in found.items())
        raise PlacementError(
            f"grouped and batched products read parameters of unequal numbers of experts: {listed}. Say which are "
            "experts, with experts='*.experts.*'"
        )
    return frozenset(found)


def _factors(node: fx.Node) -> Iterator[fx.Node]:
    """The operands of a grouped or batched product that may be weights."""
    name = name_of(node.target) if node.op == "call_function" else ""
    if name in _GROUPED | _BATCHED:
        yield from (operand for operand in node.args[:3] if isinstance(operand, fx.Node))


def _tables(node: fx.Node) -> Iterator[fx.Node]:
    """The operand of a lookup by number that may be weights."""
    name = name_of(node.target) if node.op == "call_function" else ""
    if name in _BY_NUMBER and isinstance(table := node.args[0], fx.Node):
        numbers = [each.meta["val"] for each in node.all_input_nodes if each is not table]
        if name != "index_select" or node.args[1] == 0:
            yield from [table] if len(numbers) == 1 and numbers[0].dtype in (torch.int64, torch.int32) else []


def _read(
    order: Sequence[fx.Node],
    weights: Mapping[fx.Node, frozenset[str]],
    operands: Callable[[fx.Node], Iterator[fx.Node]],
) -> set[str]:
    """The parameters from which come the weights among the ``operands`` of nodes."""
    return {name for node in order for operand in operands(node) for name in weights.get(operand, ())}
