"""Assignment to ``.data`` while a step is traced: ``tensor.data = other`` becomes a copy.

The assignment swaps a tensor's memory below everything that a tracer sees, so the update would be lost silently. A copy
gives later reads of the tensor the same values, unless one of the two is written afterwards and both share the write:
that is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .._torch import TorchFunctionMode, storage_id, version_of
from .unsupported import Refused

_SET = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class SetDataCopies(TorchFunctionMode):
    """Copies into a tensor instead of assigning its ``.data``. No other tensor may share the memory of ``state``.

    Raises ``Refused`` for data of another shape or dtype, and for memory that would be shared.
    """

    def __init__(self, state: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._state = {storage_id(tensor) for tensor in state}
        self._assigned: list[tuple[torch.Tensor, int]] = []  # (assigned tensor, its version then)
        self._targets: dict[int, torch.Tensor] = {}  # by id of an assigned tensor, the tensor whose data it became

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func != _SET:
            return func(*args, **(kwargs or {}))
        tensor, new = args
        self._check(tensor, new)
        tensor.data.copy_(new)
        self._assigned.append((new, version_of(new)))
        self._targets[id(new)] = tensor
        return None

    def current(self, value: Any) -> Any:
        """``value``; if it became the data of a tensor, that tensor's value now, as in eager both share memory."""
        target = self._targets.get(id(value))
        return value if target is None else target.detach()

    def _check(self, tensor: torch.Tensor, new: torch.Tensor) -> None:
        if (tensor.shape, tensor.dtype) != (new.shape, new.dtype):
            raise Refused(
                f"it assigns .data of {new.dtype}{list(new.shape)} to a tensor of {tensor.dtype}{list(tensor.shape)}. "
                "Assign data of the same shape and dtype, since state keeps both."
            )
        if storage_id(new) in self._state - {storage_id(tensor)}:
            raise Refused(
                "it assigns the memory of a parameter, a buffer or an argument to another tensor's .data, and both "
                "would share it from then on. Copy instead, with tensor.data.copy_(value)."
            )

    def check_end(self) -> None:
        """Raise ``Refused`` if a tensor was written into after it had become another tensor's data."""
        if any(version_of(new) != version for new, version in self._assigned):
            raise Refused(
                "it writes into a tensor after assigning it to another tensor's .data, and so into both. Copy instead, "
                "with tensor.data.copy_(value)."
            )
