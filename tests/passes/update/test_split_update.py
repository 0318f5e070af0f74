"""SplitUpdate."""

from __future__ import annotations

from typing import Any

import pytest

from passes import FuseForeach, FuseUpdate, SplitUpdate, UpdateInPlace, run

from ..programs import assert_same_bits, before_and_after, targets
from .test_fuse_foreach import adamax_program
from .test_fuse_update import adamw_program, assert_close, both


def test_split_update(golden: Any) -> None:
    program = run(adamw_program(both), [FuseUpdate()])
    after, text = before_and_after(program, SplitUpdate())
    golden(text)
    assert targets(after).count("_fused_adamw.default") == 2


def test_the_parts_write_in_place() -> None:
    after = assert_close(adamw_program(both), FuseUpdate(), SplitUpdate(), UpdateInPlace())
    assert targets(after).count("_fused_adamw_.default") == targets(after).count("_foreach_add_.Scalar") == 2
    assert not any(each.startswith(("copy_", "clone")) for each in targets(after))


@pytest.mark.parametrize("entries", [1, 2])
def test_lists_that_lead_to_lists(entries: int) -> None:
    program = adamax_program()
    after = run(program, [FuseForeach(), SplitUpdate(entries)])
    assert_same_bits(program, after)
    assert targets(after).count("_foreach_maximum.List") == 2 // entries


def test_entries_are_at_least_one() -> None:
    with pytest.raises(ValueError, match="expected at least one entry for each op, got 0"):
        SplitUpdate(0)


def test_nothing_to_split() -> None:
    program = adamw_program(both)
    assert targets(run(program, [SplitUpdate()])) == targets(program)
