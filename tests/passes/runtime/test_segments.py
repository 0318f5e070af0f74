"""Shared-memory segments: which tensors are found in them, when they are closed, and errors without memory."""

from __future__ import annotations

import errno
import gc
import os
from mmap import PROT_READ, mmap

import pytest
import torch

from passes.runtime import segments
from passes.runtime.segments import allocate_segment, copy_to_segment, last_closed, locate, open_segments

from .local_group import open_files


def test_a_view_of_a_segment_is_found_at_its_offset() -> None:
    memory = allocate_segment(1 << 12)
    found = locate(memory[64:72].view(torch.int64))
    assert found is not None and found.segment is not None
    assert (found.offset, found.bytes.numel(), found.segment.size) == (64, 8, 1 << 12)


def test_a_tensor_elsewhere_is_not_found_but_its_copy_is() -> None:
    x = torch.tensor([1.0, 2.0])
    assert locate(x) is None
    assert copy_to_segment(x).bytes.view(torch.float32).tolist() == [1.0, 2.0]


def test_an_empty_tensor_needs_no_segment() -> None:
    found = locate(torch.empty(0))
    assert found is not None and found.segment is None and found.bytes.numel() == 0


def test_a_segment_is_closed_with_its_last_tensor() -> None:
    before, files, closed = open_segments(), open_files(), last_closed()
    memory = allocate_segment(8)
    view = memory[:4]
    del memory
    gc.collect()
    assert len(open_segments() - before) == 1 and last_closed() == closed
    del view
    gc.collect()
    assert not open_segments() - before and open_files() == files and last_closed() != closed


def test_an_allocation_that_fails_raises_and_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    before = open_files()
    monkeypatch.setattr(segments, "mmap", refuse)
    with pytest.raises(OSError, match=r"could not allocate 1,000 bytes .*: Too many open files"):
        allocate_segment(1000)
    assert open_files() == before


def test_a_peer_can_read_a_segment_but_not_write_or_shrink_it() -> None:
    found = locate(allocate_segment(1 << 12))
    assert found is not None and found.segment is not None
    with pytest.raises(PermissionError):
        mmap(found.segment.file, 1 << 12)
    with pytest.raises(PermissionError):
        os.ftruncate(found.segment.file, 0)
    assert mmap(found.segment.file, 1 << 12, prot=PROT_READ)[:2] == b"\0\0"
