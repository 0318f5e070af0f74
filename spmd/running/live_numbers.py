"""Live numbers: those of arguments and Python state that have changed, and that later programs read at each call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

from ..call.call import Call
from ..capture import Captured
from ..guards.leaves import can_be_live, is_text
from ..interpreter.source_lines import warn_user
from ..python_state.effects.carried import Carried
from ..python_state.reads import ReadSite
from .compiled import Compiled


class LiveNumbers:
    """The names of numbers that the next capture of a step takes as inputs. A number stays live in later programs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._live: set[str] = set()  # read at each call, if the step can be traced so
        self._changed: set[str] = set()  # those among them, and texts, that have changed
        self._fixed: set[str] = set()  # those that the step cannot be traced with
        self._depended: dict[str, Any] = {}  # on which value of a number a program depends
        self._warned: set[str] = set()

    def carried(self, captures: Iterable[Captured]) -> Carried:
        """The Python state that captures write: what may be inputs of the next."""
        found = reduce(or_, [captured.all_carried() for captured in captures], Carried())
        numbers = tuple(number for number in found.numbers if number.name not in self._live)
        return replace(found, numbers=numbers, leaves=(), unread=())

    def of_first(self, call: Call) -> Carried:
        """Those that the first capture takes: a float may be on a schedule, most ints are sizes."""
        floats = (leaf for leaf in call.given.leaves if isinstance(leaf.value, float))
        self._live = {leaf.name for leaf in floats if can_be_live(leaf.value, leaf.value)}
        return Carried(leaves=tuple(sorted(self._live)))

    def changes(self, call: Call, programs: Sequence[Compiled]) -> tuple[dict[str, ReadSite], list[str]]:
        """The numbers of Python state that programs read, by name, and the names of all that differ in a call."""
        leaves: dict[str, bool] = {}
        sites: dict[str, tuple[ReadSite, bool]] = {}
        for each in programs:
            guarded = each.guards.leaves
            found = guarded.changed_numbers(call.given) | guarded.changed_texts(call.given)
            for name, changed in found.items():
                leaves[name] = leaves.get(name, False) or changed
            known = [(site, False) for site in each.captured.carried.numbers if site.name in self._live]
            for site, changed in [*known, *each.guards.reads.changed_numbers()]:
                sites[site.name] = site, changed or (site.name in sites and sites[site.name][1])
        changed_here = [name for name, changed in leaves.items() if changed]
        changed_here += [name for name, (_, changed) in sites.items() if changed]
        return {name: site for name, (site, _) in sites.items()}, changed_here

    def of_next(self, call: Call, sites: dict[str, ReadSite], changed: Iterable[str]) -> Carried:
        """Those that a capture of ``call`` takes. ``changed``: the names of what differs on any rank."""
        self._changed.update(changed)
        self._live |= self._changed
        self._live -= self._fixed
        names = {leaf.name for leaf in call.given.leaves if can_be_live(leaf.value, leaf.value)}
        texts = {leaf.name for leaf in call.given.leaves if is_text(leaf.value)}
        return Carried(
            numbers=tuple(site for name, site in sites.items() if name in self._live),
            leaves=tuple(sorted(self._live & names)),
            unread=tuple(sorted(self._live & texts)),
        )

    def note_fixed(self, live: Carried, captured: Captured) -> None:
        """Warn of numbers that should be live, or are state, but whose value the program depends on.

        Of state there is a warning once a second program depends on another value. Where the step cannot be traced
        with them at all, they stay constants from now on.
        """
        names = {*live.leaves, *(site.name for site in live.numbers)}
        failed = set() if captured.live else names
        self._live -= failed
        failed, names = failed & self._changed, names & self._changed
        self._fixed.update(set(live.unread) - set(captured.carried.unread))
        again = {name for name, value in captured.fixed.items() if self._depended.get(name, value) != value}
        self._depended |= captured.fixed
        found = (failed | again | (names & captured.fixed.keys())) - self._fixed
        self._fixed |= failed
        for name in sorted(found - self._warned):
            warn_user(
                f"{self._name} compiles a program for each value of {name}, which has changed: the step needs its "
                "value, for a size, text (print the number itself), or since it cannot be traced "
                "with a number that is not known. If it changes often, pass a 0-dim tensor, or keep it out of the step"
            )
        self._warned |= found
