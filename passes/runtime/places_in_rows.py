"""The places that true elements take in the source of their own row, where each row takes all that its source has.

``masked_scatter`` takes elements in the order of the whole mask. A part of the batch can take those of its own rows
alone only if all parts before it took as many as they have. That follows from values: the op looks, and raises.
"""

from __future__ import annotations

import torch
from torch import Tensor

NAMESPACE = "spmd_rows"
_library = torch.library.Library(NAMESPACE, "DEF")
_library.define("places(Tensor mask, int each, str op) -> Tensor")


def _places(mask: Tensor, each: int, op: str) -> Tensor:
    """For each true element of a row the number of true ones before it, for others any number below ``each``.

    ``mask``: (rows, length), boolean; the result is of that shape, int64. Raises ``ValueError`` where a row has not
    ``each`` true elements; on devices other than the CPU, where that would wait for the device, an assertion fails.
    """
    counts = mask.sum(1)
    if mask.device.type != "cpu":
        torch.ops.aten._assert_async.msg((counts == each).all(), _expected(op, each))
    elif wrong := [count for count in counts.tolist() if count != each]:
        raise ValueError(f"{_expected(op, each)}, but one takes {wrong[0]}. {_ADVICE}")
    return (mask.long().cumsum(1) - 1).clamp_(0, max(each - 1, 0))


def _expected(op: str, each: int) -> str:
    return f"{op}: expected the rows of each part of the batch to take all {each} rows of their own source"


_ADVICE = (
    "Give each row of the batch as many of the source as its mask counts (one picture each, say), or keep the batch "
    "whole (micro_batches=1)"
)


def _like(mask: Tensor, each: int, op: str) -> Tensor:
    return torch.empty_like(mask, dtype=torch.int64, memory_format=torch.contiguous_format)


_library.impl("places", _places, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::places", _like, lib=_library)
places = getattr(torch.ops, NAMESPACE).places.default
