"""Batch norms in a form that a trace can hold.

Two of torch's modules compute, for reasons of their own, what one graph over the whole batch says more simply:

- with ``momentum=None`` a batch norm turns its count of batches into a Python number; here it stays a tensor;
- ``SyncBatchNorm`` gathers statistics over ranks itself (and refuses CPU tensors); a compiled step sees the whole
  batch, so it is a batch norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._torch import BatchNorm, check_batch_norm_input


@contextmanager
def traceable(module: nn.Module) -> Iterator[None]:
    """While the context is on, ``module`` runs in its traceable form, if it is a norm that needs one."""
    forward = _form_of(module)
    if forward is None or "forward" in vars(module):  # a forward of the user's own is not ours to replace
        yield
        return
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]


def _form_of(module: nn.Module) -> Any:
    if not isinstance(module, BatchNorm) or type(module).__module__.split(".")[0] != "torch":
        return None
    if module.momentum is None and module.training and module.running_mean is not None:
        return partial(_cumulative, module)
    return partial(BatchNorm.forward, module) if isinstance(module, nn.SyncBatchNorm) else None


def _cumulative(module: Any, x: Tensor) -> Tensor:
    """A batch norm whose running statistics are the mean over all batches so far."""
    check_batch_norm_input(module, x)
    module.num_batches_tracked.add_(1)
    mean, variance = torch.zeros_like(module.running_mean), torch.zeros_like(module.running_var)
    # With a momentum of 1 the "running" statistics are those of this batch.
    normed = F.batch_norm(x, mean, variance, module.weight, module.bias, True, 1.0, module.eps)
    share = 1 / module.num_batches_tracked.to(mean.dtype)
    module.running_mean.lerp_(mean, share)
    module.running_var.lerp_(variance, share)
    return normed
