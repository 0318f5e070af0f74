"""``spmd.plan``: the layouts of a step that this project can run on so many GPUs, by estimated time."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from passes import Table
from passes.communication.bucket_sizes import MAX_BYTES
from passes.errors import did_you_mean
from passes.schedule.gpus import Gpu

from ..interpreter.young_collections import young_collections
from ..modes.option_groups import check_memory
from ..stages.schedules import Schedule
from .blocks import Chosen, front
from .estimate import Work, choices, cut_of, estimate, uncounted
from .fitted import CONSTANTS
from .layout import Layout
from .machine import Machine, Software
from .measured import KINDS, measured
from .plans import Candidate, Plans, uncounted_note
from .step_work import CapturedStep

RESERVED = 2e9  # bytes of a GPU that driver and NCCL take: an assumption
SOFTWARE: Mapping[str, Software] = {
    "aten": Software(unfused=1.0, launch=24e-6, per_step=2e-4, hides=0.6, bucket=MAX_BYTES, in_place=False),
    "inductor": Software(unfused=0.0, launch=24e-6, per_step=2e-4, hides=0.6, bucket=MAX_BYTES, in_place=False),
}
"""Our programs, op by op or with islands. Launches and updates take what a GPT of 256 x 4 took on one H200 (README);
that most of backward hides the reduction of what is replicated is an assumption."""

_SPLITS = (
    Layout(1),
    Layout(1, "shard_optimizer"),
    Layout(1, "fully_shard", keeps_gathered=True, reduces_once=True),
)
"""How stages divide state among ranks that have other rows; by the first alone where there is one."""

_TENSOR = (1, 2, 4, 8)
_CONTEXT = (1, 2, 4, 8)
_EXPERTS = (2, 4, 8, 16, 32, 64)
_STAGES = (2, 4, 8, 16, 32)
_SCHEDULES: tuple[Schedule, ...] = ("1f1b", "interleaved", "zb-h1")  # "gpipe" waits as "1f1b" does, and keeps more


def plan(
    step: Any,
    *args: Any,
    gpus: int,
    gpu: str = "H100",
    per_host: int | None = None,
    memory: int | str | None = None,
    rows: int | None = None,
    top: int = 10,
    table: Table | None = None,
    **kwargs: Any,
) -> Plans:
    """The fastest layouts of ``step`` on ``gpus`` GPUs of a kind, by estimate; nothing of it runs.

    ``step`` is what ``spmd.compile`` made with a ``DataParallel`` mode, the other arguments are those of one call with
    the whole batch; models may be on the meta device. ``per_host``: GPUs in a host, by default as they are sold.
    ``memory``: bytes of a GPU, or text such as "70GB", by default all but 2 GB. ``rows``: of the whole batch, if not as
    many as in the arguments. ``top``: how many layouts are listed. ``table``: rates that ``spmd calibrate`` measured on
    such machines, in the place of published ones. ``gpu="CPU"`` stands for ranks of gloo on a core each.

    Raises ``TypeError`` for what is no compiled step, ``ValueError`` for an unknown GPU and for numbers that do not
    fit. Where nothing fits into memory, the result is false, and has how much is missing.
    """
    check(gpus, gpu, per_host, rows, top)
    return search(CapturedStep(step, args, kwargs), gpus, gpu, per_host, memory, rows, top, table)


@young_collections()
def search(
    step: CapturedStep,
    gpus: int,
    gpu: str,
    per_host: int | None,
    memory: int | str | None,
    rows: int | None,
    top: int,
    table: Table | None = None,
) -> Plans:
    """The same of a step whose captures are kept for other machines."""
    figures = check(gpus, gpu, per_host, rows, top)
    capacity = check_memory(memory) or int(figures.capacity * 1e9 - RESERVED)
    machine = Machine(figures, gpu, per_host or figures.domain, SOFTWARE[step.backend], CONSTANTS)
    machine = measured(machine, table)
    first, found = step.of(), list[Candidate]()
    count = rows or first.rows
    for tensor, context, experts in _divisions(step, gpus, machine.per_host):
        for layout in _layouts(gpus, machine.per_host, tensor, context, experts, count):
            found += recomputed(step.of(tensor, experts).work, layout, machine, capacity)
        if context == experts == 1:
            found += _staged(step.of(tensor).work, gpus, tensor, count, machine, capacity)
    if not found:
        raise ValueError(
            f"expected a batch whose rows divide among {gpus} GPUs, got {count} rows: pass rows=, those of the whole "
            "batch of a step"
        )
    plans = Plans.of(found, machine, gpus, capacity, count, first, step.axes, top)
    shown = plans.best or plans.least
    unknown = uncounted(step.of(shown.layout.tensor, shown.layout.experts).work, shown.layout, machine)
    notes = [uncounted_note(op, seconds / shown.estimate.seconds) for op, seconds in unknown.items()]
    notes += [f"compute and links are as fast as {table.name} says"] if table is not None else []
    return replace(plans, notes=(*plans.notes, *notes), recipes=step.recipes)


def check(gpus: Any, gpu: Any, per_host: Any, rows: Any, top: Any) -> Gpu:
    """The figures of a GPU. Raises ``ValueError`` for one that has none, and for what is no number of anything."""
    for name, given in (("gpus", gpus), ("per_host", per_host), ("rows", rows), ("top", top)):
        is_number = isinstance(given, int) and not isinstance(given, bool) and given > 0
        if not is_number and (given is not None or name in ("gpus", "top")):
            raise ValueError(f"expected {name} to be a number, 1 or more, got {given!r}")
    if gpu not in KINDS:
        raise ValueError(
            f"expected a GPU with published figures, one of {', '.join(KINDS)}, got {gpu!r}{did_you_mean(gpu, KINDS)}"
        )
    if per_host is not None and gpus > per_host and gpus % per_host:
        raise ValueError(f"expected gpus to fill hosts of {per_host}, got {gpus}")
    return KINDS[gpu]


def _divisions(step: CapturedStep, gpus: int, per_host: int) -> Iterator[tuple[int, int, int]]:
    """Ranks along "tensor", ranks that split sequences, and ranks that divide experts, as far as the step has them."""
    for tensor in (k for k in _TENSOR if gpus % k == per_host % k == 0 and step.divides_tensor(k)):
        yield from ((tensor, k, 1) for k in _CONTEXT if gpus % (tensor * k) == 0 and step.divides_sequence(k))
    yield from ((1, 1, k) for k in _EXPERTS if gpus % k == 0 and step.divides_experts(k))


def _layouts(gpus: int, per_host: int, tensor: int, context: int, experts: int, rows: int) -> Iterator[Layout]:
    """Layouts that this project runs: styles, hosts that keep parameters together, micro-batches."""
    data = gpus // (tensor * context)
    if rows % data:
        return
    own = rows // data
    hosts = [per_host] if tensor * context * experts == 1 and data > per_host and data % per_host == 0 else []
    splits = [Layout(gpus), Layout(gpus, "shard_optimizer")]
    for shard in [None, *hosts]:
        splits += [Layout(gpus, "fully_shard", shard=shard, keeps_gathered=kept) for kept in (False, True)]
    for split in splits if data * context > 1 else splits[:1]:
        for count in (each for each in range(1, own + 1) if own % each == 0):
            yield replace(
                split,
                rows=own / count / context,
                micro_batches=count,
                tensor=tensor,
                context=context,
                experts=experts,
                reduces_once=split.style == "fully_shard" and count > 1,
            )


def recomputed(work: Work, layout: Layout, machine: Machine, memory: float) -> list[Candidate]:
    """A layout with as many blocks recomputed as it needs to fit into memory: with none, all, or those that cost least.

    Where some have to be, they are the fastest choice of the front of all (``blocks.py``) that fits.
    """
    plain = Candidate(layout, estimate(work, layout, machine))
    kinds = choices(work, layout, machine)
    if plain.estimate.peak <= memory or not kinds:
        return [plain]
    layout = replace(layout, recompute="full")
    whole = Candidate(layout, estimate(work, layout, machine))
    if whole.estimate.peak > memory:
        return [plain, whole]

    def made(chosen: Chosen) -> Candidate:
        parts = tuple(again / (kept + again) for kept, again in chosen.counts)
        part = layout if set(parts) == {1.0} else replace(layout, recomputed=parts)
        return Candidate(part, estimate(work, part, machine))

    found = front(kinds)
    return [made(found[bisect_left(found, True, key=lambda each: made(each).estimate.peak <= memory)])]


def _staged(work: Work, gpus: int, tensor: int, rows: int, machine: Machine, memory: float) -> Iterator[Candidate]:
    """The layouts of pipelines over equal blocks, each with the cut whose slowest stage takes the least time.

    Of layouts that differ in micro-batches, one that must be slower than another one that fits is not simulated. No
    block is recomputed, since ``memory=`` chooses no more than the schedule of stages.
    """
    blocks = [each.count for each in work.plain if each.count > 1]
    for stages in (k for k in _STAGES if gpus % (tensor * k) == 0 and len(blocks) == 1 and blocks[0] >= k):
        data = gpus // (tensor * stages)
        own = rows // data if rows % data == 0 else 0
        counts = [n for n in range(own, stages - 1, -1) if own % n == 0]
        for split, schedule in product(_SPLITS[1:] if data > 1 else _SPLITS[:1], _SCHEDULES):
            least = math.inf
            for count in counts:
                chunks = 2 if schedule == "interleaved" else 1
                if chunks == 2 and (count % stages or blocks[0] % (2 * stages)):
                    continue
                layout = replace(split, gpus=gpus, rows=own // count, micro_batches=count, tensor=tensor)
                layout = replace(layout, stages=stages, chunks=chunks, schedule=schedule)
                cut = cut_of(work, layout, machine, memory, least)
                if cut is None:
                    continue
                found = Candidate(layout := replace(layout, cut=cut), estimate(work, layout, machine))
                if found.estimate.peak <= memory:
                    least = min(least, found.estimate.seconds)
                yield found
