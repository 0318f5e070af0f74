"""Stand-ins of values for the length of a trace: fakes, recorders, and objects that refuse."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from ...call.state import is_replaced
from .clocks import is_clock, refusing
from .read_sites import ReadSite, Reference
from .recorded_reads import RecordedReads


class StandIns:
    """Puts something else where a value is found; the end of ``stack`` puts the value back."""

    def __init__(self, reads: RecordedReads, stack: ExitStack) -> None:
        self._reads, self._stack = reads, stack

    def put(self, reference: Reference, value: Any) -> None:
        """Put a fake in the place of state that something else than its module or optimizer holds.

        And what records in the place of a container that has a journal, and what refuses in that of a clock, or of an
        iterator, file or queue that the step has not made.
        """
        if not self._reads.replaces:
            return
        if is_clock(value):
            self._replace(reference, value, refusing(value))
        refusal = self._reads.refusals.stand_in(value, reference.name)
        if refusal is not None and not self._is_made(reference, value):
            if isinstance(reference.holder, (tuple, set, frozenset)):
                self._reads.refusals.in_vain.append(reference.name)
            else:
                self._replace(reference, value, refusal)
        journal = self._reads.journals.by_id.get(id(value))
        if journal is not None:
            self._replace(reference, value, journal.stand_in)
            journal.references.append(reference)
        if not isinstance(value, torch.Tensor):
            return
        fake = self._reads.stand_ins.get(id(value))
        if is_replaced(value) or (fake is not None and not isinstance(reference.holder, (ReadSite, list, dict))):
            self._reads.refused.append(reference.name)
        elif fake is not None:
            self._replace(reference, value, fake)
            self._reads.references.append(reference)

    def _is_made(self, reference: Reference, value: Any) -> bool:
        """Whether the step itself has made a value, or put it where it is found."""
        site, first = reference.holder, self._reads.first
        return value in self._reads.new or (isinstance(site, ReadSite) and first.get(site.address) is not value)

    def _replace(self, reference: Reference, value: Any, stand_in: Any) -> None:
        reference.put(stand_in)
        self._stack.callback(self._restore, reference, value, stand_in)

    @staticmethod
    def _restore(reference: Reference, value: Any, stand_in: Any) -> None:
        if reference.get() is stand_in:
            reference.put(value)
