"""``spmd.materialize``: give a model on the meta device its values, each rank making the parts that it keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from passes import Program
from passes.ir.program import replicated

from ._torch import get_proxy_mode, tree_flatten
from .call.call import Call
from .call.state import Arguments, Leaf
from .modes.base import ParallelMode, PlannedMode
from .modes.shares import StyleName
from .options import check_mode
from .state.distribute import prepare
from .state.initialize import check_initializable, initialize, seed_to_initialize
from .state.stale_references import end_stale_references

Module = TypeVar("Module", bound=nn.Module)


def materialize(module: Module, parallel_mode: ParallelMode | StyleName | None = None) -> Module:
    """Initialize what ``module`` has on the meta device, module by module; all ranks call it. Returns ``module``.

    A compiled step does so itself when it first compiles; here it is done earlier, for a checkpoint to be loaded into.
    Each rank keeps its parts only, as ``parallel_mode`` (that of the step) and annotations place them, so that the
    memory needed is that of these parts and of one module. Values come from the mode's ``param_init_fn``, or else from
    ``reset_parameters()`` of each module, and do not depend on the number of ranks; ``torch.manual_seed`` on rank 0
    decides them. In compiled steps, optimizers made before go on with the new parameters.

    Raises ``CaptureError``, with all names, for what nothing initializes; nothing is changed then.
    """
    mode = check_mode(parallel_mode)
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {module!r}")
    if not isinstance(mode, PlannedMode):
        raise TypeError(f"expected a mode that plans where inputs are placed, a spmd.PlannedMode, got {mode!r}")
    if get_proxy_mode() is not None:
        raise RuntimeError("spmd.materialize was called inside of a compiled step: call it before the first step")
    leaves, spec = tree_flatten(module)
    call = Call(Arguments([Leaf("model", leaf) for leaf in leaves], spec, {"model": module}, {}, {}), mode)
    check_initializable(call)
    seeds = seed_to_initialize(call)
    if seeds:
        plan = mode.plan(_inputs_only(call))
        whole = replicated(call.mesh)
        inputs = [
            replace(i, placement=plan.placements.get(i.name, whole), memory=plan.memory_of(i))
            for i in (slot.input for slot in call.slots)
        ]
        state = prepare(call, inputs)
        initialize(state, _of_rank_zero(seeds[0], call.device_mesh, call.device))
        end_stale_references(state.replaced)
    return module


def _inputs_only(call: Call) -> Program:
    """A program of the model's state, for a mode to plan."""
    empty = fx.GraphModule(nn.Module(), fx.Graph())
    inputs = [slot.input for slot in call.slots]
    return Program(empty, inputs, [], call.mesh, annotations=call.annotations)


def _of_rank_zero(number: int, mesh: DeviceMesh, device: torch.device) -> int:
    held = torch.tensor(number, device=device)
    for axis in range(mesh.ndim):
        dist.broadcast(held, group_src=0, group=mesh.get_group(axis))
    return int(held)
