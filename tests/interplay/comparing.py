"""One row, plain and compiled: what a user can see after each call, on every rank."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import passes
import spmd

from ..harness.messages import messages
from ..harness.oracle import Snapshot, all_unequal, snapshot
from .training import CALLS, Training, batch, step_of

MESHES: dict[str, tuple[dict[str, int], dict[str, Any] | None]] = {
    "1": ({"dp": 1}, None),
    "2": ({"dp": 2}, None),
    "3": ({"dp": 3}, None),
    "2x2": ({"replicate": 2, "shard": 2}, None),
    "tensor": ({"dp": 2, "tp": 2}, {"batch": "dp", "tensor": "tp"}),
    "sequence": ({"cp": 2}, {"sequence": "cp"}),
    "sequence x batch": ({"dp": 2, "cp": 2}, {"batch": "dp", "sequence": "cp"}),
    "experts": ({"dp": 2}, {"batch": "dp", "experts": "dp"}),
    "stages": ({"pp": 2}, {"stages": "pp"}),
    "stages x batch": ({"pp": 2, "dp": 2}, {"stages": "pp", "batch": "dp"}),
}
_SPLIT = {"*.layer.weight": {"tp": torch.distributed.tensor.Shard(0)}}


def world(values: Mapping[str, str]) -> int:
    """How many ranks a row has."""
    found = 1
    for size in MESHES[values["mesh"]][0].values():
        found *= size
    return found


def differences(rank: int, count: int, values: Mapping[str, str]) -> list[str]:
    """A job of a rank: a line for each value that differs from the plain step's; what was raised, as its one line."""
    axes = MESHES[values["mesh"]][0]
    parts = [part_of(axes, other) for other in range(count)]
    whole = _run(values, step_of(values), [_joined(values, len(set(parts)), call) for call in range(CALLS)])
    own = [batch(values, part_of(axes, rank), call) for call in range(CALLS)]
    with ExitStack() as stack:
        if values["transport"] == "messages":
            stack.enter_context(messages(rank))
        try:
            got = _run(values, _compiled(values, stack), own)
        except (passes.SpmdError, ValueError, TypeError) as error:
            return [f"refused: {type(error).__name__}: {' '.join(str(error).split())}"]
    return all_unequal(whole, got, parts[rank], len(set(parts)))


def refusal(values: Mapping[str, str]) -> str:
    """The text of the error with which a row is refused, on the first rank; '' if it is not."""
    try:
        with ExitStack() as stack:
            step, training = _compiled(values, stack), Training.of(values)
            step(*training.arguments(), *batch(values, 0, 0))
    except (passes.SpmdError, ValueError, TypeError) as error:
        return " ".join(str(error).split())
    return ""


def part_of(axes: Mapping[str, int], rank: int) -> int:
    """Which rows of the batch a rank has: its place along the axes that split it."""
    place, found = rank, 0
    coordinates = {}
    for name, size in reversed(axes.items()):
        place, coordinates[name] = divmod(place, size)
    for name, size in axes.items():
        if name in ("dp", "replicate", "shard"):
            found = found * size + coordinates[name]
    return found


def _joined(values: Mapping[str, str], parts: int, call: int) -> tuple[Any, ...]:
    return tuple(map(torch.cat, zip(*(batch(values, part, call) for part in range(parts)), strict=True)))


def _run(values: Mapping[str, str], step: Any, batches: list[tuple[Any, ...]]) -> list[Snapshot]:
    torch.manual_seed(0)
    training, seen = Training.of(values), []
    _annotate(values, training.model, step)
    for call, given in enumerate(batches):
        if values["between"] == "second model" and call == 2:
            other = Training.of(values)
            _annotate(values, other.model, step)
            step(*other.arguments(), *given)
        result = step(*training.arguments(), *given)
        seen.append(snapshot((result, [*training.log]), training.arguments()[:3]))
        training.after(call)
    return seen


def _annotate(values: Mapping[str, str], model: nn.Module, step: Any) -> None:
    if values["annotations"] != "none" and isinstance(step, spmd.CompiledStep):
        getattr(spmd, values["annotations"])(model.get_submodule("blocks.1"))


def _compiled(values: Mapping[str, str], stack: ExitStack) -> Any:
    """The compiled step of a row."""
    options: dict[str, Any] = {}
    if values["backend"] == "graph copied":
        options["gm_transformation"] = lambda graph_module: torch.fx.GraphModule(graph_module, graph_module.graph)
    if values["backend"] == "no passes":
        options["passes"] = ()
    if values["memory"] != "any":
        options["memory"] = values["memory"]
    if values["cache"] == "written":
        options["cache"] = stack.enter_context(tempfile.TemporaryDirectory())
    return spmd.compile(step_of(values), parallel_mode=_mode(values), **options)


def _mode(values: Mapping[str, str]) -> spmd.DataParallel:
    shape, axes = MESHES[values["mesh"]]
    given: dict[str, Any] = {"mesh": init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))}
    style = values["style"]
    given["parallel_style"] = {"kept whole": "fully_shard", "shard_optimizer": "replicate"}.get(style, style)
    given |= {"reshard_after_forward": False} if style == "kept whole" else {}
    given |= {"shard_optimizer": True} if style == "shard_optimizer" else {}
    given |= {"axes": axes} if axes else {}
    given |= {"params": _SPLIT} if values["mesh"] == "tensor" else {}
    given |= {"micro_batches": int(values["micro_batches"])}
    given |= {"reduce_gradients": values["reduce"]}
    given |= {"bits": "same"} if values["bits"] == "same" else {}
    given |= {"schedule": values["schedule"]}
    given |= {"attention": values["attention"]} if values["attention"] != "any" else {}
    given |= {"defer_updates": True} if values["deferral"] == "yes" else {}
    given |= {"offload_policy": spmd.OffloadPolicy()} if values["offload"] == "yes" else {}
    return spmd.DataParallel(**given)
