"""A master copy beside what ranks hold of a parameter: what was written to that is taken over, element by element."""

from __future__ import annotations

import torch
from torch import Tensor

from passes.runtime.master_copies import current, current_, sent

BF16 = torch.bfloat16


def master_and_held() -> tuple[Tensor, Tensor, Tensor]:
    """Of a matrix a part of its columns, which lies in strides; and what is current once two elements were written."""
    draw = torch.Generator().manual_seed(0)
    master, whole = torch.randn(3, 2, generator=draw), torch.zeros(3, 4)
    master[2] = torch.tensor([float("nan"), float("inf")])
    held = whole[:, 2:]
    held.copy_(sent(master, BF16))
    expected = master.clone()
    held[0, 1] = expected[0, 1] = 0.1
    held[1, 0] = expected[1, 0] = float("nan")
    return master, held, expected


def test_what_was_sent_is_exact_and_what_was_written_is_taken() -> None:
    master, held, expected = master_and_held()
    before = master.clone()
    found = current(master, held, BF16)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert found.is_contiguous() and torch.equal(master.nan_to_num(), before.nan_to_num())


def test_the_master_copy_is_written_in_place() -> None:
    master, held, expected = master_and_held()
    assert current_(master, held, BF16) is master
    torch.testing.assert_close(master, expected, rtol=0, atol=0, equal_nan=True)
