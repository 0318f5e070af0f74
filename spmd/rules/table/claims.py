"""Ask the rule of an op about one call: the letters of each tensor, the options, and the letters that it cannot split.

Letters are the rule's own where it divides the call by labels; those of a rule that lists its options itself are read
off these: dims that one option splits together have one letter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_letters
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard

from passes.ir.printer import short_dtype

from ..base import Info, OpCall, Option, P, Rule
from ..decomposed import decomposition_of
from ..einsum_labels import EQUAL, PARTIALS, WHOLE, Dims, Labels, arguments, dims_read, infos, partial, split

OWN = "of its own"  # an option that labels do not give


@dataclass(frozen=True)
class Tensor:
    """An operand or result of a call: the argument's name, the type as dumps write it, and a letter for each dim."""

    name: str
    type: str
    letters: str


@dataclass(frozen=True)
class Claim:
    """An option: what it does, and the placement of each operand and result, as text.

    ``local``: whether a rank runs a program of the option's own, not the op; ``sends``: whether that communicates.
    """

    what: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    local: bool
    sends: bool


@dataclass(frozen=True)
class Claims:
    """All that a rule says of a call.

    ``labelled``: whether the letters are the rule's own. ``limits``: what its labels say besides. ``refused``: by
    letter, why this call is not split so. ``decomposed``: the dim of the first operand that may be split all the same,
    since the op is then computed by others; None if there is none.
    """

    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    labelled: bool
    limits: tuple[str, ...]
    claims: tuple[Claim, ...]
    refused: dict[str, str]
    decomposed: int | None

    @property
    def notation(self) -> str:
        """The letters as in einsum, ``mk,kn->mn``, with a dot for a dim that is needed whole."""
        return "->".join(",".join(each.letters for each in side) for side in (self.operands, self.results))


def claims_of(rule: Rule, call: OpCall) -> Claims:
    """The claims of ``rule`` for ``call``, with the letters that it reads meanwhile."""
    with dims_read() as read:
        options = rule(call)
    dims = read[0] if read else _read_off(call, options)
    decomposition = decomposition_of(call)
    whats = [_what(call, read, option) if read else _seen(call, dims, option) for option in options]
    return Claims(
        operands=tuple(_operands(call, dims)),
        results=tuple(_results(call, dims)),
        labelled=bool(read),
        limits=tuple(limits(dims)) if read else (),
        claims=tuple(map(_claim, options, whats)),
        refused=dict(_refused(call, read)),
        decomposed=decomposition[0] if decomposition is not None else None,
    )


def _read_off(call: OpCall, options: Sequence[Option]) -> Dims:
    """Labels by which dims that one option splits have one letter; a dim keeps the letter of its first option."""
    tensors = [*call.operands, *(info for info in call.results if info is not None)]
    found = [[WHOLE] * info.ndim for info in tensors]
    left = iter(ascii_letters)
    for option in options:
        placed = zip(found, [*option.operands, *(p for p in option.results if p is not None)], strict=True)
        dims = [(labels, p.dim) for labels, p in placed if type(p) is Shard]
        if dims and all(labels[d] == WHOLE for labels, d in dims):
            letter = next(left)
            for labels, d in dims:
                labels[d] = letter
    each = iter(map("".join, found))
    operands = {name: _labels_of(value, each) for name, value in arguments(call) if any(infos(value))}
    return Dims(operands, tuple("" if info is None else next(each) for info in call.results))


def _labels_of(value: Any, each: Iterator[str]) -> Labels:
    """The next labels for an argument: of a list one for each item, empty where that is no tensor."""
    if isinstance(value, Info):
        return next(each)
    return [next(each) if isinstance(item, Info) else "" for item in value]


def _operands(call: OpCall, dims: Dims) -> Iterator[Tensor]:
    """The tensors among the arguments; one that has no labels is needed whole."""
    for name, value in arguments(call):
        tensors, given = list(infos(value)), dims.operands.get(name)
        each = [given] * len(tensors) if given is None or isinstance(given, str) else _present(value, given)
        for info, labels in zip(tensors, each, strict=True):
            yield Tensor(name, _type(info), WHOLE * info.ndim if labels is None else labels)


def _present(value: Sequence[Any], labels: Sequence[str]) -> list[str]:
    """The labels of the tensors in a list that may have gaps."""
    return [one for one, item in zip(labels, value, strict=True) if isinstance(item, Info)]


def _results(call: OpCall, dims: Dims) -> Iterator[Tensor]:
    """The tensors that the op returns; one that is equal on all ranks has no letters of its own."""
    each = [dims.results] * len(call.results) if isinstance(dims.results, str) else dims.results
    for k, (info, labels) in enumerate(zip(call.results, each, strict=True)):
        if info is not None:
            name = "result" if len(call.results) == 1 else f"result {k}"
            yield Tensor(name, _type(info), WHOLE * info.ndim if labels == EQUAL else labels)


def _type(info: Info) -> str:
    return f"{short_dtype(info.dtype)}[{', '.join(map(str, info.shape))}]"


def _claim(option: Option, what: str) -> Claim:
    return Claim(
        what=what or option.name or OWN,
        operands=tuple(map(_text, option.operands)),
        results=tuple(_text(each) for each in option.results if each is not None),
        local=option.local is not None,
        sends=option.sends is not None,
    )


def _text(placement: Any) -> str:
    """A placement as the documents write it: R, S(0), P, P(max)."""
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op == "sum" else f"P({placement.reduce_op})"
    if type(placement) is Shard:
        return f"S({placement.dim})"
    return "R" if placement.is_replicate() else repr(placement)


def _what(call: OpCall, read: Sequence[Dims], option: Option) -> str:
    """The letter that an option splits, or the partial operands that it passes on; empty if labels do not give it."""
    for dims in read:
        for letter in dims.letters():
            if _is_same(split(call, dims, letter), option):
                return f"split {letter}"
        for names, kind in (*((names, P) for names in dims.linear), *((dims.moves, kind) for kind in PARTIALS)):
            if names and any(_is_same(each, option) for each in partial(call, names, kind)):
                return f"partial {' + '.join(names)}"
    return ""


def _seen(call: OpCall, dims: Dims, option: Option) -> str:
    """The same of an option off which the letters were read."""
    tensors = [*_operands(call, dims), *_results(call, dims)]
    placed = [*zip(tensors, [*option.operands, *(p for p in option.results if p is not None)], strict=True)]
    letters = {tensor.letters[p.dim] for tensor, p in placed if type(p) is Shard}
    if len(letters) == 1 and letters != {WHOLE} and all(type(p) in (Shard, Replicate) for _, p in placed):
        return f"split {letters.pop()}"
    names = [tensor.name for tensor, p in placed[: len(option.operands)] if isinstance(p, Partial)]
    return f"partial {' + '.join(names)}" if names and not letters else ""


def _is_same(one: Option | None, other: Option) -> bool:
    return one is not None and (one.operands, one.results) == (other.operands, other.results)


def _refused(call: OpCall, read: Sequence[Dims]) -> Iterator[tuple[str, str]]:
    """The letters that no option of a call splits, with the reason."""
    for dims in read:
        for letter in dims.letters():
            if split(call, dims, letter) is None:
                yield letter, _reason(call, dims, letter)


def _reason(call: OpCall, dims: Dims, letter: str) -> str:
    sizes = sorted(_sizes(call, dims, letter))
    rows = f"{' and '.join(map(str, sizes))} row{'' if sizes == [1] else 's'}"
    if letter in dims.even and not all(map(call.even, sizes)):
        return f"{rows} do not split evenly over {call.size} ranks"
    if (dims.filled == "*" or letter in dims.filled) and not all(map(call.fills, sizes)):
        return f"of {rows} some of {call.size} ranks would have none"
    if len(sizes) != 1:
        return f"its dims have {rows}"
    return "a result would depend on the rows of all ranks"


def _sizes(call: OpCall, dims: Dims, letter: str) -> set[int]:
    """The sizes of the dims of a letter, where it broadcasts without those of 1."""
    present = [*call.operands, *(info for info in call.results if info is not None)]
    labelled = zip(present, [*_operands(call, dims), *_results(call, dims)], strict=True)
    found = {info.shape[d] for info, each in labelled for d, c in enumerate(each.letters) if c == letter}
    return found - {1} if dims.broadcast and len(found) > 1 else found


def limits(dims: Dims) -> Iterator[str]:
    """Limits that labels state besides letters, in words."""
    letters = dims.letters()
    if summed := _among(letters, dims.reduced):
        yield f"{getattr(dims.reduced_as, 'reduce_op', '')} over {summed}"
    if even := _among(letters, dims.even):
        yield f"{even} evenly"
    if filled := "all" if dims.filled == "*" else _among(letters, dims.filled):
        yield f"{filled}: no rank without rows"
    if grouped := _among(letters, dims.grouped):
        yield f"{grouped} in groups"
    if dims.broadcast:
        yield "broadcasts"
    if dims.linear:
        yield f"sums pass through {', or '.join(' + '.join(names) for names in dims.linear)}"
    if dims.moves:
        yield f"any partial passes through {' + '.join(dims.moves)}"


def _among(letters: str, some: str) -> str:
    """Letters of ``some`` that a call has."""
    return " ".join(c for c in some if c in letters)
