"""Split a program that runs for each micro-batch: the last run updates, the ones before it accumulate alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ..base import Pass
from ..cleanup.dead_code import DeadCode
from ..communication.gather_once import gathered_for_all
from ..communication.keep_over_runs import keep_over_runs
from ..communication.reduce_once import reduced_for_all
from ..errors import PassError
from ..ir.micro_batches import GATHERED_ONCE, REDUCED_ONCE, accumulating, added_to
from ..ir.program import Program


@dataclass(frozen=True)
class SplitMicroBatches(Pass):
    """A program of its own for all runs of a call but the last one, without what accumulators do not need.

    The passes behind it rewrite both. It stands before updates are written in place. The first run has a program of its
    own, too, where it communicates for all: ``reduce_once.py``, and ``gather_once.py`` if the program asks for it.
    """

    def rewrite(self, program: Program) -> int:
        """Make the program, once."""
        micro = program.micro_batches
        if micro is None:
            return 0
        first = accumulating(program.earlier.get("accumulating", program), micro.joined)
        _check_inputs(first, program)
        DeadCode().rewrite(first)
        first.writes = added_to(program)
        program.earlier = {"accumulating": first}
        if len(program.in_order()) > 1:
            _communicate_first(program)
        return 1


def earlier_runs(program: Program) -> dict[str, Program]:
    """The programs of the runs before the last one, by role, which return accumulators and rows alone."""
    micro, members, found = program.micro_batches, program.members(), dict[str, Program]()
    assert micro is not None, "a program that runs several times"
    for role in dict.fromkeys(role for role, _ in micro.turns(program.earlier)[:-1]):
        found[role] = accumulating(members[role], micro.joined)
        if len(found[role].outputs) < len(members[role].outputs):
            DeadCode().rewrite(found[role])
    return found


def _communicate_first(program: Program) -> None:
    """Give the first run a program of its own, if it has anything to reduce or gather for all runs."""
    accumulates = program.earlier["accumulating"]
    varying = {each.name for each in program.inputs if program.varies(each)}
    first = replace(accumulates.copy(), name=f"{program.name}-opening")
    others = accumulates, program
    keeps = keep_over_runs(first, others, REDUCED_ONCE, "reduced", partial(reduced_for_all, varying=varying))
    if program.gathers_once:
        keeps |= keep_over_runs(first, others, GATHERED_ONCE, "gathered", gathered_for_all)
    if keeps:
        kept = {each.name for each in first.inputs if each.role.is_carried and not each.role.is_sum}
        first.writes = (first.writes or frozenset()) | kept
        program.earlier = {**program.earlier, "opening": first}


def _check_inputs(first: Program, last: Program) -> None:
    """Both find state where the other one does: where programs differ in sizes, passes have formed the same units."""
    one, other = ([(each.name, [part.input.name for part in each.parts]) for each in p.inputs] for p in (first, last))
    if one != other:
        raise PassError(f"{first.name} keeps state otherwise than {last.name} does: pass batches that divide evenly")
