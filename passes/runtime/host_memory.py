"""Copies between host memory and the device that computes, as ops: ``to_device``, ``to_host``, a wait for the latter.

Every copy gives a tensor of its own, also where host and device are one. On CUDA a copy from or to pinned memory is put
into the current stream, and the host goes on: ``wait_copy`` stands before what the host computes with the result of a
``to_host``, and ``begin_writes`` is called before the host overwrites what a ``to_device`` may still read.

A program that runs on streams of its own (``schedule/streams.py``) says by events when a copy is over, and calls
``copy_in_stream`` in the place of both.
"""

from __future__ import annotations

import torch
from torch import Tensor

NAMESPACE = "spmd_memory"
_library = torch.library.Library(NAMESPACE, "DEF")
_library.define("to_device(Tensor x, Device device) -> Tensor")
_library.define("to_device.out(Tensor x, Device device, *, Tensor(a!) out) -> Tensor(a!)")
_library.define("to_host(Tensor x, bool pin_memory) -> Tensor")
_library.define("wait_copy(Tensor x) -> Tensor")

_arriving: dict[int, torch.cuda.Event] = {}  # copies to pinned memory that nobody has waited for, by its address
_reading: list[torch.cuda.Event] = []  # the last copy from pinned memory, which ends after all others
_writing = False  # whether the host may be writing to what is copied


def _copy_to_device(x: Tensor, device: torch.device, *, out: Tensor) -> Tensor:
    """Copy ``x`` into ``out``, which is on ``device``."""
    ahead = out.is_cuda and x.is_pinned() and not _writing
    out.copy_(x, non_blocking=ahead)
    if ahead:
        _reading[:] = [torch.cuda.current_stream(out.device).record_event()]
    return out


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy of ``x`` on ``device``."""
    return _copy_to_device(x, device, out=like(x, device))


def _to_host(x: Tensor, pin_memory: bool) -> Tensor:
    """A copy of ``x`` in host memory, there once it was waited for."""
    pinned = pin_memory and x.is_cuda
    host = like(x, torch.device("cpu"), pinned)
    host.copy_(x, non_blocking=pinned)
    if pinned:
        _arriving[host.data_ptr()] = torch.cuda.current_stream(x.device).record_event()
    return host


def _wait_copy(x: Tensor) -> Tensor:
    """``x`` itself, once it has arrived."""
    event = _arriving.pop(x.data_ptr(), None)
    if event is not None:
        event.synchronize()
    return x


def copy_in_stream(x: Tensor, *, out: Tensor) -> Tensor:
    """Copy ``x`` into ``out`` between host and device, in the current stream, without waiting for it."""
    return out.copy_(x, non_blocking=True)


def begin_reads() -> None:
    """Let copies read host memory while the host goes on: nothing is written to it before ``begin_writes``."""
    global _writing
    _writing = False


def begin_writes() -> None:
    """Wait until no copy reads host memory any more; later ones end before the host goes on."""
    global _writing
    _writing = True
    while _reading:
        _reading.pop().synchronize()


def like(x: Tensor, device: torch.device, pin_memory: bool = False) -> Tensor:
    """An empty tensor that lies as ``x`` does, unless elements of ``x`` share memory."""
    overlaps = any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))
    stride = torch.empty(x.shape, device="meta").stride() if overlaps else x.stride()
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=device, pin_memory=pin_memory)


for name, kernel, fake in (
    ("to_device", _to_device, like),
    ("to_device.out", _copy_to_device, lambda x, device, *, out: out),
    ("to_host", _to_host, lambda x, pin_memory: like(x, torch.device("cpu"))),
    ("wait_copy", _wait_copy, lambda x: x),
):
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)

_ops = getattr(torch.ops, NAMESPACE)
to_device, to_device_out = _ops.to_device.default, _ops.to_device.out
to_host, wait_copy = _ops.to_host.default, _ops.wait_copy.default
