"""Ops that split or concatenate tensors along a dim: every other dim may be sharded.

They move elements unchanged, so partial sums pass through, as do partial extremes where no values are filled in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from ..placements import Interleaved, rows
from .base import OpCall, Option, parameters
from .einsum_labels import WHOLE, Dims, grows, is_zero, letters, option, options, without, wrap
from .optional_ops import aten
from .registry import localize, rule
from .size_arguments import Shapes, replaced


def dim_of(call: OpCall, name: str = "dim") -> int:
    """The dim that the op works along."""
    return wrap(call.arg(name), call.arg("self").ndim)


CUTS = aten(
    *("split.Tensor", "split.sizes", "split_with_sizes", "split_with_sizes_copy", "chunk", "narrow", "narrow_copy"),
    *("slice.Tensor", "slice_copy.Tensor"),
)


def is_cut(call: OpCall) -> bool:
    """Whether the results are runs of rows along ``dim_of(call)``."""
    return call.target in CUTS


@rule(*CUTS)
def cut(call: OpCall) -> list[Option]:
    """All dims but the one cut; that one too where a slice takes all of it, or where it is cut between runs of rows."""
    names = letters(call.arg("self").ndim)
    if takes_all(call):
        return options(call, Dims({"self": names}, names, moves=("self",)))
    dim = dim_of(call)
    kept = without(names, dim)
    found = options(call, Dims({"self": kept}, kept, moves=("self",)))
    return found + [_between(call, dim, outer) for outer in _runs_along(call, dim) if cuts_between(call, outer)]


def _between(call: OpCall, dim: int, outer: int) -> Option:
    length = call.arg("self").shape[dim] // outer
    counts = [info.shape[dim] // length for info in call.results if info is not None]
    return option(call, {"self": rows(dim, outer)}, [rows(dim, count) for count in counts])


def cuts_between(call: OpCall, outer: int) -> bool:
    """Whether a cut of rows in ``outer`` runs divides no run: a split that undoes a concatenation."""
    if not _is_placed(call):
        return False
    dim = dim_of(call)
    length, left = divmod(call.arg("self").shape[dim], outer)
    borders = [_start(call), *(info.shape[dim] for info in call.results if info is not None)]
    whole_runs = left == 0 and length > 0 and all(border % length == 0 for border in borders) and 0 not in borders[1:]
    return outer > 1 and call.arg("step", 1) == 1 and whole_runs and call.even(length)


def _start(call: OpCall, rows_of_all: int | None = None) -> int:
    """The first row of the first result, of all that the dim has."""
    size: int = call.arg("self").shape[dim_of(call)] if rows_of_all is None else rows_of_all
    start: int = call.arg("start") or 0
    return min(max(start + size, 0) if start < 0 else start, size)


@localize(*CUTS)
def own_rows(call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Shapes) -> tuple[Any, ...]:
    """The start and the lengths of a cut, in a rank's own rows."""
    dim = dim_of(call)
    first, here = call.results[0], [shape[dim] for shape in shapes if shape is not None]
    if takes_all(call) or first is None or first.shape[dim] == here[0]:
        return args
    for name in ("split_size", "split_sizes"):
        if name in parameters(call.target):
            return replaced(call, args, name, here[0] if isinstance(call.arg(name), int) else here)
    if "chunk" in str(call.target):
        return args
    start = _start(call) * here[0] // first.shape[dim]
    return (args[0], dim, start, here[0] if "narrow" in str(call.target) else start + here[0])


def takes_all(call: OpCall) -> bool:
    """Whether the call is a slice from the first row to the last, which takes all of every rank's part."""
    if "slice" not in str(call.target) or not _is_placed(call):
        return False
    start, end = call.arg("start"), call.arg("end")
    size = call.arg("self").shape[dim_of(call)] if call.arg("self") is not None else _rows(call)
    return call.arg("step", 1) == 1 and start in (None, 0) and (end is None or end >= size)


def _is_placed(call: OpCall) -> bool:
    """Whether it is known where a slice starts and ends: not if that is a number that each call reads."""
    return not any(isinstance(call.arg(name), torch.SymInt) for name in ("start", "end", "length"))


def _rows(call: OpCall) -> int:
    sizes: list[int] = call.arg("input_sizes")
    return sizes[wrap(call.arg("dim"), len(sizes))]


@rule(*aten("select.int", "select_copy.int", "unbind.int", "unbind_copy.int"))
def select(call: OpCall) -> list[Option]:
    """All dims but the one that is removed."""
    names = without(letters(call.arg("self").ndim), dim_of(call))
    return options(call, Dims({"self": names}, names.replace(WHOLE, ""), moves=("self",)))


@rule(*aten("cat"))
def cat(call: OpCall) -> list[Option]:
    """All dims; torch skips empty 1-D tensors among others.

    Along the dim of concatenation a rank has its part of each tensor: of two views of the batch, for example.
    """
    result = call.results[0]
    assert result is not None
    dim = wrap(call.arg("dim"), result.ndim)
    names = without(letters(result.ndim), dim)
    labels = [names if info.ndim == result.ndim else WHOLE for info in call.operands]
    return options(call, Dims({"tensors": labels}, names, moves=("tensors",))) + _joined(call, dim)


def _joined(call: OpCall, dim: int) -> list[Option]:
    """Options that split ``dim``, along which tensors are concatenated that consist of runs of one length."""
    result = call.results[0]
    assert result is not None
    sizes = [info.shape[dim] if info.ndim == result.ndim else 0 for info in call.operands]
    lengths = {size // outer for size in set(sizes) for outer in _runs_along(call, dim) if size % outer == 0}
    found = []
    for length in sorted(lengths - {0}, reverse=True):
        if call.even(length) and not any(size % length for size in set(sizes)):
            placements = [rows(dim, size // length) if size else Replicate() for size in sizes]
            found.append(option(call, {"tensors": placements}, rows(dim, sum(sizes) // length)))
    return found


def _runs_along(call: OpCall, dim: int) -> list[int]:
    """1, and the numbers of runs in which operands are available along ``dim``."""
    plain = (runs for held in call.interleaved for runs in held if type(runs) is Interleaved)
    return list(dict.fromkeys([1, *(runs.outer for runs in plain if runs.dim == dim)]))


@rule(*aten("stack"))
def stack(call: OpCall) -> list[Option]:
    """All dims of the tensors."""
    names = letters(call.operands[0].ndim)
    at = wrap(call.arg("dim"), len(names) + 1)
    return options(call, Dims({"tensors": names}, names[:at] + WHOLE + names[at:], moves=("tensors",)))


@rule(*aten("slice_backward"))
def slice_backward(call: OpCall) -> list[Option]:
    """All dims but the one sliced, for zeros with the gradient at the slice; that one too if cut between runs."""
    names = letters(call.arg("grad_output").ndim)
    dim = wrap(call.arg("dim"), len(names))
    kept = names if takes_all(call) else without(names, dim)
    found = options(call, Dims({"grad_output": kept}, kept, linear=(("grad_output",),)))
    size, part = call.arg("input_sizes")[dim], call.arg("grad_output").shape[dim]
    for length in _between_runs(call, dim, size, part):
        found.append(option(call, {"grad_output": rows(dim, part // length)}, rows(dim, size // length)))
    return found


def _between_runs(call: OpCall, dim: int, size: int, part: int) -> list[int]:
    """The lengths of runs such that ``part`` rows of ``size``, from the call's start on, are whole runs of either."""
    if not _is_placed(call) or takes_all(call) or call.arg("step", 1) != 1 or not part:
        return []
    outers = _runs_along(call, dim)
    lengths = dict.fromkeys(n // outer for n in (part, size) for outer in outers if n % outer == 0)
    whole = (part, size, _start(call, size))
    return [n for n in lengths if 0 < n < size and call.even(n) and not any(border % n for border in whole)]


@localize(*aten("slice_backward"))
def own_zeros(call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Shapes) -> tuple[Any, ...]:
    """The sizes of a rank's part, and the slice of it."""
    (shape,), dim = shapes, wrap(call.arg("dim"), len(call.arg("input_sizes")))
    assert shape is not None
    size, part = call.arg("input_sizes")[dim], call.arg("grad_output").shape[dim]
    if _is_same_slice(call, size, shape[dim]):
        return (args[0], list(shape), *args[2:])
    return (args[0], list(shape), dim, *_own_slice(call, size, part, shape[dim]), call.arg("step"))


@localize(*aten("slice_scatter"))
def own_slice(call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Shapes) -> tuple[Any, ...]:
    """The slice of a rank's part."""
    (shape,), dim = shapes, dim_of(call)
    assert shape is not None
    size, part = call.arg("self").shape[dim], call.arg("src").shape[dim]
    if _is_same_slice(call, size, shape[dim]):
        return args
    return (*args[:2], dim, *_own_slice(call, size, part, shape[dim]), *args[5:])


def _is_same_slice(call: OpCall, size: int, own: int) -> bool:
    """Whether the slice of ``size`` rows is also that of a rank's ``own``."""
    return takes_all(call) or own == size


def _own_slice(call: OpCall, size: int, part: int, own: int) -> tuple[int, int]:
    """Start and end of a slice of ``part`` among ``size`` rows, of which a rank has ``own``."""
    start = _start(call, size) * own // size
    return start, start + part * own // size


@rule(*aten("select_backward"))
def select_backward(call: OpCall) -> list[Option]:
    """All dims of the gradient, which becomes one row among zeros."""
    names = letters(call.arg("grad_output").ndim)
    at = wrap(call.arg("dim"), len(names) + 1)
    return options(call, Dims({"grad_output": names}, names[:at] + WHOLE + names[at:], linear=(("grad_output",),)))


@rule(*aten("slice_scatter"))
def slice_scatter(call: OpCall) -> list[Option]:
    """All dims but the one sliced, and that one between runs of rows; one tensor replaces a slice of the other."""
    names, dim = letters(call.arg("self").ndim), dim_of(call)
    kept = names if takes_all(call) else without(names, dim)
    found = options(call, Dims({"self": kept, "src": kept}, kept, moves=("self", "src")))
    size, part = call.arg("self").shape[dim], call.arg("src").shape[dim]
    for length in _between_runs(call, dim, size, part):
        placed = {"self": rows(dim, size // length), "src": rows(dim, part // length)}
        found.append(option(call, placed, rows(dim, size // length)))
    return found


@rule(*aten("select_scatter"))
def select_scatter(call: OpCall) -> list[Option]:
    """All dims but the one of the row that is replaced."""
    names = without(letters(call.arg("self").ndim), dim_of(call))
    row = names.replace(WHOLE, "")
    return options(call, Dims({"self": names, "src": row}, names, moves=("self", "src")))


@rule(*aten("unfold", "unfold_copy"))
def unfold(call: OpCall) -> list[Option]:
    """All dims but the one with windows, which are a new last dim."""
    names = without(letters(call.arg("self").ndim), dim_of(call, "dimension"))
    return options(call, Dims({"self": names}, names + WHOLE, moves=("self",)))


@rule(*aten("unfold_backward"))
def unfold_backward(call: OpCall) -> list[Option]:
    """All dims but the one along which windows are summed."""
    ndim = len(call.arg("input_sizes"))
    names = without(letters(ndim), wrap(call.arg("dim"), ndim))
    return options(call, Dims({"grad_in": names + WHOLE}, names, linear=(("grad_in",),)))


@rule(*aten("tril", "triu"))
def triangle(call: OpCall) -> list[Option]:
    """All dims but the last two."""
    ndim = call.arg("self").ndim
    names = without(letters(ndim), ndim - 2, ndim - 1)
    return options(call, Dims({"self": names}, names, linear=(("self",),)))


@rule(*aten("constant_pad_nd"))
def pad(call: OpCall) -> list[Option]:
    """All dims that are not padded; a sum passes if the padding is zero."""
    ndim = call.arg("self").ndim
    pairs: list[int] = list(call.arg("pad"))
    padded = [ndim - 1 - k // 2 for k, n in enumerate(pairs) if n != 0]
    names = without(letters(ndim), *padded)
    return options(call, Dims({"self": names}, names, linear=(("self",),) if is_zero(call.arg("value")) else ()))


@rule(*aten("repeat"))
def repeat(call: OpCall) -> list[Option]:
    """All dims; of a repeated dim a rank has its part of each repetition."""
    repeats: list[int] = call.arg("repeats")
    names = letters(call.arg("self").ndim)
    new = len(repeats) - len(names)
    once = "".join(c if n == 1 else WHOLE for c, n in zip(names, repeats[new:], strict=True))
    moves = () if grows(call, ("self",)) else ("self",)
    found = options(call, Dims({"self": once}, WHOLE * new + once, moves=moves))
    return found + [o for d, n in enumerate(repeats[new:]) if n > 1 for o in _repeated(call, d, d + new, n)]


def _repeated(call: OpCall, before: int, after: int, times: int) -> Iterator[Option]:
    """Options that split the dim ``before``, which is repeated and becomes ``after``."""
    size = call.arg("self").shape[before]
    for outer in _runs_along(call, before):
        if size and call.even(size // outer):
            yield option(call, {"self": rows(before, outer)}, rows(after, outer * times))


@rule(*aten("repeat_interleave.self_int"))
def repeat_interleave(call: OpCall) -> list[Option]:
    """All dims but the one whose rows are repeated; without a dim the tensor is flattened."""
    if call.arg("dim") is None:
        return []
    names = without(letters(call.arg("self").ndim), dim_of(call))
    return options(call, Dims({"self": names}, names))
