"""Programs that passes and collectives are made wrong in: of all ranks, before and after each pass of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor

import passes
from passes import Pass, PassError, Program, check
from passes.analysis.collective_algorithms import Algorithm
from passes.default_passes import with_islands, with_numbers_on_device, with_regions
from passes.ir.collectives import WAIT, c10d, is_wait
from spmd.ranks.differences import rounding_of
from spmd.verification.compared_stages import Stage, run_stage
from spmd.verification.lockstep import LockstepError, run_in_lockstep
from spmd.verification.tracer import Tracer
from tests.passes.memory.test_fold_layout_copies import read_once
from tests.passes.programs import GROUP, f64, make_program, random_inputs
from tests.passes.schedule.test_overlap import backward, program_of, table
from tests.spmd.numbers.test_realise import as_on_nccl, only
from tests.spmd.verification.prepared import Prepared, prepare, prepared

from . import graphs

TRIED = 6  # nodes for an operator
CLOSE = 1e-9  # of results of which one is as good as the other


def behind(which: type[Pass], added: Pass) -> list[Pass]:
    """The default passes, with another one behind one of them."""
    return [each for one in passes.default() for each in ([one, added] if type(one) is which else [one])]


aten = torch.ops.aten
SPLIT = {"parallel_style": "fully_shard"}
IN_PLACE = [passes.ReduceInPlace(min_bytes=1) if isinstance(k, passes.ReduceInPlace) else k for k in passes.default()]
BASES: dict[str, Callable[[], Prepared]] = {
    "replicate": lambda: prepared("replicate"),
    "fully_shard": lambda: prepared("fully_shard"),
    "hybrid": lambda: prepared("hybrid"),
    "resharded": lambda: prepare({**SPLIT, "reshard_after_forward": True}),
    "RMSprop": lambda: prepare({}, optimizer=torch.optim.RMSprop),
    "in place": lambda: prepare({}, pipeline=IN_PLACE),
    "micro-batches": lambda: prepare({"micro_batches": 2}),
    "numbers on the device": lambda: prepare({}, pipeline=with_numbers_on_device(passes.default())),
    "regions": lambda: prepare({}, pipeline=with_regions(passes.default())),
    "islands": lambda: prepare({}, pipeline=with_islands(passes.default())),
    "split update": lambda: prepare({}, pipeline=behind(passes.FuseForeach, passes.SplitUpdate())),
    "recomputed": lambda: prepare({}, pipeline=behind(passes.MergeEqual, passes.Recompute(("tanh",)))),
}
BASES |= {  # each collective by an algorithm
    algorithm: lambda pipeline=pipeline, ranks=ranks: prepare(SPLIT, ranks, pipeline=pipeline)
    for algorithm, pipeline, ranks in (
        ("native", passes.default(table=only(Algorithm.NATIVE)), 2),
        ("broadcast", passes.default(table=only(Algorithm.GATHER_BY_BROADCAST, Algorithm.EXCHANGE)), 3),
        ("sending", passes.default(table=only(Algorithm.GATHER_BY_SENDING, Algorithm.EXCHANGE)), 2),
        ("shared", passes.default(table=only(Algorithm.SHARED)), 2),
        ("one launch", as_on_nccl(), 2),
    )
}


def rows(x: Any) -> tuple[Any, ...]:
    """Rows that ranks exchange, and those of the first rank."""
    mixed = WAIT(c10d.all_to_all_single.default(aten.detach.default(x), [3, 3], [3, 3], GROUP))
    return (WAIT(c10d.broadcast.default(aten.exp.default(mixed), 0, GROUP)),)


SMALL: dict[str, Callable[[], tuple[Program, Pass]]] = {
    "a stack": lambda: (read_once(), passes.FoldLayoutCopies()),
    "rows": lambda: (make_program(rows, x=f64(6, 2)), passes.DropDetach()),
    "rows in planned memory": lambda: (make_program(rows, x=f64(6, 2)), passes.ReuseMemory()),
    "a backward": lambda: (program_of(backward), passes.Overlap(table(3.0))),
}


@dataclass
class Base:
    """The programs of all ranks around one pass. ``verdict``: the wrong thing that is found; empty if there is none."""

    before: Sequence[Program]
    after: Sequence[Program]
    results: Callable[[Sequence[Program], Any], list[Any]]  # runs them; the second argument watches nodes
    verdict: Callable[[Sequence[Program]], str]

    def is_wrong(self, programs: Sequence[Program]) -> bool:
        """Whether ranks have other results or state than those of the right programs."""
        pairs = zip(self.results(self.after, None), self.results(programs, None), strict=True)
        return any(not _is_close(one, other) for one, other in pairs)


@cache
def base_of(name: str, which: type[Pass]) -> Base:
    """The programs around the first pass of this type in the pipeline of a base."""
    return _small(name) if name in SMALL else _prepared(name, which)


@cache
def _made(name: str) -> tuple[Prepared, Tracer]:
    made = BASES[name]()
    return made, Tracer(made.captured, [each.transformed for each in made.programs], made.inputs, rounding_of([]))


def _prepared(name: str, which: type[Pass]) -> Base:
    made, tracer = _made(name)
    k = next(k for k, each in enumerate(made.options.pipeline) if type(each) is which)
    after = [each.after[k] for each in made.programs]
    assert None not in after, f"{which.__name__} finds nothing to do in {name}: its mutants need another base"
    before = [next(filter(None, [*reversed(each.after[:k]), each.transformed])) for each in made.programs]

    def results(programs: Sequence[Program], watch: Any) -> list[Any]:
        return [values[key] for values in run_stage(programs, made.inputs, watch) for key in sorted(values)]

    def verdict(programs: Sequence[Program]) -> str:
        found = tracer._guilty(Stage(which.__name__, programs), tracer.expected, None)
        return "" if isinstance(found, list) else found.difference.says

    return Base(before, [each for each in after if each is not None], results, verdict)


def _small(name: str) -> Base:
    before, each = SMALL[name]()
    after = [_of_rank(passes.run(before, [each]), rank) for rank in range(2)]

    def results(programs: Sequence[Program], watch: Any) -> list[Any]:
        given = random_inputs(before, len(programs))
        returned = run_in_lockstep(programs, given, watch)
        return [value for of_rank in [*returned, *given] for value in of_rank]

    base = Base([before] * 2, after, results, lambda programs: "other bits" if base.is_wrong(programs) else "")
    return base


def _of_rank(program: Program, rank: int) -> Program:
    axes = [replace(axis, coordinate=rank) for axis in program.mesh.axes]
    return replace(program, mesh=replace(program.mesh, axes=tuple(axes)))


@dataclass(frozen=True)
class Mutant:
    """The programs of all ranks after a pass that made one wrong edit, at a node."""

    node: str
    programs: Sequence[Program]


def mutants(base: Base, sites: Sequence[str], operator: str, seed: str) -> Iterator[Mutant]:
    """All wrong versions by an operator at these nodes, in an order drawn by seed; the same edit on all ranks."""
    values = dict[str, Any]()

    def keep(nodes: Any, found: Any) -> None:
        values[nodes[0].name] = found[-1].clone() if isinstance(found[-1], Tensor) else found[-1]

    base.results(base.after, keep)
    for site in graphs.in_turn(sites, f"{operator} {seed}"):
        programs = [each.copy() for each in base.after]
        edited = [graphs.edit(operator, program, site, values) for program in programs]
        if all(edited):
            yield Mutant(site, programs)


def communicating(base: Base, op: Any) -> list[str]:
    """The nodes of a collective's op, and those that wait for them."""
    starts = [node for node in base.after[0].collectives() if node.target is op]
    return [each.name for start in starts for each in (start, *filter(is_wait, start.users))]


def outcomes(base: Base, sites: Sequence[str], seed: str, most: int) -> dict[str, str]:
    """What catches the wrong versions by each operator that makes one; each is tried until one is caught.

    The operators are taken in an order drawn by seed, until one of each of ``most`` operators is caught.

    One that changes no number of any rank is as good as the right one; raises ``AssertionError`` for any other one that
    is not caught.
    """
    found = dict[str, str]()
    for operator in graphs.in_turn([*graphs.OPERATORS], seed):
        if sum(map(bool, found.values())) == most:
            break
        for mutant in islice(mutants(base, sites, operator, seed), TRIED):
            found[operator] = caught_by(base, mutant.programs)
            if found[operator]:
                break
            assert not base.is_wrong(mutant.programs), f"{operator} at {mutant.node} changes numbers, and nothing shows"
    return found


def caught_by(base: Base, programs: Sequence[Program]) -> str:
    """What finds these programs wrong: the checker, the run of all ranks, or the numbers; empty if nothing does."""
    try:
        for program in programs:
            check(program)
        return "numbers" if base.verdict(programs) else ""
    except PassError:
        return "checker"
    except (LockstepError, IndexError):
        return "run"


def _is_close(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other)
    return one.shape == other.shape and torch.allclose(one, other, CLOSE, CLOSE, equal_nan=True)
