"""Random ops as functions of a seed, so that shards draw different numbers and replicas equal ones.

``draw`` runs one random op on one region of a tensor. What it draws depends on the seed of the call, the number of the
op and the position of the region, in one of two ways:

- by default, torch's own kernel runs with a generator seeded by the three: as fast as eager, and a tensor that is split
  differently gets other numbers;
- with a seed that has the bit ``BY_POSITION``, each element depends only on the seed, the op and the element's position
  in the whole tensor, however that is split. Its bits are those at this position of the SplitMix64 sequence.

A seed that is a tensor on an accelerator is never read by the host: all numbers are by position, whatever its bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import SpmdError

aten = torch.ops.aten
Region = Sequence[tuple[int, int, int]]
"""A region of a tensor: for each dim, or factor of a dim, its first index, its length and the length of the whole."""

BY_POSITION = 1 << 62
_MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def draw(op: Any, seed: int | torch.Tensor, number: int, region: Region, *args: Any, **kwargs: Any) -> Any:
    """Run the random ``op`` on one region of a tensor; the same arguments give the same numbers.

    ``number`` distinguishes the random ops of a program; replicas have the same ``region``. The default generator of
    the device is left as it was. Raises ``SpmdError`` where ``seed`` asks for numbers by position, the tensor is split,
    and the op has no implementation by position.
    """
    if isinstance(seed, torch.Tensor) and seed.device.type != "cpu":
        return draw_from_tensor(op, seed, number, region, *args, **kwargs)
    key = mix(mix(0, int(seed)), number)
    if int(seed) & BY_POSITION and op in _DRAWN_BY_POSITION:
        return _DRAWN_BY_POSITION[op](_Bits(key, region), *args, **kwargs)
    for start, *_ in region:
        key = mix(key, start)
    generator = default_generator(device_of(args, kwargs))
    state = generator.get_state()
    generator.manual_seed(key)
    try:
        result = op(*args, **kwargs)
    finally:
        generator.set_state(state)
    if int(seed) & BY_POSITION:
        _check_whole(op, region)
    return result


def is_drawn_by_position(op: Any) -> bool:
    """Whether the numbers of an op can depend on their global position alone."""
    return op in _DRAWN_BY_POSITION


def draw_from_tensor(op: Any, seed: torch.Tensor, number: int, region: Region, *args: Any, **kwargs: Any) -> Any:
    """Numbers by position, of a seed that only its device knows; raises ``SpmdError`` for an op that has none."""
    if not is_drawn_by_position(op):
        raise SpmdError(
            f"expected an op whose numbers can depend on their global position alone, since the seed is read from the "
            f"device, but {op} draws with a kernel of its own: use an implementation in simpler ops, or leave the seed "
            "out of DeviceNumbers(names=...)"
        )
    return _DRAWN_BY_POSITION[op](_Bits(_mixed(_mixed(seed, 0), number), region), *args, **kwargs)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that ops on ``device`` draw from when they are given none."""
    if device.type == "cuda" and torch.cuda.default_generators:
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def device_of(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    """The device that a random op draws on."""
    tensors = (a for a in args if isinstance(a, torch.Tensor))
    return next((t.device for t in tensors), None) or torch.device(kwargs.get("device") or "cpu")


def mix(state: int, value: int) -> int:
    """One round of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014)."""
    z = (state ^ value) + _GOLDEN & _MASK
    z = (z ^ (z >> 30)) * _FIRST & _MASK
    z = (z ^ (z >> 27)) * _SECOND & _MASK
    return z ^ (z >> 31)


def _mixed(state: torch.Tensor, value: int) -> torch.Tensor:
    """``mix`` of a state that is an int64 tensor without dims."""
    z = (state ^ _signed(value & _MASK)) + _signed(_GOLDEN)
    z = (z ^ _shifted(z, 30)) * _signed(_FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(_SECOND)
    return z ^ _shifted(z, 31)


def _check_whole(op: Any, region: Region) -> None:
    if any(length != size for _, length, size in region):
        raise SpmdError(
            f"expected an op whose numbers can depend on their global position alone, since spmd.seed was called with "
            f"invariant=True, but {op} draws with a kernel of its own on a tensor that is split: use an implementation "
            "in simpler ops (for attention, SDPBackend.MATH), or call spmd.seed without invariant"
        )


@dataclass(frozen=True)
class _Bits:
    """64 random bits for each element of a region, as functions of its position in the whole tensor."""

    key: int | torch.Tensor
    region: Region

    def bits(self, like: torch.Tensor) -> torch.Tensor:
        """The bits as int64, in the shape of ``like``: SplitMix64 with seed ``key``, at the flat global index."""
        z = self._positions(like).mul_(_signed(_GOLDEN))
        z.add_(self.key if isinstance(self.key, torch.Tensor) else _signed(self.key))
        z.bitwise_xor_(_shifted(z, 30)).mul_(_signed(_FIRST))
        z.bitwise_xor_(_shifted(z, 27)).mul_(_signed(_SECOND))
        return z.bitwise_xor_(_shifted(z, 31))

    def unit(self, like: torch.Tensor) -> torch.Tensor:
        """Uniform in [0, 1), in the dtype of ``like``, with as many digits as the dtype has."""
        digits = min(53, round(-math.log2(torch.finfo(like.dtype).eps)) + 1)
        return (_shifted(self.bits(like), 64 - digits).double() * 2.0**-digits).to(like.dtype)

    def open(self, like: torch.Tensor) -> torch.Tensor:
        """Uniform in (0, 1), both ends excluded, in fp64."""
        return (_shifted(self.bits(like), 12).double() + 0.5) * 2.0**-52

    def normal(self, like: torch.Tensor) -> torch.Tensor:
        """Standard normal, in fp64: the inverse of its distribution function at a uniform number."""
        normal: torch.Tensor = torch.special.ndtri(self.open(like))
        return normal

    def integers(self, like: torch.Tensor, low: int, high: int) -> torch.Tensor:
        """Uniform in [low, high), as int64."""
        return _shifted(self.bits(like), 1).remainder_(high - low).add_(low)

    def _positions(self, like: torch.Tensor) -> torch.Tensor:
        flat = torch.zeros((), dtype=torch.int64, device=like.device)
        for start, length, size in self.region:
            flat = flat.unsqueeze(-1) * size + torch.arange(start, start + length, device=like.device)
        return flat.reshape(like.shape) + 1


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    return value - (1 << 64) if value >> 63 else value


def _shifted(z: torch.Tensor, by: int) -> torch.Tensor:
    """A logical shift to the right; torch's own keeps the sign."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)


def _in(like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``values`` in the dtype and the memory layout of ``like``."""
    return torch.empty_like(like).copy_(values)


def _sized(value: Callable[..., torch.Tensor], plain: int) -> Callable[..., torch.Tensor]:
    """For ops that take a size, after ``plain`` other arguments, which ``value(bits, empty, *plain)`` gets."""

    def drawn(bits: _Bits, *args: Any, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> torch.Tensor:
        if dtype is None:
            dtype = torch.int64 if plain else torch.get_default_dtype()
        empty = torch.empty(args[plain], dtype=dtype, device=device)
        return _in(empty, value(bits, empty, *args[:plain]))

    return drawn


def _like(value: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """For ops that take a tensor; ``value(bits, empty, *args, **kwargs)`` gets all other arguments."""

    def drawn(
        bits: _Bits,
        x: torch.Tensor,
        *args: Any,
        dtype: torch.dtype | None = None,
        device: Any = None,
        memory_format: torch.memory_format = torch.preserve_format,
        generator: None = None,
        layout: Any = None,
        pin_memory: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        empty = torch.empty_like(x, dtype=dtype, device=device, memory_format=memory_format)
        return _in(empty, value(bits, empty, *args, **kwargs))

    return drawn


def _uniform(b: _Bits, x: torch.Tensor, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    return b.unit(x) * (high - low) + low


def _normal(b: _Bits, x: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    return b.normal(x) * std + mean


def _bernoulli(b: _Bits, x: torch.Tensor, p: float = 0.5) -> torch.Tensor:
    return b.open(x) < p


def _exponential(b: _Bits, x: torch.Tensor, lambd: float = 1.0) -> torch.Tensor:
    return b.open(x).log().div(-lambd)


def _geometric(b: _Bits, x: torch.Tensor, p: float) -> torch.Tensor:
    return b.open(x).log().div(math.log1p(-p)).ceil() if p < 1 else torch.ones_like(x)


def _log_normal(b: _Bits, x: torch.Tensor, mean: float = 1.0, std: float = 2.0) -> torch.Tensor:
    return (b.normal(x) * std + mean).exp()


def _cauchy(b: _Bits, x: torch.Tensor, median: float = 0.0, sigma: float = 1.0) -> torch.Tensor:
    return median + sigma * torch.tan(math.pi * (b.open(x) - 0.5))


def _randint(b: _Bits, x: torch.Tensor, *ends: int) -> torch.Tensor:
    low, high = (0, *ends)[-2:]
    return b.integers(x, low, high)


def _random(b: _Bits, x: torch.Tensor, *ends: int | None) -> torch.Tensor:
    """``random_``: without an end, up to the largest integer that the dtype holds with all smaller ones."""
    low, high = (0, *ends, None)[:2] if len(ends) < 2 else ends
    if high is None and x.dtype.is_floating_point:
        high = round(2 / torch.finfo(x.dtype).eps) + 1
    elif high is None:
        high = min(int(torch.iinfo(x.dtype).max), (1 << 63) - 2) + 1
    return b.integers(x, low or 0, high)


def _bernoulli_of(bits: _Bits, p: torch.Tensor, generator: None = None) -> torch.Tensor:
    return _in(p, bits.open(p) < p)


def _native_dropout(
    bits: _Bits, x: torch.Tensor, p: float, train: bool | None = True
) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = torch.empty_like(x, dtype=torch.bool).copy_(bits.open(x) >= p)
    return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask


_DRAWN_BY_POSITION: dict[Any, Callable[..., Any]] = {
    aten.rand.default: _sized(_uniform, 0),
    aten.randn.default: _sized(_normal, 0),
    aten.randint.default: _sized(_randint, 1),
    aten.randint.low: _sized(_randint, 2),
    aten.rand_like.default: _like(_uniform),
    aten.randn_like.default: _like(_normal),
    aten.randint_like.default: _like(_randint),
    aten.randint_like.low_dtype: _like(_randint),
    aten.uniform.default: _like(_uniform),
    aten.normal_functional.default: _like(_normal),
    aten.bernoulli.p: _like(_bernoulli),
    aten.exponential.default: _like(_exponential),
    aten.geometric.default: _like(_geometric),
    aten.log_normal.default: _like(_log_normal),
    aten.cauchy.default: _like(_cauchy),
    aten.random.default: _like(_random),
    getattr(aten.random, "from"): _like(_random),
    aten.random.to: _like(_random),
    aten.bernoulli.default: _bernoulli_of,
    aten.native_dropout.default: _native_dropout,
}
