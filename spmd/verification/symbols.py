"""Symbols for the elements of a program that is certified: a point of a finite field instead of a number.

Two programs that compute the same function agree at every point, without rounding, whatever the order of sums and
products; two that do not agree at a random point with a probability of 2**-62 an element. Sums, products and quotients
are those of the field, any other function of an element is a hash of its arguments. Two residues are packed in 62 bits.

An element is a complex number of 128 bits, of which torch only ever moves the bits: its symbol, and its marks. These
are the mesh axes over which the ranks' values are still to be reduced, by a bit for each axis and reduction, the dtype,
and which byte of the value it is, in planned memory. So views, copies and planned memory are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from hashlib import blake2b
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from .._torch import tree_flatten

PRIME = 2**31 - 1
"""The size of the field."""
_ODD = (0x1B873593CC9E2D51, 0x2545F4914F6CDD1D)  # any odd numbers of 61 bits

REDUCTIONS = ("sum", "max", "min")
AXES = 8  # the bits of a reduction
_DTYPE, _BYTE = 32, 48  # where the marks have the dtype, and the number of the byte
PENDING = (1 << AXES * len(REDUCTIONS)) - 1
"""The marks of what is still to be reduced."""
UNKNOWN = 1 << 31
"""The mark of what was computed from values that are not shown."""
ADDEND = 1 << 29
"""The mark of what was computed from some ranks' addends of a sum (``symbolic/addends.py``)."""
DOUBT = UNKNOWN | ADDEND
"""The marks of what is not shown."""
LOGARITHM = 1 << 30
"""The mark of a logarithm: its symbol is that of the number it is the logarithm of."""
_DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES, 1)}
_sent_in = ContextVar[Collection[torch.dtype]]("sent_in", default=())  # dtypes to which rounding changes no symbol


def key(*of: Any) -> int:
    """A symbol for something that is no tensor: an op's name, a setting."""
    digest = int.from_bytes(blake2b(repr(of).encode(), digest_size=8).digest(), "big")
    return ((digest >> 33) % PRIME << 31) | (digest & 0xFFFFFFFF) % PRIME


def number(value: float) -> int:
    """The symbol of a plain number: its fraction, in the field."""
    if not isfinite(value):
        return key("number", value)
    fraction = Fraction(value)
    residue = fraction.numerator * pow(fraction.denominator, -1, PRIME) % PRIME
    return (residue << 31) | residue


# Up to which whole number a dtype has all.
_EXACT = {torch.bfloat16: 2**8, torch.float16: 2**11}
_EXACT |= dict.fromkeys((torch.float32, torch.float64, torch.int32, torch.int64), 2**24)
UNWRITTEN = key("memory without a value")


def pieces(x: Tensor) -> tuple[Tensor, Tensor]:
    """The symbols of a tensor of elements, and the marks: views of its memory."""
    both = torch.view_as_real(x).view(torch.int64)
    return both[..., 0], both[..., 1]


def elements(symbols: Tensor, marks: Tensor | int) -> Tensor:
    """A new tensor of elements."""
    filled = torch.broadcast_to(torch.as_tensor(marks), symbols.shape)
    return torch.view_as_complex(torch.stack([symbols, filled], -1).view(torch.float64))


def pending(axis: int, reduction: str) -> int:
    """The mark of values that are still to be reduced over an axis."""
    return 1 << (axis + AXES * REDUCTIONS.index(reduction))


def is_pending(marks: Tensor, axis: int) -> bool:
    """Whether some of these marks are of values that are still to be reduced over an axis."""
    return bool((marks & sum(pending(axis, each) for each in REDUCTIONS)).any())


def mark_of(dtype: torch.dtype) -> int:
    """The mark of a dtype."""
    return _CODES[dtype] << _DTYPE


def byte(number: int) -> int:
    """The mark of a byte of a value behind the first one."""
    return number << _BYTE


def dtype_of(x: Tensor) -> torch.dtype | None:
    """The dtype that all elements are marked with; None if there is none such."""
    codes = (pieces(x)[1] >> _DTYPE) & 0xFFFF
    first = int(codes.reshape(-1)[0]) if codes.numel() else 0
    return _DTYPES[first - 1] if first and bool((codes == first).all()) else None


def is_unknown(x: Tensor) -> bool:
    """Whether some element was computed from values that are not shown."""
    return bool((pieces(x)[1] & DOUBT).any())


def as_pending(x: Tensor, pending: Tensor, sizes: Sequence[int]) -> Tensor:
    """Elements as addends of a sum that is pending, too: what all ranks have, their sum has as many times."""
    found, marks, pending = torch.broadcast_tensors(*pieces(x), pending)
    for axis, size in enumerate(sizes):
        missing = (pending & ~marks) >> axis & 1
        found = torch.where(missing.bool(), times(found, torch.tensor(number(size))), found)
    return elements(found, marks | pending)


def with_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Elements as a value of another dtype: rounding is a function of an element."""
    before = dtype_of(x)
    casts = before != dtype and before is not None
    found, marks = pieces(without_logarithms(x) if casts else x)
    found = cast(found, dtype, before) if casts else found
    return elements(found, (marks & (PENDING | DOUBT | LOGARITHM)) | mark_of(dtype))


def without_logarithms(x: Tensor) -> Tensor:
    """Elements of which each has a symbol of its own: a logarithm is a function as any other."""
    found, marks = pieces(x)
    if not bool((marks & LOGARITHM).any()):
        return x
    return elements(torch.where(marks & LOGARITHM > 0, hashed(key("log"), found), found), marks & ~LOGARITHM)


@contextmanager
def sent_in(dtypes: Collection[torch.dtype]) -> Iterator[None]:
    """Take values for what they are before a cast to floats of these dtypes, in which a user lets ranks send them."""
    token = _sent_in.set(dtypes)
    try:
        yield
    finally:
        _sent_in.reset(token)


def only_rounds(dtype: torch.dtype, before: torch.dtype | None) -> bool:
    """Whether a cast does no more than what ``sent_in`` lets be."""
    floats = dtype.is_floating_point and (before is None or before.is_floating_point)
    return floats and not {dtype, before}.isdisjoint(_sent_in.get())


def cast(found: Tensor, dtype: torch.dtype, before: torch.dtype | None = None) -> Tensor:
    """Symbols of values that were of another dtype, ``before``; a whole number of few digits stays what it is."""
    if only_rounds(dtype, before):
        return found
    exact = whole_numbers(found).abs() <= _EXACT.get(dtype, -1)
    return torch.where(exact, found, hashed(key("_to_copy", str(dtype)), found))


def of_values(x: Tensor) -> Tensor:
    """The elements of a constant: each is the symbol of its number."""
    x = x.detach().cpu()
    if x.is_complex():
        return elements(
            hashed(key("complex"), *(pieces(of_values(x.real))[0], pieces(of_values(x.imag))[0])), mark_of(x.dtype)
        )
    exact = x.double() if x.is_floating_point() else x.to(torch.int64)
    if not x.is_floating_point():
        found = torch.remainder(exact, PRIME)
        return elements(found << 31 | found, mark_of(x.dtype))
    mantissa, exponent = torch.frexp(exact)
    whole = torch.remainder(torch.nan_to_num(mantissa * 2**53, 0, 0, 0).to(torch.int64), PRIME)
    found = torch.remainder(whole * (1 << torch.remainder(exponent.long() - 53, 31)), PRIME)  # 2**31 is 1
    infinite = torch.tensor([key("number", each) for each in (float("inf"), float("-inf"), float("nan"))])
    found = found << 31 | found
    for symbol, these in zip(infinite, (exact == float("inf"), exact == float("-inf"), exact.isnan()), strict=True):
        found = torch.where(these, symbol, found)
    return elements(found, mark_of(x.dtype))


def symbol(given: Any) -> Tensor:
    """The symbols of what an op is given: elements, a number, a setting."""
    if isinstance(given, Tensor):
        return pieces(given)[0] if given.dtype == torch.complex128 else given
    is_number = isinstance(given, (int, float))
    return torch.tensor(number(given) if is_number else key("setting", str(given)))


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of elements in a value."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor) and leaf.dtype == torch.complex128]


def hashed(start: int, *of: Tensor) -> Tensor:
    """A function of symbols, element by element, which only equals itself."""
    total = torch.tensor(start)
    for each in of:
        total = _mixed(total * _ODD[0] + each)
    return _packed((total >> 33) & 0x7FFFFFFF, total & 0x7FFFFFFF)


def digest(symbols: Tensor) -> Tensor:
    """One symbol for a whole tensor."""
    flat = symbols.reshape(-1)
    total = _mixed(flat * _ODD[0] + torch.arange(len(flat)) * _ODD[1]).sum()
    return hashed(key(tuple(symbols.shape)), total)


def numbered(start: Tensor, shape: Sequence[int]) -> Tensor:
    """Symbols for the elements of an op's result, of which nothing is known but the op and its operands."""
    places = torch.arange(max(1, int(torch.Size(shape).numel()))).narrow(0, 0, int(torch.Size(shape).numel()))
    return hashed(key("element"), start, places).reshape(tuple(shape))


def _mixed(x: Tensor) -> Tensor:
    for odd in _ODD:
        x = (x ^ (x >> 32)) * odd
    return x ^ (x >> 29)


def _packed(first: Tensor, second: Tensor) -> Tensor:
    return (torch.remainder(first, PRIME) << 31) | torch.remainder(second, PRIME)


def _lanes(x: Tensor) -> tuple[Tensor, Tensor]:
    return x >> 31, x & 0x7FFFFFFF


def _lanewise(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def both(x: Tensor, y: Tensor) -> Tensor:
        (a, b), (c, d) = _lanes(x), _lanes(y)
        return _packed(function(a, c), function(b, d))

    return both


def _products(x: Tensor, y: Tensor) -> Tensor:
    """The sums of products of one lane, by matrix products of halves in floats, which hold each sum of them exactly."""
    (x0, x1), (y0, y1) = (((each & 0xFFFF).double(), (each >> 16).double()) for each in (x, y))
    low, middle, high = (torch.remainder(p.long(), PRIME) for p in (x0 @ y0, x0 @ y1 + x1 @ y0, x1 @ y1))
    return low + torch.remainder(middle << 16, PRIME) + (high << 1)  # 2**32 is 2


def lane(x: Tensor, k: int) -> Tensor:
    """The first or the second residues of symbols."""
    return _lanes(x)[k]


def of_lanes(first: Tensor, second: Tensor) -> Tensor:
    """Symbols of two residues each, which may be larger than the prime."""
    return _packed(first, second)


def whole_numbers(x: Tensor) -> Tensor:
    """The whole number, perhaps negative, that each symbol may stand for; of one that does not, a very large one."""
    first, second = _lanes(x)
    number = torch.where(first > PRIME // 2, first - PRIME, first)
    return torch.where(first == second, number, PRIME)


plus = _lanewise(torch.add)
minus = _lanewise(torch.sub)
times = _lanewise(torch.mul)
matmul = _lanewise(_products)  # of up to 2**19 summands


def total(x: Tensor, dim: int) -> Tensor:
    """The sums along a dim."""
    first, second = (lane.sum(dim) for lane in _lanes(x))
    return _packed(first, second)


def inverse(x: Tensor) -> Tensor:
    """1 / x; of zero a symbol of its own."""
    result, power, left = torch.tensor(number(1)), x, PRIME - 2
    while left:
        result = times(result, power) if left & 1 else result
        power, left = times(power, power), left >> 1
    return torch.where(x == 0, torch.tensor(key("1 / 0")), result)


def power(x: Tensor, exponent: Tensor) -> Tensor:
    """``x ** exponent``: products for a square, else a hash."""
    squared = exponent.numel() == 1 and int(exponent) == number(2)
    return times(x, x) if squared else hashed(key("pow"), *torch.broadcast_tensors(x, exponent))


def over(x: Tensor, y: Tensor) -> Tensor:
    """X / y."""
    return times(x, inverse(y))


_ONE = torch.tensor(number(1))
_HALF = torch.tensor(number(0.5))

ARITHMETIC: dict[str, Callable[..., Tensor]] = {
    "add": lambda x, y, alpha=_ONE: plus(x, times(y, alpha)),
    "sub": lambda x, y, alpha=_ONE: minus(x, times(y, alpha)),
    "rsub": lambda x, y, alpha=_ONE: minus(y, times(x, alpha)),
    "mul": times,
    "div": over,
    "truediv": over,
    "neg": lambda x: minus(torch.tensor(0), x),
    "reciprocal": inverse,
    "square": lambda x: times(x, x),
    "pow": power,
    "sqrt": lambda x: power(x, _HALF),
    "rsqrt": lambda x: inverse(power(x, _HALF)),
    "addcmul": lambda x, y, z, value=_ONE: plus(x, times(value, times(y, z))),
    "addcdiv": lambda x, y, z, value=_ONE: plus(x, times(value, over(y, z))),
    "lerp": lambda x, end, weight: plus(x, times(weight, minus(end, x))),
}
"""Symbolic semantics of the ops that are sums, products and quotients of elements, by name."""
