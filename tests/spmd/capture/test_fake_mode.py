"""Fakes whose shapes come from an op's own kernel: what torch's decomposition of the op gives, on every sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from spmd._torch import FakeTensorMode
from spmd.capture.fake_mode import BY_META_KERNEL, ShapesOnly
from tests.spmd.rules.engine import Sample
from tests.spmd.rules.samples import f, samples, u

aten = torch.ops.aten
Facts = list[Any]


def losses() -> list[Sample]:
    """Losses and their gradients, for each reduction; no rule has them, since they are decomposed at capture."""
    found, pair = list[Sample](), (u(4, 6), u(4, 6))
    for reduction in (0, 1, 2):
        grad = f(4, 6) if reduction == 0 else f()
        found += [
            Sample(aten.mse_loss.default, (*pair, reduction)),
            Sample(aten.mse_loss_backward.default, (grad, *pair, reduction)),
            Sample(aten.smooth_l1_loss.default, (*pair, reduction, 0.5)),
            Sample(aten.smooth_l1_loss_backward.default, (grad, *pair, reduction, 0.5)),
            Sample(aten.binary_cross_entropy.default, (*pair, u(6), reduction)),
            Sample(aten.binary_cross_entropy_backward.default, (grad, *pair, None, reduction)),
        ]
    return found


def transposed(tensor: Tensor) -> Tensor:
    """The same values in another layout."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1) if tensor.ndim else tensor


def halved(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def facts(sample: Sample, mode: FakeTensorMode, change: Callable[[Tensor], Tensor]) -> Facts:
    """Shape, strides, dtype and device of each result in ``mode``, with nothing that was computed before."""
    mode.cache_enabled = False

    def fake(value: Any) -> Any:
        return mode.from_tensor(change(value)) if isinstance(value, Tensor) else value

    args, kwargs = tree_map(fake, (sample.args, sample.kwargs))
    with mode:
        results = tree_leaves(sample.op(*args, **kwargs))
    return [(x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else x for x in results]


@pytest.mark.parametrize("change", [lambda x: x, transposed, halved], ids=["as it is", "transposed", "half"])
def test_the_kernels_give_what_the_decompositions_give(change: Callable[[Tensor], Tensor]) -> None:
    tried = [sample for sample in (*samples(), *losses()) if sample.op in BY_META_KERNEL]
    assert {sample.op for sample in tried} == BY_META_KERNEL
    for sample in tried:
        assert facts(sample, ShapesOnly(), change) == facts(sample, FakeTensorMode(), change), sample


def test_every_op_has_a_kernel_and_torch_prefers_its_decomposition() -> None:
    mode = FakeTensorMode()
    assert len(BY_META_KERNEL) > 20
    assert not any(mode.cpp_meta_supports_symint(op) for op in BY_META_KERNEL)
