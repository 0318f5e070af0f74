"""Assignment to ``.data`` while a step is traced: ``tensor.data = other`` becomes a copy.

The assignment swaps a tensor's memory below everything that a tracer sees, so the update would be lost silently. A copy
gives later reads of the tensor the same values, unless one of the two is written afterwards and both share the write:
that is refused. What had shared the memory before (``old = p.data``, a view) keeps it in eager, and what it held: a
copy of that, made before, takes its place from then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .._torch import TorchFunctionMode, storage_id, tree_map, version_of
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
        self._results: dict[int, list[weakref.ref[torch.Tensor]]] = {}  # of functions, by storage
        # By id of a tensor whose memory that of others was: itself, what it holds, and a number for the memory.
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET and self._put_back(*args):
            return None
        if self._before:
            args, kwargs = tree_map(self.before, (args, kwargs or {}))
        if func != _SET:
            result = func(*args, **(kwargs or {}))
            for each in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(each, torch.Tensor):
                    self._results.setdefault(storage_id(each), []).append(weakref.ref(each))
            return result
        tensor, new = args
        self._check(tensor, new)
        self._keep_for(self._sharing(tensor, new))
        tensor.data.copy_(new)
        self._assigned.append((new, version_of(new)))
        self._targets[id(new)] = tensor
        return None

    def _put_back(self, tensor: torch.Tensor, new: torch.Tensor) -> bool:
        """Give a tensor the memory that it had before, if ``new`` has it: all that share it do so again."""
        places = [(storage_id(each), each.storage_offset(), each.stride()) for each in (tensor, new)]
        if id(new) not in self._before or places[0] != places[1]:
            return False
        _, values, memory = self._before[id(new)]
        self._check(tensor, values)
        again = [key for key, (_, _, its) in self._before.items() if its == memory]
        self._keep_for(self._sharing(tensor, new))
        tensor.data.copy_(values)
        for key in again:
            del self._before[key]
        return True

    def _keep_for(self, others: Iterator[torch.Tensor]) -> None:
        """Copy what these tensors hold, which share the memory of one that is given other data."""
        memory = len(self._before) and max(its for _, _, its in self._before.values()) + 1
        for other in list(others):
            with torch.set_grad_enabled(other.requires_grad):
                self._before[id(other)] = other, other.clone(), memory
            self._targets.pop(id(other), None)

    def _sharing(self, tensor: torch.Tensor, new: torch.Tensor) -> Iterator[torch.Tensor]:
        """What shares the memory that ``tensor`` has until ``new`` is its data."""
        results = [reference() for reference in self._results.get(storage_id(tensor), [])]
        others = {id(each): each for each in results if each is not None}
        assigned = {id(each): each for each, _ in self._assigned if self._targets.get(id(each)) is tensor}
        for other in (others | assigned).values():
            if other is not tensor and other is not new and id(other) not in self._before:
                yield other

    def before(self, value: Any) -> Any:
        """``value``; if it had shared the memory of a tensor that was given other data, what it held before."""
        return self._before[id(value)][1] if id(value) in self._before else value

    def current(self, value: Any) -> Any:
        """``value``; if it became the data of a tensor, that tensor's value now, as in eager both share memory."""
        target = self._targets.get(id(value))
        return self.before(value) if target is None else target.detach()

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
