"""``ReplacementReads``: what overrides read while they replace modules, for guards to compare at later calls."""

from __future__ import annotations

from .python_reads import Reads


class ReplacementReads(Reads):
    """Puts nothing in the place of what is read, and undoes nothing: an override may keep notes, and use files.

    What has another value at the end is such a note, and not what the replacements depend on.
    """

    replaces = False  # overrides run on live state

    def _undo(self) -> None:
        """Forget what has changed."""
        for address, site in [*self.sites.items()]:
            if address not in self.first or site.get() is not self.first[address]:
                del self.sites[address]
        self.containers = {key: each for key, each in self.containers.items() if not each.changed()}

    def add_to(self, reads: Reads) -> None:
        """Let these be compared together with ``reads``, of the step. No number among them can become an input."""
        reads.fixed |= self.sites.keys()
        reads.notes |= {*(self.sites.keys() - reads.sites.keys()), *(self.containers.keys() - reads.containers.keys())}
        reads.first = self.first | reads.first
        reads.sites = self.sites | reads.sites
        reads.containers = self.containers | reads.containers
