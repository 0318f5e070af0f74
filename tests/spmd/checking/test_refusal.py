"""Errors of compiling in parts: where they stand, what is refused, why, and what to do instead."""

from __future__ import annotations

import pytest

from passes import CaptureError, PlacementError
from spmd.call import refusals
from spmd.checking.noted import Noted
from spmd.checking.refusal import Refusal

DEFINED = 15


def step() -> None:
    pass


@pytest.mark.parametrize(
    ("message", "line", "op", "reason", "alternative"),
    [
        (
            "step cannot be traced into one graph: it calls a scheduler (StepLR), which is done once. Call it outside."
            "\n    test_refusal.py:40 in model.head: scheduler.step()",
            40,
            "",
            "calls a scheduler (StepLR), which is done once",
            "Call it outside",
        ),
        (
            "the step keeps a tensor in self.h at test_refusal.py:41: self.h = h. Keep tensor.detach() there",
            41,
            "",
            "the step keeps a tensor in self.h",
            "Keep tensor.detach() there",
        ),
        (
            "the step asks time.time(), and gets the time of the trace: measure outside of it"
            "\n    test_refusal.py:42: time.time()\n    called other.py:3: clock()",
            42,
            "",
            "the step asks time.time(), and gets the time of the trace",
            "Measure outside of it",
        ),
        ("it communicates itself (c10d.allreduce_.default)", DEFINED, "c10d.allreduce_.default", None, ""),
        ("x is on the meta device", DEFINED, "", "x is on the meta device", ""),
    ],
)
def test_a_message_has_parts(message: str, line: int, op: str, reason: str | None, alternative: str) -> None:
    found = Refusal.of(CaptureError(message), step)
    assert (found.line, found.op, found.alternative) == (line, op, alternative)
    assert found.file.endswith("test_refusal.py") and found.at == f"{found.file}:{line}"
    assert found.reason == (message if reason is None else reason) and found.message == message


def test_a_refusal_is_raised_unless_a_check_has_noted_it() -> None:
    def refuse() -> None:
        refusals.refuse(PlacementError, "no such axis")

    noted = Noted()
    with refusals.listening(noted):
        with pytest.raises(PlacementError, match="no such axis") as raised:
            refuse()
        site = noted.site_behind(CaptureError("explained"))
        assert site is None
        site = noted.site_behind(raised.value)
        assert site is not None
        noted.add(site, Refusal.of(raised.value, step))
        refuse()
    with pytest.raises(PlacementError):
        refuse()
