"""``spmd.plan``: the layouts of a step that this project can run on so many GPUs, by estimated time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from passes.schedule.gpus import GPUS, Gpu

from ..modes.option_groups import check_memory
from .estimate import Work, estimate
from .fitted import CONSTANTS
from .layout import Layout
from .machine import Machine, Software
from .plans import Candidate, Plans
from .step_work import axes_of, given_mode, step_work, unbound

RESERVED = 2e9  # bytes of a GPU that driver, NCCL and the allocator's gaps take: an assumption
SOFTWARE: Mapping[str, Software] = {
    "aten": Software(unfused=1.0, launch=24e-6, per_step=2e-4, hides=0.6),
    "inductor": Software(unfused=0.0, launch=24e-6, per_step=2e-4, hides=0.6),
}
"""Our programs, op by op or with islands. Launches and updates take what a GPT of 256 x 4 took on one H200 (README);
that most of backward hides the reduction of what is replicated is an assumption."""

_TENSOR = (1, 2, 4, 8)
_STAGES = (2, 4, 8, 16)


def plan(
    step: Any,
    *args: Any,
    gpus: int,
    gpu: str = "H100",
    per_host: int | None = None,
    memory: int | str | None = None,
    rows: int | None = None,
    top: int = 10,
    **kwargs: Any,
) -> Plans:
    """The fastest layouts of ``step`` on ``gpus`` GPUs of a kind, by estimate; nothing of it runs.

    ``step`` is what ``spmd.compile`` made with a ``DataParallel`` mode, the other arguments are those of one call with
    the whole batch; models may be on the meta device. ``per_host``: GPUs in a host, by default as they are sold.
    ``memory``: bytes of a GPU, or text such as "70GB", by default all but 2 GB. ``rows``: of the whole batch, if not as
    many as in the arguments. ``top``: how many layouts are listed.

    Raises ``TypeError`` for what is no compiled step, ``ValueError`` for an unknown GPU and for numbers that do not
    fit. Where nothing fits into memory, the result is false, and has how much is missing.
    """
    figures = _check(gpus, gpu, per_host, rows, top)
    capacity = check_memory(memory) or int(figures.capacity * 1e9 - RESERVED)
    step, args = unbound(step, args)
    machine = Machine(figures, gpu, per_host or figures.domain, SOFTWARE[_backend(step)], CONSTANTS)
    axes = axes_of(given_mode(step))
    widths = [k for k in (_TENSOR if axes[1] else (1,)) if gpus % k == 0 and k <= machine.per_host]
    works = {width: step_work(step, args, kwargs, width) for width in widths}
    first = works[widths[0]]
    count = rows or first.rows
    layouts = [each for width in widths for each in _layouts(gpus, machine.per_host, width, count)]
    if not layouts:
        raise ValueError(
            f"expected a batch whose rows divide among {gpus} GPUs, got {count} rows: pass rows=, those of the whole "
            "batch of a step"
        )
    found = [Candidate(each, estimate(works[each.tensor].work, each, machine)) for each in layouts]
    staged = _staged(works[1].work, gpus, count, machine) if 1 in works else None
    return Plans.of(found, machine, gpus, capacity, count, first.tokens, axes, top, staged, first.notes)


def _check(gpus: Any, gpu: Any, per_host: Any, rows: Any, top: Any) -> Gpu:
    """The figures of a GPU. Raises ``ValueError`` for one that has none, and for what is no number of anything."""
    for name, given in (("gpus", gpus), ("per_host", per_host), ("rows", rows), ("top", top)):
        is_number = isinstance(given, int) and not isinstance(given, bool) and given > 0
        if not is_number and (given is not None or name in ("gpus", "top")):
            raise ValueError(f"expected {name} to be a number, 1 or more, got {given!r}")
    if gpu not in GPUS:
        raise ValueError(f"expected a GPU with published figures, one of {', '.join(GPUS)}, got {gpu!r}")
    if per_host is not None and gpus > per_host and gpus % per_host:
        raise ValueError(f"expected gpus to fill hosts of {per_host}, got {gpus}")
    return GPUS[gpu]


def _backend(step: Any) -> str:
    return "inductor" if step.options.backend == "inductor" else "aten"


def _layouts(gpus: int, per_host: int, tensor: int, rows: int) -> Iterator[Layout]:
    """What this project runs: styles, hosts that keep parameters together, micro-batches, recomputation."""
    data = gpus // tensor
    if rows % data:
        return
    own = rows // data
    hosts = [per_host] if tensor == 1 and data > per_host else []
    splits = [Layout(gpus), Layout(gpus, "shard_optimizer")]
    for shard in [None, *hosts]:
        splits += [Layout(gpus, "fully_shard", shard=shard, keeps_gathered=kept) for kept in (False, True)]
    for split in splits if data > 1 else splits[:1]:
        for count in (each for each in range(1, own + 1) if own % each == 0):
            for recompute in ("none", "full"):
                yield replace(
                    split,
                    rows=own // count,
                    micro_batches=count,
                    tensor=tensor,
                    recompute=recompute,
                    reduces_once=split.style == "fully_shard" and count > 1,
                )


def _staged(work: Work, gpus: int, rows: int, machine: Machine) -> Candidate | None:
    """The fastest layout with pipeline stages, which nothing here runs, for comparison; None without blocks to cut."""
    blocks = min((each.count for each in work.plain if each.count > 1), default=0)
    found = []
    for stages in _STAGES:
        data = gpus // stages
        if gpus % stages or blocks % stages or rows % max(1, data):
            continue
        own = rows // data
        for count in (each for each in range(stages, own + 1) if own % each == 0):
            layout = Layout(gpus, "shard_optimizer", own // count, count, stages=stages)
            found.append(Candidate(layout, estimate(work, layout, machine)))
    return min(found, key=lambda each: each.estimate.seconds, default=None)
