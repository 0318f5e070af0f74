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
from .state.distribute import Prepared, prepare
from .state.initialize import check_initializable, initialize, make_empty, seed_to_initialize
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
    call, mode = _call_of(module, parallel_mode, "spmd.materialize")
    check_initializable(call)
    seeds = seed_to_initialize(call)
    if seeds:
        state = _planned(call, mode)
        initialize(state, _of_rank_zero(seeds[0], call.device_mesh, call.device))
        end_stale_references(state.replaced)
    return module


def make_room(module: nn.Module, parallel_mode: ParallelMode | StyleName | None, by: str) -> torch.device:
    """Give what ``module`` has on the meta device memory without values, placed as ``materialize`` places it.

    ``by``: the name of the function that the user called. Returns the device that the state of this rank is on.
    """
    call, mode = _call_of(module, parallel_mode, by)
    state = _planned(call, mode)
    make_empty(state)
    end_stale_references(state.replaced)
    return call.device


def _call_of(module: nn.Module, parallel_mode: ParallelMode | StyleName | None, by: str) -> tuple[Call, PlannedMode]:
    """The state of a module as that of a call, and its mode. Raises ``TypeError`` for what is none of them."""
    mode = check_planned(parallel_mode, by)
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {module!r}")
    leaves, spec = tree_flatten(module)
    return Call(Arguments([Leaf("model", leaf) for leaf in leaves], spec, {"model": module}, {}, {}), mode), mode


def check_planned(parallel_mode: ParallelMode | StyleName | None, by: str) -> PlannedMode:
    """The mode, if it says where state is placed, outside of compiled steps."""
    mode = check_mode(parallel_mode)
    if not isinstance(mode, PlannedMode):
        raise TypeError(f"expected a mode that plans where inputs are placed, a spmd.PlannedMode, got {mode!r}")
    if get_proxy_mode() is not None:
        raise RuntimeError(f"{by} was called inside of a compiled step: call it before the first step")
    return mode


def _planned(call: Call, mode: PlannedMode) -> Prepared:
    """The state of a call, with the placements and memory that the mode plans."""
    plan = mode.plan(_inputs_only(call))
    whole = replicated(call.mesh)
    inputs = [
        replace(i, placement=plan.placements.get(i.name, whole), memory=plan.memory_of(i))
        for i in (slot.input for slot in call.slots)
    ]
    return prepare(call, inputs)


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
