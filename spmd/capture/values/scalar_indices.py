"""Rows taken and written by a number that each call reads, as in ``table[t]``, while a step is traced.

Where the number is the value of a 0-dim tensor, torch reads it to take a view, which no graph can do. Here the row is
gathered, and written, by an index of one element. A gathered row is a copy: a step that writes into it, or reads it
after the table was written, is refused. Where it is a number in Python, such as a counter, the row is a view. Torch
would fix the number for that (``Tensor.__getitem__``, torch 2.11 to 2.15), and ``select`` does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._torch import TorchFunctionMode, tree_flatten, version_of
from ..unsupported import Refused
from .known_values import known_value

_GET, _SET = Tensor.__getitem__, Tensor.__setitem__
_MASKS = (torch.bool, torch.uint8)


@dataclass(frozen=True)
class _Row:
    """A row that was gathered: it is a view in eager, so it must be read before the table is written."""

    row: Tensor
    table: Tensor
    versions: tuple[int, int]

    @classmethod
    def of(cls, row: Tensor, table: Tensor) -> _Row:
        """A row that was just gathered."""
        return cls(row, table, (version_of(row), version_of(table)))

    def is_written(self) -> bool:
        return version_of(self.row) != self.versions[0]

    def is_stale(self) -> bool:
        return version_of(self.table) != self.versions[1]


class ScalarIndices(TorchFunctionMode):
    """Takes and writes rows by the value of a 0-dim tensor, or by a symbol, for the length of a trace.

    Raises ``Refused`` where a view would behave otherwise.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rows: dict[int, _Row] = {}  # by the id of the row

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _GET and _reads_a_value(args[1]):
            return self._get(*args)
        if func in (_GET, _SET) and _has_symbol(args[1]):
            view = _select(*args[:2])
            return view if func == _GET else _SET(view, ..., args[2])
        if func == _SET and _reads_a_value(args[1]):
            return self._set(*args)
        if self._rows and func.__name__ != "__get__":  # shapes and the like stay what they are
            self._check(args, kwargs)
        return func(*args, **(kwargs or {}))

    def check_end(self) -> None:
        """Raise ``Refused`` if the step has written into a row."""
        for each in self._rows.values():
            _refuse_if(each.is_written(), "writes into")

    def _check(self, args: Any, kwargs: Any) -> None:
        for leaf in tree_flatten((args, kwargs))[0]:
            row = self._rows.get(id(leaf))
            _refuse_if(row is not None and row.is_stale(), "reads, after writing to the table,")

    def _get(self, table: Tensor, index: Any) -> Tensor:
        view, dims = _split(table, index, _is_scalar)
        for dim, scalar in reversed(dims):
            view = _GET(view, _at(dim, scalar)).squeeze(dim)
        self._rows[id(view)] = _Row.of(view, table)
        return view

    def _set(self, table: Tensor, index: Any, value: Any) -> None:
        view, dims = _split(table, index, _is_scalar)
        if len(dims) > 1:
            raise Refused("it writes by the values of several 0-dim tensors. Use torch.where, or scatter.")
        ((dim, scalar),) = dims
        inner = view.ndim - 1 - dim  # the dims of a row that stand after the index
        if isinstance(value, Tensor):
            self._rows.pop(id(value), None)  # table[t] += 1 writes into the row, and puts it back
            value = value.unsqueeze(value.ndim - inner) if value.ndim > inner else value
        _SET(view, _at(dim, scalar), value)


def _select(table: Tensor, index: Any) -> Tensor:
    view, dims = _split(table, index, _is_symbol)
    for dim, number in reversed(dims):
        fits = -view.shape[dim] <= number < view.shape[dim]
        # Where it does not fit, torch raises what it raises in eager.
        view = view.select(dim, number) if fits else _GET(view, (*_all(dim), int(number)))
    return view


def _refuse_if(wrong: bool, what: str) -> None:
    if wrong:
        raise Refused(
            f"it {what} a row taken by the value of a tensor (table[t]), which is a copy here and a view in eager. "
            "Write to the table (table[t] = value), and read the row first, or take it again."
        )


def _reads_a_value(index: Any) -> bool:
    """Whether an index has a 0-dim tensor of unknown value, beside slices and numbers alone."""
    entries = _entries(index)
    if not all(_is_plain(each) or _is_scalar(each) for each in entries):
        return False
    return any(_is_scalar(each) and known_value(each) is None for each in entries)


def _has_symbol(index: Any) -> bool:
    """Whether an index has a number that is not known, beside slices and numbers alone."""
    entries = _entries(index)
    return any(map(_is_symbol, entries)) and all(map(_is_plain, entries))


def _entries(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_plain(entry: Any) -> bool:
    return isinstance(entry, (int, torch.SymInt, slice, type(None), type(...))) and not isinstance(entry, bool)


def _is_symbol(entry: Any) -> bool:
    return isinstance(entry, torch.SymInt)


def _is_scalar(entry: Any) -> bool:
    is_number = isinstance(entry, Tensor) and not entry.ndim and entry.dtype not in _MASKS
    return is_number and not entry.is_floating_point() and not entry.is_complex()


def _split(table: Tensor, index: Any, is_taken: Callable[[Any], bool]) -> tuple[Tensor, list[tuple[int, Any]]]:
    """The view that the rest of an index takes, and (its dim, the entry) for each entry that ``is_taken``."""
    entries = _entries(index)
    indexed = sum(each is not None and each is not ... for each in entries)
    dims, at = [], 0
    for each in entries:
        if is_taken(each):
            dims.append((at, each))
        if each is ...:
            at += table.ndim - indexed
        elif is_taken(each) or not isinstance(each, (int, torch.SymInt)):
            at += 1
    rest = tuple(slice(None) if is_taken(each) else each for each in entries)
    return _GET(table, rest), dims


def _at(dim: int, scalar: Tensor) -> tuple[Any, ...]:
    return (*_all(dim), scalar.reshape(1))


def _all(dims: int) -> list[Any]:
    return [slice(None)] * dims
