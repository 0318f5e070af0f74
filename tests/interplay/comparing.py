"""One row, plain and compiled: what a user can see after each call, on every rank."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import passes
import spmd
from spmd.lowering import islands

from ..harness.messages import messages
from ..harness.oracle import Snapshot, all_unequal, snapshot
from .between import FAILED, Batch, Compiled, Plain
from .draws import DrawsByPosition, begin_draws
from .effects import counted_traces, each_rank_traces, missing, tight_budgets
from .meshes import MESHES, parts_of
from .norms import NormsOfCalls
from .overrides import OVERRIDES
from .planted import planted
from .training import CALLS, IN_PLACE, Training, batch, step_of

_FP32 = torch.float32
_WIRE: dict[str, dict[str, Any]] = {
    "own": {},
    "reduced in fp32": {"reduce_dtype": _FP32},
    "gathered in fp32": {"gather_dtype": _FP32},
    "computed in fp32": {"mp_policy": spmd.MixedPrecisionPolicy(_FP32, torch.float64, output_dtype=torch.float64)},
}
_RTOL, _ATOL = 2e-5, 2e-6  # in fp64, of what was rounded to fp32 on its way
_SPLIT = {"*.layer.weight": {"tp": torch.distributed.tensor.Shard(0)}}


def differences(
    rank: int,
    count: int,
    values: Mapping[str, str],
    folder: Path,
    calls: range = range(CALLS),
    is_warm: bool = False,
    fault: str = "",
) -> list[str]:
    """A job of a rank: a line for each value that differs from the plain step's; what was raised, as its one line.

    ``folder``: what the processes of a row have in common. ``calls``: those of this process, which takes the state from
    there but for the first. ``is_warm``: an earlier process has made the same calls, so that nothing is traced.
    ``fault``: one that is planted in the compiled step (``planted.py``).
    """
    parts = parts_of(values)
    whole = [joined(values, call) for call in range(CALLS)]
    with DrawsByPosition() as draws:
        plain = draws.counted(step_of(values))
        want = _run(values, plain, whole, Plain(), range(CALLS))[calls.start : calls.stop]
    own = [batch(values, parts[rank], call) for call in range(CALLS)]
    with settings(values, rank), planted(fault):
        try:
            found, got = _compiled_run(rank, count, values, own, folder, calls, is_warm)
        except (passes.SpmdError, ValueError, TypeError) as error:
            return [f"refused: {type(error).__name__}: {' '.join(str(error).split())}"]
    tolerance = (_RTOL, _ATOL) if values["wire"] != "own" else ()
    return [*found, *all_unequal(want, got, parts[rank], len(set(parts)), *tolerance)]


def _compiled_run(
    rank: int, count: int, values: Mapping[str, str], own: list[Batch], folder: Path, calls: range, is_warm: bool
) -> tuple[list[str], list[Snapshot]]:
    """What went other than it should in the calls of this process, and what a user sees after each."""
    with ExitStack() as stack:
        traces = stack.enter_context(counted_traces())
        beside = Compiled(values, rank, count, folder / "checkpoint", lambda row: compiled(row, folder), traces)
        if values["cache"] == "each rank":
            stack.enter_context(each_rank_traces())
        nothing_helps = stack.enter_context(tight_budgets()) if values["memory"] == "tight" else []
        step = compiled(values, folder)
        got = _run(values, step, own, beside, calls)
        step.flush()  # a second model may have an update pending
        return [*beside.found, *missing(values, step, len(traces), is_warm, nothing_helps)], got


@contextmanager
def settings(values: Mapping[str, str], rank: int) -> Iterator[None]:
    """How the process of a rank stands beside the plain step: on its own host, or with islands that nothing times."""
    with ExitStack() as stack:
        stack.callback(spmd.seed, None)
        begin_draws()
        if values["transport"] == "messages":
            stack.enter_context(messages(rank))
        if values["backend"] == "inductor":
            stack.enter_context(mock.patch.multiple(islands, _LEAST_GAIN=0.0, seconds_of=lambda *_: (1.0, 1.0)))
        yield


def refusal(values: Mapping[str, str]) -> str:
    """The text of the error with which a row is refused, on the first rank; '' if it is not."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            step, training = compiled(values, Path(folder)), Training.of(values)
            annotate(values, training.model)
            step(*training.arguments(), *batch(values, 0, 0))
    except (passes.SpmdError, ValueError, TypeError) as error:
        return " ".join(str(error).split())
    return ""


def joined(values: Mapping[str, str], call: int) -> tuple[Any, ...]:
    """The whole batch of a call."""
    parts = range(len(set(parts_of(values))))
    return tuple(map(torch.cat, zip(*(batch(values, part, call) for part in parts), strict=True)))


def _run(
    values: Mapping[str, str], step: Any, batches: list[Batch], beside: Plain | Compiled, calls: range
) -> list[Snapshot]:
    """What a user sees after each of the calls, of which the first is that of a process."""
    torch.manual_seed(0)
    training, norms, seen = _fresh(values, step), NormsOfCalls(values, step), []
    if calls.start:
        beside.load(training)
    for call in calls:
        if values["between"] == "second model" and call == 2:
            step(*_fresh(values, step).arguments(), *batches[call])
        with norms.of_call(training) as found:
            result = step(*training.arguments(), *batches[call])
        beside.look(step)
        stays_pending = values["deferral"] == "yes" and call == 1  # to look at state would finish an update
        seen.append(snapshot((result, [*training.log], found), () if stays_pending else training.arguments()[:3]))
        if stays_pending and values["between"] in IN_PLACE and isinstance(step, spmd.CompiledStep):
            step.flush()
        training.after(call)
        if call == 1:
            training = _between(values, step, batches, beside, training)
    return seen


def _fresh(values: Mapping[str, str], step: Any) -> Training:
    training = Training.of(values)
    if isinstance(step, spmd.CompiledStep):
        annotate(values, training.model)
    return training


def _between(
    values: Mapping[str, str], step: Any, batches: list[Batch], beside: Plain | Compiled, training: Training
) -> Training:
    """What happens between two calls that is not of plain torch alone; returns the training that goes on."""
    if values["between"] == "checkpoint":
        torch.manual_seed(1)  # draws of the calls before are those of torch's generator on neither side
        other_step, other = beside.other_step(step), Training.of(values)
        for given in batches[:1] * 2:
            other_step(*other.arguments(), *given)
        beside.save(other)
        beside.load(training)
    if values["between"] == "new process":
        beside.save(training)
        training = _fresh(values, step)
        beside.load(training)
    if values["between"] in FAILED:
        beside.fail(step, training, batches[2])
    return training


def annotate(values: Mapping[str, str], model: nn.Module) -> None:
    """Mark one block, which then has policies of its own."""
    how, block, given = values["annotations"], model.get_submodule("blocks.1"), dict[str, Any]()
    if values["wire"] == "computed in fp32":
        given["mp_policy"] = spmd.MixedPrecisionPolicy(_FP32, torch.float64)
    if how == "offloaded":
        spmd.fully_shard(block, offload_policy=spmd.OffloadPolicy(), **given)
    elif how != "none":
        getattr(spmd, how)(block, **given)


def compiled(values: Mapping[str, str], folder: Path, is_simulated: bool = False) -> Any:
    """The compiled step of a row. ``is_simulated``: there are no ranks to make a mesh of."""
    options: dict[str, Any] = {}
    if values["backend"] == "graph copied":
        options["gm_transformation"] = lambda graph_module: torch.fx.GraphModule(graph_module, graph_module.graph)
    if values["backend"] == "inductor":
        options["backend"] = "inductor"
    if values["backend"] == "no passes":
        options["passes"] = ()
    if values["memory"] != "any":
        options["memory"] = "1GB"  # a tight one follows from what a program takes
    if values["cache"] in ("written", "warm"):
        options["cache"] = folder / "cache"
    if values["dynamic"] == "named":
        options["dynamic"] = {name: {0: "rows", 1: "length"} for name in ("x", "y")}
    if values["override"] != "none":
        options["module_override"] = [OVERRIDES[values["override"]]()]
    return spmd.compile(step_of(values), parallel_mode=_mode(values, is_simulated), **options)


def _mode(values: Mapping[str, str], is_simulated: bool) -> spmd.DataParallel:
    shape, axes = MESHES[values["mesh"]]
    given: dict[str, Any] = {}
    if not is_simulated:
        given["mesh"] = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
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
    given |= _WIRE[values["wire"]]
    given |= {"offload_policy": spmd.OffloadPolicy()} if values["offload"] == "yes" else {}
    return spmd.DataParallel(**given)
