"""``certify``: what the final programs of all ranks compute is derived, and compared with the captured program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import torch

from passes import AxisRole, Mesh, Program, Role

from ..answers.answer import Answers, values_of, with_other
from ..call.rng import random_state_kept
from ..capture.captured import Captured
from ..deferral.pending import calling, finish_pending
from ..modes.base import ParallelMode, PlannedMode
from ..partitioner.prepare import prepared
from ..unexpected_errors import is_users
from . import symbols
from .certificate import Certificate, Certification, certify_bundle, certify_programs
from .certify_runs import RunsCertification
from .peer import Peer
from .rank import SimulatedRank
from .verifier import MOST, simulated_ranks
from .world import AnyMesh, check_mesh

_MOST_RANKS = 1024
_MOST_WAYS = 16
_OUTCOMES = ("wrong", "cannot show", "shown")


def certify(step: Any, *args: Any, world: int = 4, mesh: AnyMesh = None, **kwargs: Any) -> Certificate:
    """Derive what each value of the final programs is, and whether each output is the global one under its placement.

    ``step``, ``world``, ``mesh`` and the arguments are those of ``verify``. No numbers are compared and nothing is
    rounded: what is derived holds for any values. What cannot be shown is distinguished from what is wrong, and settled
    by ``verify``. Micro-batches are derived run by run: each sum over them has to be that of all parts, once each; with
    ``bits="same"``, in the order of the one tree over all parts. With experts, which rows go to which is drawn at
    random, or what arguments say: it is shown for one such routing; and where a mask hides keys of a split sequence,
    for the whole numbers of the arguments. Of a pipeline, of up to 16 ranks, all programs and messages are derived. How
    the plain step was captured is not a part of it, nor what ``masked_scatter`` is in other ops: where parts of the
    batch take from their own rows alone, each call looks whether these are all that they take. Of more than 16 ranks
    the first two and the last along each axis are looked at, up to 1,024 ranks in all.

    Of a step that branches on values, each way that a call can take is derived, up to 16 of them.

    Raises ``TypeError`` or ``ValueError`` for what cannot be certified, and what compiling the step raises.
    """
    check_mesh(mesh, world)
    if world > _MOST_RANKS:
        raise ValueError(f"expected world to be {_MOST_RANKS} ranks or fewer, got {world}")
    finish_pending()
    with calling, random_state_kept():
        with simulated_ranks(step, args, kwargs, world, mesh) as (plain, first, peer):
            ranks: list[SimulatedRank | Peer] = [first, *(peer(k) for k in represented(first.mesh) if k)]
            numbers = {leaf.name: leaf.value for leaf in plain.given().tensors() if not leaf.value.is_floating_point()}
            programs = [(first.compiled.captured, [each.programs.final for each in ranks]) for _ in _ways(ranks)]
        found = [_certified(plain.subject.options.mode, *each, numbers, world) for each in programs]
        worst = min(found, key=lambda each: _OUTCOMES.index(each.outcome))
        return replace(worst, ways=len(found))


def _ways(ranks: Sequence[SimulatedRank | Peer]) -> Iterator[None]:
    """Prepare the ranks for each way that a call can take where the step branches on values, up to 16 of them.

    A way that ends in an error of the user's own has no program.
    """
    first, *peers = ranks
    assert isinstance(first, SimulatedRank)
    todo, seen = [Answers()], set[tuple[bool, ...]]()
    while todo and len(seen) < _MOST_WAYS:
        given = todo.pop(0)
        try:
            first.prepare(given)
        except (Exception, SystemExit) as error:
            if given and (isinstance(error, SystemExit) or is_users(error)):
                continue
            raise
        answers = first.compiled.captured.answers
        if values_of(answers) not in seen:
            seen.add(values_of(answers))
            for each in peers:
                each.prepare()
            yield
            todo += [with_other(answers, number) for number in range(len(given), len(answers))]


def _certified(
    mode: ParallelMode, captured: Captured, final: list[Program], numbers: dict[str, torch.Tensor], world: int
) -> Certificate:
    """Certify the programs of one way, those of some ranks."""
    _check_runs(final[0])
    if final[0].stages is not None and len(final) < world:
        raise ValueError(f"expected at most {MOST} ranks with stages, of which all send to others, got {world}")
    whole = prepared(captured.program, _parts(final[0]))
    sent = _sent_in(mode, captured.program)
    certification = RunsCertification if final[0].micro_batches is not None else Certification
    with torch.no_grad(), symbols.sent_in(sent):
        if final[0].stages is not None:
            bundles = [(each.stages, each.stages.coordinate_of(each)) for each in final]
            found = certify_bundle(whole, bundles, "step")
        else:
            found = certify_programs(whole, final, numbers, certification)
    return replace(found, rounded=tuple(map(str, sent)))


def _sent_in(mode: ParallelMode, captured: Program) -> list[torch.dtype]:
    """The dtypes to which the options of the mode let ranks round what they send."""
    if not isinstance(mode, PlannedMode):
        return []
    plan = mode.plan(captured)
    options = [plan.options.get("reduce_dtype"), plan.options.get("gather_dtype")]
    held = {declared.dtype for declared in captured.inputs if declared.role is Role.PARAMETER}
    return [dtype for dtype in dict.fromkeys((*options, *plan.reduce_dtypes.values())) if dtype and held - {dtype}]


def _parts(program: Program) -> int:
    """The parts of the batch that need no rows of each other, as the program was divided."""
    mesh, micro = program.mesh, program.micro_batches
    return micro.count * prod(mesh.axes[k].size for k in mesh.axes_with(AxisRole.BATCH)) if micro is not None else 1


def _check_runs(program: Program) -> None:
    """Raise ``ValueError`` for parts of the batch that one program computes together."""
    micro = program.micro_batches
    together = program.same_bits and (micro is None or micro.together > 1)
    if together:
        raise ValueError(
            "expected a step whose micro-batches, or virtual parts, run one after the other on all ranks: certify "
            "derives no parts that run together, use spmd.verify"
        )


def represented(mesh: Mesh) -> list[int]:
    """The ranks that are looked at, by number: all of a few; of many, some that differ in all that ranks differ in."""
    sizes = [axis.size for axis in mesh.axes]
    if prod(sizes) <= MOST:
        return list(range(prod(sizes)))
    some = [sorted({0, 1, size - 1} if len(sizes) < 3 else {0, size - 1}) for size in sizes]
    steps = [prod(sizes[k + 1 :]) for k in range(len(sizes))]
    return sorted(sum(k * step for k, step in zip(at, steps, strict=True)) for at in product(*some))
