"""Batch norms in a form that can be traced.

Two of torch's batch norms do more than one graph over the whole batch needs:

- with ``momentum=None`` a batch norm converts its count of batches to a Python number; here it stays a tensor;
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
def traceable_norm(module: nn.Module) -> Iterator[None]:
    """Run ``module`` in its traceable form for the length of the context, if it is a batch norm that needs one."""
    forward = _traceable_forward(module)
    if forward is None or "forward" in vars(module):  # the user's own forward stays
        yield
        return
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]


def _traceable_forward(module: nn.Module) -> Any:
    if not isinstance(module, BatchNorm) or type(module).__module__.split(".")[0] != "torch":
        return None
    if module.momentum is None and module.running_mean is not None:
        return partial(_cumulative, module)
    return partial(BatchNorm.forward, module) if isinstance(module, nn.SyncBatchNorm) else None


def _cumulative(module: Any, x: Tensor) -> Tensor:
    """A batch norm whose running statistics are the mean over all batches so far."""
    # Asked at each call: the step itself may put it into another mode, or stop its statistics.
    if not (module.training and module.track_running_stats):
        return BatchNorm.forward(module, x)
    check_batch_norm_input(module, x)
    assert module.momentum is None  # it is read here, where reads are guarded
    module.num_batches_tracked.add_(1)
    mean, variance = torch.zeros_like(module.running_mean), torch.zeros_like(module.running_var)
    # With a momentum of 1 the "running" statistics are those of this batch.
    normed = F.batch_norm(x, mean, variance, module.weight, module.bias, True, 1.0, module.eps)
    share = 1 / module.num_batches_tracked.to(mean.dtype)
    module.running_mean.lerp_(mean, share)
    module.running_var.lerp_(variance, share)
    return normed
