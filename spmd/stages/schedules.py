"""The orders in which stages run their programs: a schedule, and where what they send is waited for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Literal, get_args

Schedule = Literal["1f1b", "zb-h1", "interleaved", "gpipe"]
Auto = Literal["auto"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)  # those that keep fewer values first
AUTO: Auto = "auto"

_SENT = ".sent"  # ends the role of what waits for what another program has sent

Order = list[tuple[str, int]]  # the role of a program, and the micro-batch that it runs


def orders(schedule: Schedule, ranks: int, virtual: int, count: int, role: Callable[[str, int], str]) -> list[Order]:
    """For each rank the programs of its ``virtual`` stages, on ``count`` micro-batches. ``role``: by part and stage.

    "gpipe" (Huang et al. 2019) runs all forwards first. "1f1b" (Narayanan et al. 2019) runs a backward as soon as it
    can, so that rank r keeps the values of at most ``ranks - r`` micro-batches. "interleaved" (Narayanan et al. 2021)
    does so where rank r has stages r, r + ranks, ..., with as many micro-batches in a row on each. "zb-h1" (Qi et al.
    2023) is "1f1b" where rank r runs the gradients of weights r micro-batches later, while it would wait.
    """
    found = []
    for rank in range(ranks):
        turns = [(turn, k) for k in range(0, count, ranks) for turn in range(virtual)]
        turns = [(turn, each) for turn, k in turns for each in range(k, min(k + ranks, count))]
        forward = [(role("forward", rank + turn * ranks), k) for turn, k in turns]
        backward = [(role("backward", rank + (virtual - 1 - turn) * ranks), k) for turn, k in turns]
        weights = [(role("weights", rank), k) for k in range(count)]
        first = ranks - 1 - rank if virtual == 1 else 2 * (ranks - 1 - rank) + (virtual - 1) * ranks
        first = len(forward) if schedule == "gpipe" else min(first, len(forward))
        order = forward[:first]
        for k, each in enumerate(backward):
            order += [*forward[first + k : first + k + 1], each]
            order += weights[k - rank : k - rank + 1] if schedule == "zb-h1" and k >= rank else []
        found.append([*order, *(weights[-rank:] if schedule == "zb-h1" and rank else [])])
    return found


def with_ends(
    found: list[Order], receivers: Mapping[str, Collection[str]], senders: Mapping[str, Collection[str]]
) -> list[list[str]]:
    """The roles of each stage in order; a program that waits for what another has sent runs once that has arrived.

    ``receivers``: for each role that sends, those that receive from it; ``senders``: the other way round. A message of
    a micro-batch arrives once its receiver runs on that. A rank knows that the receiver has run once it has received,
    by whatever way, what was sent later. Such a wait takes no time, and no rank waits for another one in a circle.
    """
    at = {each: (stage, k) for stage, order in enumerate(found) for k, each in enumerate(order)}
    known = _known(found, at, senders)
    done = []
    for stage, order in enumerate(found):
        open_: list[tuple[str, dict[int, int]]] = []
        roles: list[str] = []
        for k, (role, micro_batch) in enumerate(order):
            roles.append(role)
            clock = known[stage, k]
            ended = [each for each in open_ if all(clock.get(other, -1) >= at_ for other, at_ in each[1].items())]
            roles += [each for each, _ in ended]
            open_ = [each for each in open_ if each not in ended]
            if receivers.get(role):
                arrives = dict(at[each, micro_batch] for each in receivers[role])
                open_.append((ended_role(role), arrives))
        done.append([*roles, *(each for each, _ in open_)])
    return done


def with_starts(order: list[str], early: Collection[str]) -> list[str]:
    """Each program of ``early`` starts to receive while the one before it computes: two messages at most wait so."""
    done: list[str] = []
    last = 0  # where the last program begins that computes
    for role in order:
        if role in early:
            done.insert(last, started_role(role))
        if not role.endswith(_SENT):
            last = len(done)
        done.append(role)
    return done


def _known(
    found: list[Order], at: Mapping[tuple[str, int], tuple[int, int]], senders: Mapping[str, Collection[str]]
) -> dict[tuple[int, int], dict[int, int]]:
    """After each program, by stage and position, how far its rank knows each stage to be."""
    known: dict[tuple[int, int], dict[int, int]] = {}
    waiting = [(stage, k) for k in range(max(map(len, found))) for stage in range(len(found)) if k < len(found[stage])]
    while waiting:
        left = []
        for stage, k in waiting:
            role, micro_batch = found[stage][k]
            before = [(stage, k - 1)] * (k > 0) + [at[each, micro_batch] for each in senders.get(role, ())]
            if all(each in known for each in before):
                known[stage, k] = {}
                for clock in (known[each] for each in before):
                    known[stage, k] |= {other: n for other, n in clock.items() if n > known[stage, k].get(other, -1)}
                known[stage, k][stage] = k
            else:
                left.append((stage, k))
        assert len(left) < len(waiting), f"{found} wait for each other"
        waiting = left
    return known


def ended_role(role: str) -> str:
    """The role of the program that waits for what another one has sent."""
    return role + _SENT


def started_role(role: str) -> str:
    """The role of the program that starts to receive what another one reads."""
    return f"{role}.receives"


def role_of(name: str, stage: int) -> str:
    """``forward.0``."""
    return f"{name}.{stage}"
