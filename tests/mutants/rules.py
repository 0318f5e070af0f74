"""Wrong versions of rules: what one would claim with another placement of a result, or another rank's program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import Partial, Shard

from passes import Axis, Mesh
from spmd.placements import Interleaved
from spmd.rules import Option, R, S, localize_of, parts_of
from tests.spmd.rules.engine import Sample, call_of, flat

SIZE = 2  # ranks


def tells(whole: torch.Tensor | None) -> bool:
    """Whether values of a result tell a wrong part from a right one: they are there, and are not all the same."""
    if whole is None or whole.is_meta or not whole.any():
        return False
    return whole.numel() == 1 or bool((whole != whole.reshape(-1)[0]).any())


def dropped(sample: Sample, option: Option) -> Iterator[Option]:
    """A reduction over ranks is dropped: one rank's addend is taken for the whole."""
    yield from _with(sample, option, lambda placement, _: [R] if isinstance(placement, Partial) else [])


def swapped(sample: Sample, option: Option) -> Iterator[Option]:
    """A result is claimed to be split along another of its dims. A program of the option's own would split it so."""
    if not _is_free(sample, option):
        yield from _with(
            sample, option, lambda p, x: [S(d) for d in range(x.ndim) if S(d) != p] if isinstance(p, Shard) else []
        )


def stale(sample: Sample, option: Option) -> Iterator[Option]:
    """A part is taken for the whole, as if its rows had been gathered. A factory would make the whole."""
    for k, placement in enumerate(option.results):
        if isinstance(placement, Shard) and not _is_free(sample, option):
            yield replace(option, results=(*option.results[:k], R, *option.results[k + 1 :]))


def other_rank(sample: Sample, option: Option) -> Iterator[Option]:
    """A rank's program is that of the next one."""
    if option.local is None or not sample.values or not any(map(tells, _results(sample))):
        return
    local, call = option.local, call_of(sample, SIZE, _results(sample))

    def of_next(run: Any, _: Any, args: Any, *__: Any) -> Any:
        run.rank = (run.rank + 1) % SIZE
        mesh = Mesh((Axis("ranks", SIZE, "ranks", run.rank),))
        operands = parts_of(call.operands, [(each,) for each in option.operands], mesh)
        return local(run, call, args, operands, parts_of(call.results, [(each,) for each in option.results], mesh))

    yield replace(option, local=of_next)


def claimed(sample: Sample) -> Option:
    """An option for an op that has none: all is split along its first dim."""
    call = call_of(sample, SIZE, _results(sample))
    return Option((S(0),) * len(call.operands), tuple(S(0) if each is not None else None for each in call.results))


def _is_free(sample: Sample, option: Option) -> bool:
    """Whether a rank computes whatever part is asked for, so that a claim of another part is right, too."""
    return option.local is not None or localize_of(sample.op) is not None


def _results(sample: Sample) -> list[torch.Tensor | None]:
    return flat(sample.op(*sample.args, **sample.kwargs))


def _with(sample: Sample, option: Option, others: Callable[[Any, torch.Tensor], list[Any]]) -> Iterator[Option]:
    """The option with another placement of one result, whose values tell."""
    for k, (placement, whole) in enumerate(zip(option.results, _results(sample), strict=True)):
        if sample.values and whole is not None and tells(whole) and not isinstance(placement, Interleaved):
            for other in others(placement, whole):
                yield replace(option, results=(*option.results[:k], other, *option.results[k + 1 :]))


OPERATORS: tuple[Callable[[Sample, Option], Iterator[Option]], ...] = (dropped, swapped, stale, other_rank)
