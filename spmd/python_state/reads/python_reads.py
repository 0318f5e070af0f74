"""``Reads``: the plain Python state that a step reads while it is traced, for guards to compare at later calls.

The trace takes every Python value for a constant: ``self.tau``, ``args.alpha``, a global, a closure's variable, a list
of hooks. While the user's function runs, three things are observed: attribute reads of modules, optimizers and the
objects they lead to (``attribute_reads.py``), the globals of each function that starts (``global_reads.py``), and the
cells of closures. Of classes, modules and functions those entries count whose names occur in code that ran
(``namespaces.py``). Each read is recorded as a ``ReadSite``; its value when the program is ready is what later calls
must find there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ..._torch import tree_flatten
from .changes import Change
from .read_sites import MISSING, ReadSite
from .recorded_reads import RecordedReads
from .watching import Watching


@dataclass(eq=False)
class Reads(RecordedReads):
    """Records what a step reads, and undoes what it changes."""

    def __post_init__(self) -> None:
        self._watching = Watching(self)

    @contextmanager
    def watch(self, *roots: Any, held: Iterable[tuple[str, Any]] = ()) -> Iterator[None]:
        """Record reads for the length of the context; ``roots`` are the function and its arguments.

        ``held``: what the step can read though nothing observes what holds it, by name. What the step changed is undone
        at the end, also if it raised. Raises ``CaptureError`` if the step took values that each call would get again,
        or wrote where no call would write again.
        """
        with self._watching.watch(roots, held):
            try:
                yield
            except BaseException:
                self._undo()
                raise
        self._undo()
        self.refusals.check()
        self.compared.check(self.code)

    def unwatched(self) -> AbstractContextManager[None]:
        """Do not look for functions that start: none of the user's does in here."""
        return self._watching.globals.paused()

    def _undo(self) -> None:
        """Note what the step changed besides modules and optimizers, and undo it."""
        self.compared.restore()
        changes: dict[tuple[int, str], Change] = {}
        known = [*self.sites.items()]  # a copy: comparing may itself read what is watched
        for address, site in known:
            if address not in self.first:  # an interrupt came while it was recorded
                continue
            now, before = site.get(), self.first[address]
            if not site.owned and now is not before:
                changes[address] = self._change(site, before, now)
        for fields in [*self.fields.values()]:
            for key in fields.changed():
                site = ReadSite("item", vars(fields.holder), key, f"{fields.name}.{key}")
                before = fields.before.get(key, MISSING)
                changes.setdefault(site.address, self._change(site, before, site.get()))
        changed = [each for each in self.containers.values() if not each.owned and each.changed()]
        holders = {id(site.get()): site.key for site in [*self.sites.values()]}
        self.changed_containers = [(each, holders.get(id(each.value), "")) for each in changed]
        for change in changes.values():
            change.site.put(change.before)
        for container in changed:
            container.restore()
        # What the step itself put in a container is none of what that held.
        self.changes = [replace(each, held=tree_flatten(each.before)[0]) for each in changes.values()]

    def _change(self, site: ReadSite, before: Any, now: Any) -> Change:
        return Change(site, before, now, self.was_read(site, before), [])
