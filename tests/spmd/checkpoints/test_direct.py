"""Files that are written past the page cache are those that safetensors reads, on file systems of all kinds."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from spmd.checkpoints import direct
from spmd.checkpoints.trees import IN_FILES

from .runs import unequal

METADATA = {"one": '{"a": 1}', "ä": "\n"}


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_BUFFER", 8192)


def every_kind() -> dict[str, torch.Tensor]:
    """Of each dtype that files hold, in lengths below, at and above those of a block and of the buffer."""
    lengths = (0, 1, 511, 1024, 2048, 2049, 4095, 8192, 20_001)
    random = torch.Generator().manual_seed(0)
    dtypes = sorted(IN_FILES, key=str)
    bits = [torch.randint(0, 2, (length * 8,), generator=random, dtype=torch.uint8) for length in lengths]
    found = {
        f"{dtype} {length}": each[: length * dtype.itemsize].view(dtype)
        for dtype in dtypes
        for each, length in zip(bits, lengths, strict=True)
    }
    return found | {"of two dims": torch.arange(6).reshape(2, 3), "conjugated": torch.full((3,), 2 + 1j).conj()}


def check(path: Path) -> None:
    tensors = every_kind()
    direct.save_file(tensors, path, METADATA)
    got = load_file(path)
    bits = {name: tensor.resolve_conj().view(torch.uint8) for name, tensor in tensors.items()}
    assert unequal(bits, {name: tensor.view(torch.uint8) for name, tensor in got.items()}) == []
    assert {name: (each.dtype, each.shape) for name, each in got.items()} == {
        name: (each.dtype, each.shape) for name, each in tensors.items()
    }
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == METADATA


def test_safetensors_reads_every_dtype_and_length(tmp_path: Path) -> None:
    check(tmp_path / "new")
    (tmp_path / "old").write_bytes(b"x" * 10_000_000)
    check(tmp_path / "old")


@pytest.mark.parametrize("call", ["open", "write"])
def test_a_file_system_may_have_no_direct_writes(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []
    original: Any = getattr(os, call)

    def refuse_once(*args: Any) -> Any:
        if not refused:
            refused.append(call)
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(*args)

    monkeypatch.setattr(os, call, refuse_once)
    check(tmp_path / "file")
    assert refused == [call]


def test_what_ends_halfway_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first blocks were written."""
    write, written = os.write, list[int]()

    def full(descriptor: int, block: memoryview) -> int:
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(write(descriptor, block[:4096]))
        return written[0]

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left on device"):
        direct.save_file({"tensor": torch.ones(4096)}, tmp_path / "file", {})
    assert written == [4096]
