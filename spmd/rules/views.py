"""Ops that rename, merge and split dims without touching elements.

A dim that survives alone may be split unevenly. Where dims are merged or taken apart, a dim is split evenly on both
sides: of the outermost, each rank's part is one contiguous run of the group's rows; of others, a part of each of many
runs (``Interleaved``). All kinds of partial pass, but not where the result is larger (``expand``): reduce first is then
the cheaper.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod

from torch.distributed.tensor import Shard

from ..placements import rows
from .aten import aten
from .base import Info, OpCall, Option
from .einsum_labels import PARTIALS, WHOLE, Dims, grows, letters, option, options, partial, wrap
from .registry import rule, whole


@rule(*aten("view", "_unsafe_view", "reshape", "view_copy", "_reshape_copy"))
def view(call: OpCall) -> list[Option]:
    """Every dim that the result still has, as a dim or as runs of rows in one."""
    source, result = call.arg("self"), call.results[0]
    assert result is not None
    passing = [o for kind in PARTIALS for o in partial(call, ("self",), kind)]
    if prod(source.shape) == 0:
        return passing
    splits = []
    for before, after in groups(source.shape, result.shape):
        for dim in before:
            for outer in [1, *(runs.outer for held in call.interleaved for runs in held if runs.dim == dim)]:
                place = _viewed(call, before, after, dim, outer)
                splits += [option(call, {"self": rows(dim, outer)}, place)] if place is not None else []
    return splits + passing


def _viewed(call: OpCall, before: list[int], after: list[int], dim: int, outer: int) -> Shard | None:
    """Where rows of ``dim``, split in ``outer`` runs, are in the result, or None where they are not to be found.

    Within a group, all elements stand in one order on both sides. The rows in question are cut out of runs of elements,
    of which there are as many as the dims ahead have elements: the result must have a dim in which such runs begin.
    """
    source, result = call.arg("self"), call.results[0]
    assert result is not None
    size, ahead = source.shape[dim], prod(source.shape[d] for d in before if d < dim)
    if len(before) == len(after) == 1 and outer == 1:
        return Shard(after[0])  # alone: uneven parts, too
    runs, found = ahead * outer, 1  # of elements in the group; those that the dims of the result so far begin
    for d in after:
        if runs < found * result.shape[d]:
            within = runs // found
            fits = runs % found == 0 and result.shape[d] % within == 0
            even = call.even(size // outer) and call.even(result.shape[d] // max(within, 1))
            return rows(d, within) if fits and even else None
        found *= result.shape[d]
    return None


def groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Dims larger than 1 of both shapes, in the smallest groups that hold the same rows.

    A group ends wherever both shapes have had the same number of elements: (4, 6, 5) and (24, 5) give ([0, 1], [0]) and
    ([2], [1]).
    """
    dims = [[d for d, n in enumerate(shape) if n > 1] for shape in (before, after)]
    done = [
        list(accumulate((shape[d] for d in of), int.__mul__)) for shape, of in zip((before, after), dims, strict=True)
    ]
    found, start = [], (0, 0)
    for end in sorted(set(done[0]) & set(done[1])):
        stop = (done[0].index(end) + 1, done[1].index(end) + 1)
        found.append((dims[0][start[0] : stop[0]], dims[1][start[1] : stop[1]]))
        start = stop
    return found


def renamed(call: OpCall, after: str) -> list[Option]:
    """Options of an op whose result has the dims ``after`` of its operand's ``letters``."""
    moves = () if grows(call, ("self",)) else ("self",)
    return options(call, Dims({"self": letters(call.arg("self").ndim)}, after, moves=moves))


@rule(*aten("t", "t_copy"))
def t(call: OpCall) -> list[Option]:
    """Both dims change places; of one dim, none."""
    return renamed(call, letters(call.arg("self").ndim)[::-1])


@rule(*aten("transpose.int", "transpose_copy.int"))
def transpose(call: OpCall) -> list[Option]:
    """Two dims change places."""
    names = list(letters(call.arg("self").ndim))
    if names:
        one, other = (wrap(call.arg(name), len(names)) for name in ("dim0", "dim1"))
        names[one], names[other] = names[other], names[one]
    return renamed(call, "".join(names))


@rule(*aten("permute", "permute_copy"))
def permute(call: OpCall) -> list[Option]:
    """Dims in a new order."""
    names = letters(call.arg("self").ndim)
    return renamed(call, "".join(names[d] for d in call.arg("dims")))


@rule(*aten("unsqueeze", "unsqueeze_copy"))
def unsqueeze(call: OpCall) -> list[Option]:
    """One dim of size 1 more."""
    names = letters(call.arg("self").ndim)
    at = wrap(call.arg("dim"), len(names) + 1)
    return renamed(call, names[:at] + WHOLE + names[at:])


@rule(*aten("squeeze", "squeeze.dim", "squeeze.dims", "squeeze_copy", "squeeze_copy.dim", "squeeze_copy.dims"))
def squeeze(call: OpCall) -> list[Option]:
    """Dims of size 1 fewer; a dim that could become 1 on a rank, and vanish there alone, is not split."""
    shape = call.arg("self").shape
    dims = call.arg("dim", list(range(len(shape))))
    asked = {wrap(d, len(shape)) for d in ([dims] if isinstance(dims, int) else dims)}
    names = letters(len(shape))
    after = [c for d, c in enumerate(names) if not (d in asked and shape[d] == 1)]
    unsafe = {names[d] for d in asked if d < len(shape) and 1 in part_sizes(shape[d], call.size)}
    return renamed(call, "".join(WHOLE if c in unsafe else c for c in after))


def part_sizes(size: int, parts: int) -> set[int]:
    """The sizes of the parts that ``torch.chunk`` cuts ``size`` rows into."""
    step = -(-size // parts)
    return {max(0, min(step, size - step * part)) for part in range(parts)}


@rule(*aten("expand", "expand_copy"))
def expand(call: OpCall) -> list[Option]:
    """Dims that are kept; a dim that is new or grows is made on each rank in the part it needs."""
    source, result = call.arg("self"), call.results[0]
    assert isinstance(source, Info) and result is not None
    new = letters(result.ndim)
    old = new[result.ndim - source.ndim :]
    moves = () if grows(call, ("self",)) else ("self",)
    return options(call, Dims({"self": old}, new, broadcast=True, moves=moves))


@rule(*aten("view_as_real", "view_as_real_copy"))
def view_as_real(call: OpCall) -> list[Option]:
    """A last dim of size 2 more."""
    return complex_view(call, letters(call.arg("self").ndim), letters(call.arg("self").ndim) + WHOLE)


@rule(*aten("view_as_complex", "view_as_complex_copy"))
def view_as_complex(call: OpCall) -> list[Option]:
    """The last dim, of size 2, fewer."""
    names = letters(call.arg("self").ndim - 1)
    return complex_view(call, names + WHOLE, names)


def complex_view(call: OpCall, before: str, after: str) -> list[Option]:
    """Split as labelled; the sum of parts is the sum, though the dtype changes."""
    through = option(call, {"self": PARTIALS[0]}, PARTIALS[0])
    return [*options(call, Dims({"self": before}, after)), through]


@rule(*aten("view.dtype"))
def view_dtype(call: OpCall) -> list[Option]:
    """Bits under another name: the same dims if the size of an element is the same, else all but the last."""
    names = letters(call.arg("self").ndim)
    same = call.results[0] is not None and call.results[0].shape == call.arg("self").shape
    names = names if same else names[:-1] + WHOLE
    return options(call, Dims({"self": names}, names))


# Strides and offset count over the whole tensor.
whole(*aten("as_strided", "as_strided_copy", "as_strided_scatter"))
