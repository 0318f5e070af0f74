"""Let a rank keep its part of state that the step computes whole, so that the parts have the bits of the whole.

An op rounds some elements of a part otherwise than those of the whole, such as the last ones of a loop over vectors,
and the norm of parts is another sum than that of the whole. So parts are gathered where they are read, and new state is
computed whole before it is cut.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx
from torch.distributed.tensor import Replicate, Shard

from passes import AxisRole, Input, Mesh, Output, OutputKind, PartitionError, Program, Role
from passes.ir.program import Placements, is_sharded

from ..partitioner.emit import Emitter
from ..partitioner.plan import Plan
from ..partitioner.redistribute import Reason
from ..partitioner.values import Value
from ..placements import local_shape

aten = torch.ops.aten
_STATE = (Role.PARAMETER, Role.OPTIMIZER_STATE, Role.GRADIENT, Role.BUFFER)


def with_whole_state(program: Program, plan: Plan) -> Plan:
    """The plan by which no axis splits state that styles split."""
    state = {each.name for each in program.inputs if each.role in _STATE}
    placements = {n: _whole(p, program.mesh) if n in state else p for n, p in plan.placements.items()}
    return replace(plan, placements=placements, updates={})


def keep_parts(program: Program, plan: Plan) -> None:
    """Let the state of a program, which is whole, have the placements of ``plan``: gather inputs, cut outputs."""
    emitter = Emitter(program)
    emitter.graph = program.graph
    for k, (declared, node) in enumerate(zip(program.inputs, program.placeholders, strict=True)):
        placed = plan.placements.get(declared.name, declared.placement)
        if declared.role in _STATE and is_sharded(placed) and placed != declared.placement:
            program.inputs[k] = replace(declared, placement=placed)
            _gather(emitter, node, declared, placed)
    shapes = {each.name: each.shape for each in program.inputs}
    values = list(program.output_values())
    for k, (output, value) in enumerate(zip(program.outputs, values, strict=True)):
        placed = _placement(output, plan, shapes)
        if is_sharded(placed) and placed != output.placement:
            values[k] = _cut(emitter, value, output, placed)
            program.outputs[k] = replace(output, placement=placed)
    program.set_outputs(values, program.outputs)


def _gather(emitter: Emitter, node: fx.Node, declared: Input, placed: Placements) -> None:
    """Let the readers of ``node``, from here on a part, read the whole."""
    whole, readers = node.meta["val"], list(node.users)
    if not whole.is_contiguous():  # it would be gathered into memory in another order, for which kernels differ
        raise PartitionError(
            f'expected {declared.name} to be contiguous with bits="same" where state is split, but it has the strides '
            f"{whole.stride()}: make it contiguous before the first step, or keep it whole"
        )
    of = Value.of(node, whole, placed, node, frozenset())
    with whole.fake_mode:
        node.meta["val"] = torch.empty(
            local_shape(declared.shape, placed, emitter.mesh), dtype=whole.dtype, device=whole.device
        )
    node.meta["placement"] = placed
    emitter.mark(node, (declared.shape, placed))
    if not readers:
        return
    with emitter.graph.inserting_before(min(readers)):
        reason = Reason(declared.role, "before use", (declared.name,))
        gathered = emitter.redistributed(of, declared.placement, reason)
        if any(isinstance(p, Shard) and p.dim for p in placed) and gathered is not node:
            # Surely contiguous, or no kernel of an optimizer takes it, and others round otherwise.
            gathered = emitter.call(aten.clone.default, (gathered,), {"memory_format": torch.contiguous_format}, node)
            gathered.meta["placement"] = declared.placement
    if gathered is not node:
        gathered.meta["part_of"] = declared.name
    for reader in readers:
        reader.replace_input_with(node, gathered)


def _cut(emitter: Emitter, value: fx.Node, declared: Output, placed: Placements) -> fx.Node:
    """This rank's part of new state, which is whole."""
    if declared.kind is OutputKind.UPDATE:
        value.meta["update_of"] = declared.name
    with emitter.graph.inserting_before(emitter.graph.output_node()):
        of = Value.of(value, value.meta["val"], declared.placement, value, frozenset())
        return emitter.redistributed(of, placed, Reason(declared.role))


def _placement(declared: Output, plan: Plan, shapes: dict[str, tuple[int, ...]]) -> Placements:
    """The placement of an output: an update's is the state's, that of new state where its parameter is updated."""
    if declared.kind is OutputKind.UPDATE:
        return plan.placements.get(declared.name, declared.placement)
    if declared.kind is not OutputKind.NEW or declared.of is None or declared.shape != shapes[declared.of]:
        return declared.placement
    own = plan.placements.get(declared.of, declared.placement)
    return plan.updates.get(declared.of, own) if declared.role is Role.OPTIMIZER_STATE else own


def _whole(placement: Placements, mesh: Mesh) -> Placements:
    """The placement without the splits of styles."""
    split = mesh.axes_with(AxisRole.SHARD)
    return tuple(Replicate() if k in split and isinstance(p, Shard) else p for k, p in enumerate(placement))
