"""The result of ``spmd.plan``: layouts by estimated time, why the first one wins, and its mode as Python."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from .estimate import Estimate
from .layout import Layout
from .machine import Machine

_MEANT = {
    "compute": "compute",
    "tensor": "collectives of tensor parallel",
    "gathers": "gathers and reductions of units",
    "pipeline": "idle stages",
    "messages": "messages between stages",
    "reduction": "reduction of replicated gradients",
    "update": "the update",
}
_NOISE = 0.002  # of the step: causes that differ by less explain nothing


@dataclass(frozen=True)
class Candidate:
    """A layout with its estimate."""

    layout: Layout
    estimate: Estimate


@dataclass(frozen=True)
class Plans:
    """Layouts that fit, the fastest first; of those that differ in recomputation or micro-batches alone, the best.

    ``least``: the layout that needs the least memory, whether it fits. ``staged``: the fastest with pipeline stages,
    which nothing here runs. ``notes``: of the partitioner, on ops that it has no rule for. False if nothing fits.
    """

    layouts: tuple[Candidate, ...]
    least: Candidate
    staged: Candidate | None
    gpus: int
    gpu: str
    per_host: int
    memory: int
    rows: int
    tokens: int
    axes: tuple[str, str | None]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        found: Sequence[Candidate],
        machine: Machine,
        gpus: int,
        memory: int,
        rows: int,
        tokens: int,
        axes: tuple[str, str | None],
        top: int,
        staged: Candidate | None,
        notes: tuple[str, ...],
    ) -> Plans:
        """Sort by time, then by memory; equal ones stay in the order in which they were made."""
        fitting = sorted(
            (each for each in found if each.estimate.peak <= memory),
            key=lambda each: (each.estimate.seconds, each.estimate.peak),
        )
        best: dict[Any, Candidate] = {}
        for each in fitting:
            best.setdefault(_kind(each.layout), each)
        least = min(found, key=lambda each: each.estimate.peak)
        if staged is not None and staged.estimate.peak > memory:
            staged = None
        listed = tuple(best.values())[:top]
        return cls(listed, least, staged, gpus, machine.name, machine.per_host, memory, rows, tokens, axes, notes)

    def __bool__(self) -> bool:
        return bool(self.layouts)

    @property
    def best(self) -> Candidate | None:
        """The fastest layout; None if nothing fits."""
        return self.layouts[0] if self.layouts else None

    def why(self) -> list[str]:
        """Sentences on what the others lose to the first."""
        if len(self.layouts) < 2:
            return []
        first, others = self.layouts[0], self.layouts[1:4]
        return [f"{name(each.layout)} takes {_longer(first.estimate, each.estimate)}" for each in others]

    def missing(self) -> str:
        """A sentence on how much memory is missing, where nothing fits."""
        least = self.least.estimate.peak
        return (
            f"no layout fits into {_giga(self.memory)} of a {self.gpu}: the least is {_giga(least)} with "
            f"{name(self.least.layout)}, {_giga(least - self.memory)} more; take more GPUs, or fewer rows"
        )

    def python(self) -> str:
        """The mode of the fastest layout, ready to paste."""
        assert self.best is not None, "there is a mode where a layout fits"
        return python(self.best, self.axes, self.memory)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON can write it."""
        listed = [self._entry(each) for each in self.layouts]
        return {
            "gpus": self.gpus,
            "gpu": self.gpu,
            "per_host": self.per_host,
            "memory": self.memory,
            "rows": self.rows,
            "tokens_per_row": self.tokens,
            "layouts": listed,
            "why": self.why(),
            "missing": "" if self.layouts else self.missing(),
            "notes": list(self.notes),
            "with_stages": self._entry(self.staged) if self.staged is not None else None,
        }

    def _entry(self, each: Candidate) -> dict[str, Any]:
        found = each.estimate
        return {
            "layout": asdict(each.layout),
            "name": name(each.layout),
            "seconds": found.seconds,
            "tokens_per_second": self.rows * self.tokens / found.seconds,
            "seconds_by_cause": dict(found.causes),
            "exposed_seconds": found.exposed,
            "peak_bytes": found.peak,
            "bytes_by_role": dict(found.memory),
            "python": python(each, self.axes, self.memory) if each.layout.stages == 1 else "",
        }

    def __str__(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, then sentences."""
        if self.best is None:
            yield self.missing()
            return
        yield self._table()
        roles = ", ".join(f"{role} {_giga(size)}" for role, size in self.best.estimate.memory.items() if size >= 1e7)
        yield f"memory of the first: {roles}"
        causes = self.best.estimate.causes
        yield "time of the first: " + ", ".join(f"{_MEANT[k]} {_time(t)}" for k, t in causes.items() if t >= 1e-5)
        yield from self.why()
        yield from (f"note: {each}" for each in self.notes)
        if self.staged is not None and self.staged.estimate.seconds < self.best.estimate.seconds:
            staged, took = self.staged.layout.stages, _time(self.staged.estimate.seconds)
            yield f"{staged} pipeline stages would take {took} by estimate; nothing here runs them yet"
        yield f"\n{self.python()}"

    def _table(self) -> Table:
        unit = "tokens/s" if self.tokens > 1 else "rows/s"
        shown = Table(title=f"{self.gpus} {self.gpu}, {self.per_host} a host, {self.rows} rows a step: estimates")
        shown.add_column("layout")
        for heading in ("step", unit, "exposed", "memory"):
            shown.add_column(heading, justify="right")
        for each in self.layouts:
            found = each.estimate
            rate = f"{self.rows * self.tokens / found.seconds:,.0f}"
            shown.add_row(name(each.layout), _time(found.seconds), rate, _time(found.exposed), _giga(found.peak))
        return shown


def name(layout: Layout) -> str:
    """A layout in a few words."""
    words = [str(layout.style)]
    if layout.shard is not None:
        words.append(f"in groups of {layout.shard}")
    if layout.keeps_gathered:
        words.append("gathered once")
    words += [f"tensor {layout.tensor}"] if layout.tensor > 1 else []
    words += [f"{layout.stages} stages"] if layout.stages > 1 else []
    words += [f"{layout.micro_batches} micro-batches"] if layout.micro_batches > 1 else []
    words += ["recomputed"] if layout.recompute != "none" else []
    return ", ".join(words)


def python(found: Candidate, axes: tuple[str, str | None], memory: int) -> str:
    """The mesh and the mode of a layout as Python."""
    layout, (batch, tensor) = found.layout, axes
    names, sizes = [batch], [layout.data]
    if layout.shard is not None:
        names, sizes = ["replicate", "shard"], [layout.data // layout.shard, layout.shard]
    if tensor is not None:
        names, sizes = [*names, tensor], [*sizes, layout.tensor]
    style = "replicate" if layout.style == "shard_optimizer" else layout.style
    options = [f'"{style}"', "mesh=mesh"]
    options += ["shard_optimizer=True"] if layout.style == "shard_optimizer" else []
    options += [f"reshard_after_forward={not layout.keeps_gathered}"] if layout.style == "fully_shard" else []
    options += [f"micro_batches={layout.micro_batches}"] if layout.micro_batches > 1 else []
    options += ["params=params"] if tensor is not None else []  # as the step's own mode has them
    budget = f', memory="{memory // 10**9}GB"' if layout.recompute != "none" else ""
    quoted = ", ".join(f'"{each}"' for each in names)
    return (
        f'mesh = init_device_mesh("cuda", ({", ".join(map(str, sizes))},), mesh_dim_names=({quoted},))\n'
        f"mode = spmd.DataParallel({', '.join(options)})\n"
        f"step = spmd.compile(parallel_mode=mode{budget})(step)"
    )


def _kind(layout: Layout) -> Any:
    return layout.style, layout.shard, layout.keeps_gathered, layout.tensor


def _longer(first: Estimate, other: Estimate) -> str:
    """How much longer, and what most of it is."""
    more = {k: other.causes[k] - first.causes[k] for k in first.causes}
    parts = sorted((k for k, t in more.items() if abs(t) > _NOISE * first.seconds), key=lambda k: -abs(more[k]))
    listed = ", ".join(f"{_time(abs(more[k]))} {'more' if more[k] > 0 else 'less'} for {_MEANT[k]}" for k in parts[:2])
    return f"{_time(other.seconds - first.seconds)} longer" + (f": {listed}" if listed else "")


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if abs(seconds) >= 1 else f"{seconds * 1e3:.1f} ms"


def _giga(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
