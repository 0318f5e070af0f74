"""The result of ``spmd.plan``: layouts by estimated time, why the first one wins, and its mode as Python."""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from .changes import MEANT, changes, duration, longer, size_of
from .estimate import Estimate
from .layout import Layout
from .machine import Machine
from .measured import HOST
from .step_work import EXPERTS, SEQUENCE, TENSOR, StepWork


@dataclass(frozen=True)
class Candidate:
    """A layout with its estimate."""

    layout: Layout
    estimate: Estimate


@dataclass(frozen=True)
class Plans:
    """Layouts that fit, the fastest first; of those that differ in recomputation or micro-batches alone, the best.

    ``front``: layouts such that none is both faster and smaller, whether they fit. ``least``: the one that needs the
    least memory. ``blocks``: the first of equal blocks, and their number, if they are all of a kind. ``notes``: on ops
    that have no rule or no cost. ``recipes``: for a number of ranks along "tensor", the dims of parameters that these
    split, where the step's mode names none. False if nothing fits.
    """

    layouts: tuple[Candidate, ...]
    least: Candidate
    gpus: int
    gpu: str
    per_host: int
    memory: int
    rows: int
    tokens: int
    axes: tuple[str, str | None]
    front: tuple[Candidate, ...] = ()
    blocks: tuple[str, int] | None = None
    notes: tuple[str, ...] = ()
    recipes: Mapping[int, Mapping[str, int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        found: Sequence[Candidate],
        machine: Machine,
        gpus: int,
        memory: int,
        rows: int,
        step: StepWork,
        axes: tuple[str, str | None],
        top: int,
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
        return cls(
            tuple(best.values())[:top],
            least,
            gpus,
            machine.name,
            machine.per_host,
            memory,
            rows,
            step.tokens,
            axes,
            _front(found),
            step.blocks,
            step.notes,
        )

    def __bool__(self) -> bool:
        return bool(self.layouts)

    @property
    def best(self) -> Candidate | None:
        """The fastest layout; None if nothing fits."""
        return self.layouts[0] if self.layouts else None

    @property
    def rate(self) -> float:
        """Tokens a second of the fastest layout; 0 if nothing fits."""
        return self.rows * self.tokens / self.best.estimate.seconds if self.best else 0.0

    def why(self) -> list[str]:
        """Sentences on what the others lose to the first."""
        if len(self.layouts) < 2:
            return []
        first, others = self.layouts[0], self.layouts[1:4]
        return [f"{name(each.layout)} takes {longer(first.estimate.causes, each.estimate.causes)}" for each in others]

    def missing(self) -> str:
        """A sentence on how much memory is missing, where nothing fits."""
        least = self.least.estimate.peak
        fewer = ", or fewer rows" if self.least.layout.rows > 1 else ""  # with one in each micro-batch they do not help
        return (
            f"no layout fits into the {size_of(self.memory)} of one {self.gpu}: the least is {size_of(least)} with "
            f"{name(self.least.layout)}, {size_of(least - self.memory)} more; take more GPUs{fewer}"
        )

    def python(self, found: Candidate | None = None) -> str:
        """The mode of a layout, ready to paste; by default of the fastest. Empty for stages without equal blocks."""
        chosen = found or self.best
        assert chosen is not None, "there is a mode where a layout fits"
        recipe = self.recipes.get(chosen.layout.tensor)
        axes = (self.axes[0], TENSOR) if recipe else self.axes
        text = python(chosen, axes, self.memory, self.blocks, recipe)
        return text.replace('"cuda"', '"cpu"') if self.gpu == HOST else text

    def against(self, before: Plans | Mapping[str, Any]) -> list[str]:
        """Sentences on what changed since another plan, given as such or as its ``to_dict``, and why."""
        old, new = before.to_dict() if isinstance(before, Plans) else before, self.to_dict()
        return changes(old, new)

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
            "blocks": list(self.blocks) if self.blocks else None,
            "layouts": listed,
            "why": self.why(),
            "missing": "" if self.layouts else self.missing(),
            "notes": list(self.notes),
            "front": [self._entry(each) for each in self.front],
            "least": self._entry(self.least),
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
            "python": self.python(each),
        }

    def __str__(self) -> str:
        """The table, as wide as the terminal, and the sentences and the mode in lines as long as they are."""
        text = io.StringIO()
        console = Console(file=text, color_system=None, width=shutil.get_terminal_size().columns)
        console.print(self, markup=False, soft_wrap=True)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, then sentences."""
        if self.best is None:
            yield self.missing()
            return
        yield self._table()
        found, part = self.best.estimate, 0.001  # what is less is not listed
        roles = [f"{role} {size_of(size)}" for role, size in found.memory.items() if size > part * found.peak]
        causes = [f"{MEANT[k]} {duration(t)}" for k, t in found.causes.items() if t > part * found.seconds]
        yield f"memory of the first: {', '.join(roles)}"
        yield f"time of the first: {', '.join(causes)}"
        yield from self.why()
        yield from (f"note: {each}" for each in self.notes)
        if self.best.layout.stages > 1:
            yield "note: messages between stages have been run over gloo only, not over NCCL"
        yield f"\n{self.python()}"

    def _table(self) -> Table:
        unit = "tokens/s" if self.tokens > 1 else "rows/s"
        shown = Table(title=f"{self.gpus} {self.gpu}, {self.per_host} a host, {self.rows} rows a step: estimates")
        shown.add_column("layout")
        for heading in ("step", unit, "exposed", "memory"):
            shown.add_column(heading, justify="right")
        for each in self.layouts:
            found = each.estimate
            rate, times = self.rows * self.tokens / found.seconds, (duration(found.seconds), duration(found.exposed))
            shown.add_row(name(each.layout), times[0], f"{rate:,.0f}", times[1], size_of(found.peak))
        return shown


def compared(plans: Sequence[Plans]) -> Table:
    """The fastest layout on each machine, a row each; and tokens for each GPU beside those of the first machine."""
    shown = Table(title=f"{plans[0].rows} rows a step: estimates")
    shown.add_column("GPUs")
    for heading in ("step", "tokens/s", "of a GPU", "memory"):
        shown.add_column(heading, justify="right")
    shown.add_column("fastest layout")
    first = next((each.rate / each.gpus for each in plans if each), 1.0)
    for each in plans:
        machine = f"{each.gpus} {each.gpu}"
        if each.best is None:
            shown.add_row(machine, "", "", "", size_of(each.least.estimate.peak), "none fits")
            continue
        found, part = each.best.estimate, each.rate / each.gpus / first
        figures = (duration(found.seconds), f"{each.rate:,.0f}", f"{part:.0%}", size_of(found.peak))
        shown.add_row(machine, *figures, name(each.best.layout))
    return shown


def _front(found: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The candidates than which none is both faster and smaller, by time."""
    kept: list[Candidate] = []
    for each in sorted(found, key=lambda each: (each.estimate.seconds, each.estimate.peak)):
        if not kept or each.estimate.peak < kept[-1].estimate.peak:
            kept.append(each)
    return tuple(kept)


def name(layout: Layout) -> str:
    """A layout in a few words."""
    words = [str(layout.style)]
    if layout.shard is not None:
        words.append(f"in groups of {layout.shard}")
    if layout.keeps_gathered:
        words.append("gathered once")
    counts = (("tensor", layout.tensor), ("sequence", layout.context), ("experts", layout.experts))
    words += [f"{what} {count}" for what, count in counts if count > 1]
    words += [f"{layout.stages} stages {layout.schedule}"] if layout.stages > 1 else []
    words += [f"{layout.micro_batches} micro-batches"] if layout.micro_batches > 1 else []
    if layout.recompute != "none":
        words.append(" ".join([*(f"{part:.0%}" for part in layout.recomputed), "recomputed"]))
    return ", ".join(words)


def python(
    found: Candidate,
    axes: tuple[str, str | None],
    memory: int,
    blocks: tuple[str, int] | None = None,
    recipe: Mapping[str, int] | None = None,
) -> str:
    """The mesh and the mode of a layout as Python, for the step ``step`` and the ``params`` of its own mode.

    ``blocks``: the first of equal blocks, and their number, which stages divide. Empty for stages without these.
    ``recipe``: the dims of parameters that ranks along "tensor" split, in the place of ``params``.
    """
    layout, tensor, starts = found.layout, axes[1], _starts(found.layout, blocks)
    if layout.stages > 1 and not starts:
        return ""
    mesh, roles = _roles(layout, axes)
    style = "replicate" if layout.style == "shard_optimizer" else layout.style
    options = [f'"{style}"', "mesh=mesh"]
    if layout.shard is None and len(roles) > 1:
        options.append("axes={" + ", ".join(f'"{role}": {named}' for role, named in roles.items()) + "}")
    options += ["shard_optimizer=True"] if layout.style == "shard_optimizer" else []
    options += [f"reshard_after_forward={not layout.keeps_gathered}"] if layout.style == "fully_shard" else []
    options += [f"micro_batches={layout.micro_batches}"] if layout.micro_batches > 1 else []
    options += ["stages=[" + ", ".join(f'"{each}"' for each in starts) + "]"] if starts else []
    options += [f'schedule="{layout.schedule}"'] if starts and layout.schedule != "1f1b" else []
    options += ["params=params"] if tensor is not None else []  # by default as the step's own mode has them
    size = f'"{memory // 10**9}GB"' if memory >= 10**10 else str(memory)
    budget = f", memory={size}" if layout.recompute != "none" else ""
    sizes, names = ("".join(f"{each}, " for each in listed) for listed in (mesh.values(), (f'"{k}"' for k in mesh)))
    if len(mesh) > 1:
        sizes, names = sizes[:-2], names[:-2]
    splits = "".join(f'    "{name}": {{"{tensor}": Shard({dim})}},\n' for name, dim in (recipe or {}).items())
    imports = "from torch.distributed.device_mesh import init_device_mesh\n"
    imports += "from torch.distributed.tensor import Shard\n" if splits else ""
    return (
        imports
        + (f"params = {{\n{splits}}}\n" if splits else "")
        + f'mesh = init_device_mesh("cuda", ({sizes.rstrip()}), mesh_dim_names=({names.rstrip()}))\n'
        f"mode = spmd.DataParallel({', '.join(options)})\n"
        f"step = spmd.compile(parallel_mode=mode{budget})(step)"
    )


def _roles(layout: Layout, axes: tuple[str, str | None]) -> tuple[dict[str, int], dict[str, str]]:
    """The axes of a layout's mesh with their sizes, and what ``axes=`` says of them, as Python."""
    batch, tensor = axes
    listed = [("stages", "pp", layout.stages), ("batch", batch, layout.data // layout.context // layout.experts)]
    listed += [("sequence", SEQUENCE, layout.context), ("experts", EXPERTS, layout.experts)]
    used = [each for each in listed if each[0] == "batch" or each[2] > 1]
    used += [("tensor", tensor, layout.tensor)] if tensor is not None else []
    mesh, roles = {axis: size for _, axis, size in used}, {role: f'"{axis}"' for role, axis, _ in used}
    if layout.experts > 1:  # ranks that divide experts have other rows, too
        roles["batch"] = f'("{batch}", "{EXPERTS}")'
    if layout.shard is not None:
        groups = {"replicate": layout.data // layout.shard, "shard": layout.shard}
        mesh = groups | {axis: size for axis, size in mesh.items() if axis != batch}
    return mesh, roles


def _starts(layout: Layout, blocks: tuple[str, int] | None) -> list[str]:
    """The first block of each stage but the first; none without blocks that are counted by number."""
    container, _, first = blocks[0].rpartition(".") if blocks else ("", "", "")
    if not blocks or not first.isdigit():
        return []
    return [f"{container}.{int(first) + each}" for each in accumulate(layout.cut[:-1])]


def _kind(layout: Layout) -> Any:
    stages = layout.stages, layout.schedule
    return layout.style, layout.shard, layout.keeps_gathered, layout.tensor, layout.context, layout.experts, stages


def uncounted_note(op: str, part: float) -> str:
    """A sentence on an op whose work is not known, and how much depends on it."""
    return (
        f"{op} has no cost: it counts as the bytes that it reads and writes, {part:.1%} of the step; if it takes ten "
        f"times as long, the step takes {9 * part:.0%} longer"
    )
