"""Copies between host and device: on the CPU, and on fake tensors of a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from passes.runtime.host_memory import begin_reads, begin_writes, to_device, to_device_out, to_host, wait_copy

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("copy", [lambda x: to_device(x, CPU), lambda x: wait_copy(to_host(x, True))])
@pytest.mark.parametrize("x", [
    torch.randn(2, 3), torch.randn(2, 3).t(), torch.tensor(2.5), torch.ones(()).expand(3, 2),
], ids=["plain", "transposed", "no dims", "expanded"])  # fmt: skip
def test_a_copy_has_memory_of_its_own_and_the_same_layout(copy: Callable[[Tensor], Tensor], x: Tensor) -> None:
    made = copy(x)
    assert torch.equal(made, x) and made.data_ptr() != x.data_ptr()
    assert made.stride() == (x.stride() if 0 not in x.stride() else (2, 1))
    before = x.clone()
    made.zero_()
    assert torch.equal(x, before)


def test_copies_go_on_while_state_is_written() -> None:
    x = torch.randn(3)
    begin_writes()
    try:
        assert torch.equal(to_device(x, CPU), x)
    finally:
        begin_reads()
    assert torch.equal(to_device(x, CPU), x)


def test_the_out_variant_writes_where_it_is_asked_to() -> None:
    x, out = torch.randn(4), torch.zeros(4)
    assert to_device_out(x, CPU, out=out) is out and torch.equal(out, x)


def test_ops_are_declared_as_they_are() -> None:
    x = torch.randn(2, 3)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(to_device, (x, CPU), test_utils=checks)
    torch.library.opcheck(to_host, (x, False), test_utils=checks)
    torch.library.opcheck(to_device_out, (x, CPU), {"out": torch.empty(2, 3)}, test_utils=checks[1:])


def test_on_fake_tensors_values_change_sides() -> None:
    with FakeTensorMode():
        x = torch.empty(2, 3)
        there = to_device(x, CUDA)
        back = wait_copy(to_host(there, True))
        assert (there.device, back.device) == (CUDA, CPU) and back.stride() == x.stride()
