"""The rows of the batch of all ranks that are one rank's own, of prompts, and of what a program computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..ranks.agreed import all_gather

WHAT = "spmd.generate()"


@dataclass(frozen=True)
class Rows:
    """The rows that each of the ranks with different rows has passed; ``index``: of this one among them."""

    counts: tuple[int, ...]
    index: int

    def given(self, whole: Any) -> Any:
        """The part of ``whole`` that belongs to the prompts of this rank; its rows are some for each prompt."""
        if not isinstance(whole, Tensor) or not whole.ndim:
            return whole
        each, first = len(whole) // sum(self.counts), sum(self.counts[: self.index])
        return whole[first * each : (first + self.counts[self.index]) * each].clone()  # of memory for these alone

    def filled(self, whole: Tensor) -> Tensor:
        """All rows, and as many for each rank: the last ones may be copies of a row."""
        missing = -len(whole) % len(self.counts)
        return torch.cat([whole, whole[-1:].expand(missing, *whole.shape[1:])]) if missing else whole

    def computed(self, whole: Tensor) -> Tensor:
        """The rows of ``filled`` that this rank computes."""
        return self.filled(whole).chunk(len(self.counts))[self.index].contiguous()


@dataclass(frozen=True)
class Together:
    """The prompts of all ranks, with their mask, and the state of the random numbers of the first one."""

    rows: Rows
    prompts: Tensor
    mask: Tensor | None
    states: list[str]
    is_first: bool

    @contextmanager
    def random_numbers(self) -> Iterator[None]:
        """Draw what the first rank draws, for the length of the context; the others go on where they were."""
        generators = _generators(self.prompts.device)
        before = [each.get_state() for each in generators]
        for generator, state in zip(generators, self.states, strict=True):
            generator.set_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))
        try:
            yield
        finally:
            if not self.is_first:
                for generator, own in zip(generators, before, strict=True):
                    generator.set_state(own)


def rows_of_all(
    mesh: DeviceMesh, index: int, count: int, prompts: Tensor, mask: Tensor | None, settings: dict[str, str], pad: int
) -> Together:
    """The rows of all ranks.

    ``prompts`` (rows x tokens, int64) and ``mask`` are those of this rank, the ``index``-th of ``count`` with different
    rows. Where ranks have prompts of different lengths, the shorter ones get ``pad`` in front, and a mask.
    Raises ``ValueError`` where ranks would not generate together: other options, a mask on some, other rows on ranks
    that are to pass the same, or different lengths without a mask.
    """
    tokens = [prompts.tolist(), None if mask is None else mask.tolist()]
    states = [each.get_state().numpy().tobytes().hex() for each in _generators(prompts.device)]
    found = all_gather([index, tokens, settings, states], WHAT, mesh)
    if len(found) == 1:  # ranks of a fake process group are as this one
        found = [[k, *found[0][1:]] for k in range(count)]
    by_index: dict[int, Any] = {}
    for rank, (own, each, others, _) in enumerate(found):
        if others != found[0][2]:
            differing = {name for name in {*others, *found[0][2]} if others.get(name) != found[0][2].get(name)}
            raise ValueError(f"expected equal options on all ranks of {WHAT}, got other {', '.join(sorted(differing))}")
        if by_index.setdefault(own, each) != each:
            raise ValueError(
                f"expected ranks that differ along no axis of the batch to pass the same prompts, but rank {rank} of "
                f"the mesh passed {len(each[0])} rows that are not those of another one"
            )
    batches = [by_index[k] for k in range(count)]
    rows = Rows(tuple(len(ids) for ids, _ in batches), index)
    if not sum(rows.counts):
        raise ValueError(f"expected prompts on some rank of {WHAT}, got none")
    longest = max((len(row) for ids, _ in batches for row in ids), default=0)
    if len({each is None for _, each in batches}) > 1:
        raise ValueError(f"expected an attention_mask on all ranks of {WHAT} or on none, got one on some")
    if mask is None and any(len(row) < longest for ids, _ in batches for row in ids):
        lengths = [len(ids[0]) if ids else 0 for ids, _ in batches]
        raise ValueError(
            f"the ranks passed prompts of {lengths} tokens: pass an attention_mask, too, so that the shorter ones can "
            "be padded on the left"
        )
    whole = _padded([ids for ids, _ in batches], longest, pad, prompts)
    masks = None if mask is None else _padded([each for _, each in batches], longest, 0, mask)
    return Together(rows, whole, masks, found[0][3], is_first=not any(mesh.get_coordinate() or ()))


def _generators(device: torch.device) -> list[torch.Generator]:
    """The generators that draw by default: that of the CPU, and of a device."""
    own = [] if device.type == "cpu" else [torch.cuda.default_generators[device.index or 0]]
    return [torch.default_generator, *own]


def _padded(batches: list[list[list[int]]], longest: int, value: int, like: Tensor) -> Tensor:
    rows = [[value] * (longest - len(row)) + row for batch in batches for row in batch]
    return torch.tensor(rows, dtype=like.dtype, device=like.device)
