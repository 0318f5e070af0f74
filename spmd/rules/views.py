"""Views: ops that permute, flatten and unflatten dims without changing elements.

A dim that is neither flattened nor unflattened may be split unevenly. Others split evenly on both sides: of the
outermost dim of a group, a rank has one contiguous run of the group's rows; of others, a part of each of many runs
(``Interleaved``). All kinds of partial pass through, but not where the result is larger (``expand``): it is cheaper to
reduce first.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod

from torch.distributed.tensor import Shard

from ..placements import Mirrored, same_rows
from .base import Info, OpCall, Option, R
from .einsum_labels import PARTIALS, WHOLE, Dims, grows, letters, option, options, partial, wrap
from .optional_ops import aten
from .registry import rule


@rule(*aten("view", "_unsafe_view", "reshape", "view_copy", "_reshape_copy"))
def view(call: OpCall) -> list[Option]:
    """Every dim that the result has as a dim, or as runs of rows in one."""
    source, result = call.arg("self"), call.results[0]
    assert result is not None
    passing = [o for kind in PARTIALS for o in partial(call, ("self",), kind)]
    if prod(source.shape) == 0:
        return passing
    splits = []
    for before, after in groups(source.shape, result.shape):
        for dim in before:
            for split in [Shard(dim), *(runs for held in call.interleaved for runs in held if runs.dim == dim)]:
                placement = _viewed(call, before, after, split)
                splits += [option(call, {"self": split}, placement)] if placement is not None else []
    own = call.owned[0] if call.owned else ()
    for before, after in groups(source.shape, result.shape):
        if len(before) == len(after) == 1:
            kinds = [kind for kind in own if kind.dim == before[0]]
            kinds += [call.hinted] if call.hinted is not None and call.hinted.dim == after[0] else []
            splits += [option(call, {"self": kind.along(before[0])}, kind.along(after[0])) for kind in kinds]
    return splits + passing


def _viewed(call: OpCall, before: list[int], after: list[int], split: Shard) -> Shard | None:
    """The placement of the result if a dim is split as ``split``, in runs or not, or None if there is none.

    Within a group, elements have the same order on both sides. The split divides runs of elements, ``outer`` of them
    for each element of the dims before ``dim``: the result must have a dim in which such runs begin.
    """
    source, result = call.arg("self"), call.results[0]
    assert result is not None
    dim, outer, pieces = split.dim, getattr(split, "outer", 1), 2 if isinstance(split, Mirrored) else 1
    size, leading = source.shape[dim], prod(source.shape[d] for d in before if d < dim)
    if len(before) == len(after) == 1 and type(split) is Shard:
        return Shard(after[0])  # not flattened: uneven parts, too
    runs, found = leading * outer, 1  # in the group; up to the current dim of the result
    for d in after:
        if runs < found * result.shape[d]:
            within = runs // found
            fits = runs % found == 0 and result.shape[d] % within == 0
            lengths = size // outer, result.shape[d] // max(within, 1)
            even = not any(length % (pieces * call.size) for length in lengths)
            return same_rows(split, d, within) if fits and even else None
        found *= result.shape[d]
    return None


def groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Dims larger than 1 of both shapes, in the smallest groups with the same rows.

    A group ends wherever the sizes so far have the same product in both shapes: (4, 6, 5) and (24, 5) give
    ([0, 1], [0]) and ([2], [1]).
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
    """Both dims, which are swapped; or the only one."""
    return renamed(call, letters(call.arg("self").ndim)[::-1])


@rule(*aten("transpose.int", "transpose_copy.int"))
def transpose(call: OpCall) -> list[Option]:
    """All dims; two are swapped."""
    names = list(letters(call.arg("self").ndim))
    if names:
        one, other = (wrap(call.arg(name), len(names)) for name in ("dim0", "dim1"))
        names[one], names[other] = names[other], names[one]
    return renamed(call, "".join(names))


@rule(*aten("permute", "permute_copy"))
def permute(call: OpCall) -> list[Option]:
    """All dims, in a new order."""
    names = letters(call.arg("self").ndim)
    return renamed(call, "".join(names[d] for d in call.arg("dims")))


@rule(*aten("unsqueeze", "unsqueeze_copy"))
def unsqueeze(call: OpCall) -> list[Option]:
    """All dims of the operand; the new one has size 1."""
    names = letters(call.arg("self").ndim)
    at = wrap(call.arg("dim"), len(names) + 1)
    return renamed(call, names[:at] + WHOLE + names[at:])


@rule(*aten("squeeze", "squeeze.dim", "squeeze.dims", "squeeze_copy", "squeeze_copy.dim", "squeeze_copy.dims"))
def squeeze(call: OpCall) -> list[Option]:
    """All dims that remain, except one that could have size 1 on some rank and be removed there."""
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
    """All dims of the result; of a new or expanded dim, each rank creates its own part.

    Of one number, also in runs of rows: those in which the result should lie.
    """
    source, result = call.arg("self"), call.results[0]
    assert isinstance(source, Info) and result is not None
    new = letters(result.ndim)
    old = new[result.ndim - source.ndim :]
    moves = () if grows(call, ("self",)) else ("self",)
    hinted = [] if source.ndim else [Option((R,), (runs,)) for held in call.interleaved for runs in held]
    return options(call, Dims({"self": old}, new, broadcast=True, moves=moves)) + hinted


@rule(*aten("view_as_real", "view_as_real_copy"))
def view_as_real(call: OpCall) -> list[Option]:
    """All dims of the operand; the new last one has size 2."""
    return complex_view(call, letters(call.arg("self").ndim), letters(call.arg("self").ndim) + WHOLE)


@rule(*aten("view_as_complex", "view_as_complex_copy"))
def view_as_complex(call: OpCall) -> list[Option]:
    """All dims of the result; the last one of the operand has size 2."""
    names = letters(call.arg("self").ndim - 1)
    return complex_view(call, names + WHOLE, names)


def complex_view(call: OpCall, before: str, after: str) -> list[Option]:
    """The dims as labelled; a partial sum passes through, though the dtype changes."""
    through = option(call, {"self": PARTIALS[0]}, PARTIALS[0])
    return [*options(call, Dims({"self": before}, after)), through]


@rule(*aten("view.dtype"))
def view_dtype(call: OpCall) -> list[Option]:
    """All dims if the size of an element stays the same, else all but the last."""
    names = letters(call.arg("self").ndim)
    same = call.results[0] is not None and call.results[0].shape == call.arg("self").shape
    names = names if same else names[:-1] + WHOLE
    return options(call, Dims({"self": names}, names))
