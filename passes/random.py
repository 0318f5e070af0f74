"""Random ops as functions of a seed, so that shards draw different numbers and replicas equal ones."""

from __future__ import annotations

from typing import Any

import torch


def draw(op: Any, seed: int, number: int, shard: int, *args: Any, **kwargs: Any) -> Any:
    """Run the random ``op`` with a generator that depends on nothing but ``(seed, number, shard)``.

    ``number`` tells the random ops of a program apart, ``shard`` the parts of a split tensor; replicas of a part have
    the same ``shard``. The default generator of the device is left as it was.
    """
    generator = _default_generator(args, kwargs)
    state = generator.get_state()
    generator.manual_seed(_mix(_mix(_mix(0, int(seed)), number), shard))
    try:
        return op(*args, **kwargs)
    finally:
        generator.set_state(state)


def _default_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
    device = next((a.device for a in args if isinstance(a, torch.Tensor)), None) or torch.device(
        kwargs.get("device") or "cpu"
    )
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _mix(state: int, value: int) -> int:
    """One round of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014)."""
    mask = (1 << 64) - 1
    z = (state ^ value) + 0x9E3779B97F4A7C15 & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)
