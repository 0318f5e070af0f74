"""Run a pipeline of passes over one program: check it, time it, keep its history."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ._torch import LazyGraphModule
from .base import Pass
from .errors import PassError
from .ir.bundle import Bundle
from .ir.check import check as check_program
from .ir.infer_shapes import fill_vals
from .ir.program import LAST, Program
from .ir.region import Island
from .regions.form_islands import FormIslands
from .unexpected_errors import REPORT, describe_op

OnStage = Callable[[int, Pass, Program, float], None]  # stage number, pass, program after it, seconds it took

FIRST_STAGE = 2  # 00 is capture, 01 is partition


def run(
    program: Program,
    passes: Sequence[Pass],
    on_stage: OnStage | None = None,
    check: bool = True,
) -> Program:
    """Apply ``passes`` in order to a copy of ``program`` and return it, with a line of history for each.

    ``on_stage(number, pass, program, seconds)`` is called after every pass, for dumps and timing. ``check=False``
    leaves out the checks: after the first pass, the last one, and each that is not of ``passes``; where one finds
    something, after every pass, for the first that is broken.

    Raises ``TypeError`` for what is no pass, ``ValueError`` for an order that a pass forbids, and ``PassError``,
    which names the pass and carries the history as notes, where a pass fails or leaves a program that is broken.
    ``program`` itself stays as it is.
    """
    passes = tuple(passes)
    _validate(program, passes)
    answers: list[Sequence[bool]] = []
    try:
        return _run(program, tuple(_noting(each, answers) for each in passes), on_stage, check)
    except PassError as error:
        failure = error
    if check:  # one of ours, behind which nothing was checked, may have broken what a later one stumbled over
        known = iter(answers)
        _run(program, tuple(_answered(each, known) for each in passes), None, check, each_time=True)
    raise failure


def _run(
    program: Program, passes: tuple[Pass, ...], on_stage: OnStage | None, check: bool, each_time: bool = False
) -> Program:
    """``each_time``: check behind passes of ours, too. Else the last check finds what they break, in less time."""
    done, promises = program.copy(), program.members()
    for number, each in enumerate(passes, start=FIRST_STAGE):
        is_outer = number in (FIRST_STAGE, FIRST_STAGE + len(passes) - 1)
        is_checked = check and (each_time or is_outer or not _is_ours(each))
        seconds = _stage(number, each, done, promises, is_checked)
        if on_stage is not None:
            on_stage(number, each, done, seconds)
    if program.stages is not None:
        done.stages = replace(done.stages, programs=_Finished(done, program.stages, passes))
    for one in (done, *done.earlier.values()):
        one.graph_module = LazyGraphModule(one.graph_module, one.graph)
    return done


def _noting(each: Pass, answers: list[Sequence[bool]]) -> Pass:
    """The same pass; what it chooses, maybe together with other ranks, is noted."""

    def choose(found: Sequence[Island]) -> Sequence[bool]:
        answers.append(each.choose(found))  # type: ignore[attr-defined]
        return answers[-1]

    return replace(each, choose=choose) if isinstance(each, FormIslands) else each


def _answered(each: Pass, answers: Iterator[Sequence[bool]]) -> Pass:
    """The same pass, which gets these answers: other ranks may not have failed, and would not take part again."""
    return replace(each, choose=lambda _: next(answers)) if isinstance(each, FormIslands) else each


def _stage(number: int, each: Pass, program: Program, promises: dict[str, Program], is_checked: bool) -> float:
    """Run one pass over all members, and record it; returns the seconds that the pass itself took.

    ``promises``: by role, the programs that members are checked against. Those that the pass makes are added.
    """
    members, communicated, start = program.members(), _count_collectives(program), time.perf_counter()
    try:
        edits = {role: each.rewrite(one) for role, one in members.items()}
        seconds = time.perf_counter() - start
        for role, one in program.members().items():
            _complete(one, edits.get(role, 0))
            if members.get(role) is not one:
                promises[role] = one.copy()
            if is_checked:
                check_program(one, promises[role])
    except Exception as error:
        raise _failure(number, each, program, error) from error
    outcome = _outcome(each, sum(edits[role] for role in _recorded(edits)), communicated, _count_collectives(program))
    program.history.append(f"{number:02} {each}: {outcome}")
    return seconds


def _recorded(members: Mapping[str, object]) -> Iterable[str]:
    """The members whose edits the history of a program counts: itself, or those that run in its place."""
    return [LAST] if LAST in members else members


class _Finished(Mapping[str, Program]):
    """The programs of a pipeline behind all passes; those of other ranks are rewritten when somebody looks at them."""

    def __init__(self, done: Program, before: Bundle, passes: tuple[Pass, ...]) -> None:
        self._done: dict[str, Program] = {role: done.stages.programs[role] for role in before.roles_of(done)}
        self._before, self._passes = before.programs, passes

    def __getitem__(self, role: str) -> Program:
        if role not in self._done:
            self._done[role] = run(self._before[role], self._passes, check=False)
        return self._done[role]

    def __iter__(self) -> Iterator[str]:
        return iter(self._before)

    def __len__(self) -> int:
        return len(self._before)


def _count_collectives(program: Program) -> int:
    members = program.members()
    return sum(len(members[role].collectives()) for role in _recorded(members))


def _complete(program: Program, edits: object) -> None:
    """Add what a pass may leave out: shapes of new nodes, and what their collectives are."""
    if isinstance(edits, bool) or not isinstance(edits, int):
        raise PassError(f"rewrite must return the number of its edits, got {edits!r}")
    fill_vals(program)
    program.note_collectives()


def _outcome(each: Pass, edits: int, before: int, after: int) -> str:
    """The line of a pass in the history: its edits, and how numbers may change unless they stay the same bits."""
    if not edits and before == after:
        return "nothing to do"
    did = f"{before} -> {after} collectives" if before != after else f"{edits} edit{'' if edits == 1 else 's'}"
    return did if each.numerics == "exact" else f"{did}, {each.numerics}"


def _failure(number: int, each: Pass, program: Program, error: Exception) -> PassError:
    reason = str(error) if isinstance(error, PassError) else f"{type(error).__name__}: {error}"
    reason += describe_op(error.__traceback__)
    if _is_ours(each):
        reason += f"\n{REPORT}"
    failure = PassError(f"pass {each}, stage {number:02} of {program.name}, failed: {reason}")
    for line in program.history:
        failure.add_note(f"before it: {line}")
    return failure


def _is_ours(each: Pass) -> bool:
    return type(each).__module__.partition(".")[0] == __package__


def _validate(program: Program, passes: tuple[Pass, ...]) -> None:
    for each in passes:
        if isinstance(each, type) or not isinstance(each, Pass):
            hint = f"{each.__name__}() makes one" if isinstance(each, type) else "subclass passes.Pass"
            raise TypeError(f"expected instances of passes.Pass in the pipeline, got {each!r}; {hint}")
    moving = [each for each in passes if not each.keeps_order]
    if moving and any(declared.in_place for declared in program.inputs):
        raise ValueError(f"{program.name} already updates its inputs in place: no pass can follow, got {moving[0]}")
    for k, each in enumerate(passes):
        _validate_position(each, passes[:k], passes[k + 1 :])


def _validate_position(each: Pass, earlier: tuple[Pass, ...], later: tuple[Pass, ...]) -> None:
    for needed in each.needs:
        if not any(isinstance(other, needed) for other in earlier):
            raise ValueError(f"{each} needs {needed.__name__} before it in the pipeline, but that is not there")
    for other in later:
        if isinstance(other, each.after):
            raise ValueError(f"{each} must come after {type(other).__name__}, but stands before it")
    moving = [other for other in later if not other.keeps_order]
    if each.last and moving:
        raise ValueError(f"{each} must be the last pass, but {moving[0]} comes after it")
