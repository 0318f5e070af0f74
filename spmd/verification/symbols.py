"""What stands for an element when a program is certified: a point of a finite field instead of a number.

Two programs that compute the same function agree at every point, without rounding, whatever the order of sums and
products; two that do not agree at a random point with a probability of 2**-62 an element. Sums, products and quotients
are those of the field, any other function of an element is a hash of its arguments. Two residues are packed in 62 bits.

An element is a complex number of 128 bits, of which torch only ever moves the bits: its symbol, and a mask of the mesh
axes over which the ranks' values are still to be summed. So views, copies and planned memory are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from hashlib import blake2b
from math import isfinite
from typing import Any

import torch
from torch import Tensor

_PRIME = 2**31 - 1
_ODD = (0x1B873593CC9E2D51, 0x2545F4914F6CDD1D)  # any odd numbers of 61 bits


def key(*of: Any) -> int:
    """A symbol for something that is no tensor: an op's name, a setting."""
    digest = int.from_bytes(blake2b(repr(of).encode(), digest_size=8).digest(), "big")
    return ((digest >> 33) % _PRIME << 31) | (digest & 0xFFFFFFFF) % _PRIME


def number(value: float) -> int:
    """The symbol of a plain number: its fraction, in the field."""
    if not isfinite(value):
        return key("number", value)
    fraction = Fraction(value)
    residue = fraction.numerator * pow(fraction.denominator, -1, _PRIME) % _PRIME
    return (residue << 31) | residue


def pieces(x: Tensor) -> tuple[Tensor, Tensor]:
    """The symbols of a tensor of elements, and the masks: views of its memory."""
    both = torch.view_as_real(x).view(torch.int64)
    return both[..., 0], both[..., 1]


def elements(symbols: Tensor, masks: Tensor | int = 0) -> Tensor:
    """A new tensor of elements."""
    symbols = torch.as_tensor(symbols)
    filled = torch.broadcast_to(torch.as_tensor(masks), symbols.shape)
    return torch.view_as_complex(torch.stack([symbols, filled], -1).view(torch.float64))


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
    return (torch.remainder(first, _PRIME) << 31) | torch.remainder(second, _PRIME)


def _lanes(x: Tensor) -> tuple[Tensor, Tensor]:
    return x >> 31, x & 0x7FFFFFFF


def _lanewise(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def both(x: Tensor, y: Tensor) -> Tensor:
        (a, b), (c, d) = _lanes(x), _lanes(y)
        return _packed(function(a, c), function(b, d))

    return both


plus = _lanewise(torch.add)
minus = _lanewise(torch.sub)
times = _lanewise(torch.mul)


def inverse(x: Tensor) -> Tensor:
    """1 / x; of zero a symbol of its own."""
    result, power, left = torch.tensor(number(1)), x, _PRIME - 2
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
"""What the ops mean that are sums, products and quotients of elements, by name."""


def fused_adam(
    param: Tensor, grad: Tensor, avg: Tensor, square: Tensor, step: Tensor, given: dict[str, Tensor], decoupled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The new parameter and moments of torch's fused Adam, whose ``step`` is counted already."""
    lr, one, two = given["lr"], given["beta1"], given["beta2"]
    decay = given["weight_decay"]
    grad = minus(torch.tensor(0), grad) if int(given["maximize"]) else grad
    if decoupled:
        param = minus(param, times(times(lr, decay), param))
    else:
        grad = plus(grad, times(decay, param))
    avg = ARITHMETIC["lerp"](avg, grad, minus(_ONE, one))
    square = plus(times(square, two), times(minus(_ONE, two), times(grad, grad)))
    first, second = minus(_ONE, power(one, step)), minus(_ONE, power(two, step))
    scaled = plus(over(power(square, _HALF), power(second, _HALF)), given["eps"])
    return minus(param, times(over(lr, first), over(avg, scaled))), avg, square
