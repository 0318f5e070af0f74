"""Assignment to ``.data`` while a step is traced: ``tensor.data = other`` becomes a copy.

The assignment swaps a tensor's memory below everything that a tracer sees, so the update would be lost silently. A copy
gives later reads of the tensor the same values, and reads and writes of ``other`` are those of the tensor from then on,
since in eager both share memory; of other views of that memory, those after a write are refused. What had shared the
memory before (``old = p.data``, a view) keeps it in eager, and what it held: a copy of that, made before, takes its
place from then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .._torch import TorchFunctionMode, has_own_storage, storage_id, tree_map, version_of
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
        # (assigned tensor, the tensor whose data it is, the version of that one then)
        self._targets: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._results: dict[int, list[weakref.ref[torch.Tensor]]] = {}  # of functions, by storage
        # By id of a tensor whose memory that of others was: itself, what it holds, and a number for the memory.
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self._is_checking = False  # tensors are read as they are

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET:
            return self._set(*args)
        if (self._before or self._targets) and not self._is_checking:
            args, kwargs = tree_map(self.current, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, torch.Tensor) and has_own_storage(each):
                self._results.setdefault(storage_id(each), []).append(weakref.ref(each))
        return result

    def _set(self, tensor: torch.Tensor, new: torch.Tensor) -> None:
        if any(tensor is assigned for assigned, _, _ in self._targets):
            raise Refused(
                "it assigns the .data of a tensor that became another tensor's .data. Copy, with value.clone(), before "
                "that tensor gets it."
            )
        tensor = self._before[id(tensor)][1] if id(tensor) in self._before else tensor
        if self._put_back(tensor, new):
            return
        new = self.current(new)
        self._check(tensor, new)
        if is_same_memory(tensor, new):
            return
        self._keep_for(self._sharing(tensor, new))
        self._write(tensor, new)
        self._assigned.append((new, version_of(new)))
        self._targets.append((new, tensor, version_of(tensor)))

    def _write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Copy, and so that autograd raises for what it has saved of ``tensor``: in eager that holds the old values."""
        with torch.no_grad():
            tensor.copy_(values)

    def _put_back(self, tensor: torch.Tensor, new: torch.Tensor) -> bool:
        """Give a tensor the memory that it had before, if ``new`` has it: all that share it do so again."""
        kept = self._before.values()
        had = (
            each
            for each in kept
            if is_same_memory(each[0], tensor) and (new is each[0] or is_same_memory(new, each[1]))
        )
        _, values, memory = next(had, (None, None, 0))
        if values is None:
            return False
        self._check_before()
        values = values.view(tensor.shape)
        self._check(tensor, values)
        again = [key for key, (_, _, its) in self._before.items() if its == memory]
        self._keep_for(self._sharing(tensor, new))
        self._write(tensor, values)
        for key in again:
            del self._before[key]
        return True

    def _keep_for(self, others: Iterator[torch.Tensor]) -> None:
        """Copy what these tensors hold, which share the memory of one that is given other data."""
        memory = len(self._before) and max(its for _, _, its in self._before.values()) + 1
        for other in list(others):
            with torch.set_grad_enabled(other.requires_grad):
                self._before[id(other)] = other, self.current(other).clone(), memory
        self._targets = [each for each in self._targets if id(each[0]) not in self._before]

    def _sharing(self, tensor: torch.Tensor, new: torch.Tensor) -> Iterator[torch.Tensor]:
        """What shares the memory that ``tensor`` has until ``new`` is its data."""
        assigned = [each for each, target, _ in self._targets if target is tensor]
        results = [ref() for each in (tensor, *assigned) for ref in self._results.get(storage_id(each), [])]
        for other in {id(each): each for each in (*results, *assigned) if each is not None}.values():
            if other is not tensor and other is not new and id(other) not in self._before:
                yield other

    def current(self, value: Any) -> Any:
        """``value``; what it held if it had shared the memory of a tensor that was given other data.

        If it became the data of a tensor, that tensor's value now, as in eager both share memory.
        """
        if not isinstance(value, torch.Tensor) or not has_own_storage(value):
            return value
        value = self._before[id(value)][1] if id(value) in self._before else value
        its = storage_id(value) if self._targets else 0
        sharing = [
            each for each in self._targets if value is each[0] or its == storage_id(each[0]) != storage_id(each[1])
        ]
        for new, tensor, _ in sharing:
            if (value is new or is_same_memory(value, new)) and not value.requires_grad:
                return tensor.detach().view(value.shape)
        if any(version_of(tensor) != version for _, tensor, version in sharing):
            raise Refused(
                "it reads memory that it assigned to another tensor's .data, and that tensor was written to since. "
                "Copy, with value.clone(), before the assignment."
            )
        return value

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

    def _check_before(self) -> None:
        """Raise ``Refused`` if memory that a tensor had before was written to, and several others share it."""
        memories = [memory for _, _, memory in self._before.values()]
        if any(memories.count(memory) > 1 and version_of(values) for _, values, memory in self._before.values()):
            raise Refused(
                "it writes into the memory that a tensor had before its .data was assigned, which several others "
                "share. Copy, with value.clone(), and write into the copy."
            )

    def check_end(self) -> None:
        """Raise ``Refused`` if a tensor was written into after it had become another tensor's data."""
        self._is_checking = True
        self._check_before()
        is_written = any(version_of(new) != version for new, version in self._assigned)
        self._is_checking = False
        if is_written:
            raise Refused(
                "it writes into a tensor after assigning it to another tensor's .data, and so into both. Copy instead, "
                "with tensor.data.copy_(value)."
            )


def is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same elements of the same memory, in one order."""
    if (storage_id(one), one.storage_offset()) != (storage_id(other), other.storage_offset()):
        return False
    if one.is_contiguous() and other.is_contiguous():
        return one.numel() == other.numel()
    return (one.shape, one.stride()) == (other.shape, other.stride())
