"""``tensor.data = other`` while a step is traced.

It swaps a tensor's memory below everything that a tracer sees: the update would be lost without a word. While this mode
is on it copies instead, which is the same to all who read the tensor afterwards, unless the two go on to share what is
written into either: that is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .._torch import TorchFunctionMode, storage_number, version_of
from .unsupported import Refused

_SET = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class SetDataCopies(TorchFunctionMode):
    """Each assignment to ``.data`` is a copy into it. ``state``: what may share no memory with other tensors.

    Raises ``Refused`` for data of another shape or dtype, and for memory that would be shared.
    """

    def __init__(self, state: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._state = {storage_number(tensor) for tensor in state}
        self._given: list[tuple[torch.Tensor, int]] = []  # (what was assigned, its version then)
        self._holders: dict[int, torch.Tensor] = {}  # by what was assigned, the tensor whose data it became

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func != _SET:
            return func(*args, **(kwargs or {}))
        tensor, new = args
        self._check(tensor, new)
        tensor.data.copy_(new)
        self._given.append((new, version_of(new)))
        self._holders[id(new)] = tensor
        return None

    def now(self, value: Any) -> Any:
        """``value``, or what the tensor whose data it became has been updated to: in eager both share memory."""
        holder = self._holders.get(id(value))
        return value if holder is None else holder.detach()

    def _check(self, tensor: torch.Tensor, new: torch.Tensor) -> None:
        if (tensor.shape, tensor.dtype) != (new.shape, new.dtype):
            raise Refused(
                f"the step assigns .data of {new.dtype}{list(new.shape)} to a tensor of {tensor.dtype}"
                f"{list(tensor.shape)}: data of the same shape and dtype is expected, since state keeps both. It is set"
            )
        if storage_number(new) in self._state - {storage_number(tensor)}:
            raise Refused(
                "it assigns the memory of a parameter, a buffer or an argument to another tensor's .data, and both "
                "would share it from then on: copy instead, with tensor.data.copy_(value). It is set"
            )

    def check_end(self) -> None:
        """Raise ``Refused`` if something was written into after it had become a tensor's data."""
        if any(version_of(new) != version for new, version in self._given):
            raise Refused(
                "it writes into a tensor that it has made another's .data before, and so into both: copy instead, with "
                "tensor.data.copy_(value). This happens"
            )
