"""Values that must be equal on all ranks: learning rates, 0-dim tensors, arguments that are replicated.

Ranks compare them as text when they compile, and as a number at each call. Of larger tensors that number is a digest,
computed anew only where another tensor came or this one was written to (``Digests``).
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._torch import version_of

_SHOWN = 8  # elements in a message


def digest(values: Iterable[Any]) -> int:
    """A number for the Python numbers, and 0-dim tensors on the CPU, among ``values``: equal where they are equal."""
    text = repr([each for each in map(number, values) if each is not None])
    return int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)


def number(value: Any) -> Any:
    """``value`` as a Python number, None if it is none or is not on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.ndim == 0 and value.device.type == "cpu" else None
    return value if isinstance(value, (bool, int, float)) else None


def contents(value: torch.Tensor) -> str:
    """The elements of a tensor as text; of a large one the first, and a hash of all."""
    values = value.detach().cpu().resolve_conj().resolve_neg()
    shown = ", ".join(map(str, values.flatten()[:_SHOWN].tolist()))
    if values.numel() <= _SHOWN:
        return f"[{shown}]"
    return f"[{shown}, ...], sha256 {hash_of(values)[:16]}"


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in order, as bytes; in new memory where it is not dense."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.stride(0) != 1:  # that of a single element may be any
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def hash_of(values: torch.Tensor) -> str:
    """A hash of all elements of a tensor; 0.6 ms for 1 MB."""
    return hashlib.sha256(bytes_of(values.cpu()).numpy().data).hexdigest()


@dataclass(frozen=True)
class _Known:
    """A tensor as it was when its digest was computed."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    address: int
    digest: int

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it is this tensor, in the same memory, and nothing was written to it since."""
        return (
            self.tensor() is tensor
            and not tensor.is_inference()
            and version_of(tensor) == self.version
            and tensor.data_ptr() == self.address
        )


class Digests:
    """The digests of some tensors of each call, remembered from the last one."""

    def __init__(self) -> None:
        self._known: list[_Known | None] = []

    def of(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """A number for the contents of each tensor; call after call the tensors have the same order."""
        if len(self._known) != len(tensors):
            self._known = [None] * len(tensors)
        self._known = [
            known if known is not None and known.holds(tensor) else _known(tensor)
            for known, tensor in zip(self._known, tensors, strict=True)
        ]
        return [known.digest for known in self._known if known is not None]


def _known(tensor: torch.Tensor) -> _Known:
    version = 0 if tensor.is_inference() else version_of(tensor)
    return _Known(weakref.ref(tensor), version, tensor.data_ptr(), int(hash_of(tensor)[:15], 16))
