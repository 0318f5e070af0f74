"""Collectives that a step calls itself: as on the one device for which it is written, each returns what it was given.

Loops for DDP sum losses, counts and gradients over ranks, and gather rows. A compiled step has them whole already:
its losses are those of the whole batch, and its world has one rank. So a collective of all ranks is a copy, or nothing;
none reaches the program. Where a sum is divided by the number of ranks, that number is 1 if the step asks for it, and
one factor too many if it stands somewhere outside: a sum in a step that asks for no number is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from passes.ir.schemas import schema

from ..._torch import (
    TorchDispatchMode,
    autograd_collectives,
    finished_work,
    is_whole_world,
    kind_of_reduction,
    object_collectives,
)
from ...call.refusals import refuse
from ...interpreter.source_lines import user_line
from ..unsupported import Refused

Copies = list[tuple[Tensor, Tensor]]
"""Pairs of a tensor to write into and what to write there."""

_IDEMPOTENT = {"AVG", "MIN", "MAX", "BAND", "BOR"}  # of equal values, that value: however many ranks there are
_SUMS = {"SUM", "PRODUCT", "BXOR"}


class OwnCollectives:
    """The collectives of one run of a step."""

    def __init__(self) -> None:
        self._sum: str | None = None  # the line of the first sum

    def copies(self, func: Any, args: Sequence[Any]) -> Copies | None:
        """The writes of an op of ``c10d`` in a world of one rank; None for an op that has no meaning there."""
        pairs = _PAIRS.get(func.name().removeprefix("c10d::"))
        if pairs is None or not self._takes(args):
            return None
        try:
            return [(out, given.view(out.shape)) for out, given in pairs(*args)]
        except (RuntimeError, ValueError):
            raise Refused(
                f"it calls {func}, whose tensors are not those of one rank. A step is written as for one device that "
                "holds the whole batch: torch.distributed.get_world_size() is 1 in it, and so is the number of "
                "tensors that a collective gathers. Ask for it in the step, or leave the collective out."
            ) from None

    def note_reduction(self, op: Any) -> bool:
        """Note that values are reduced over ranks; whether they are as they were then."""
        kind = kind_of_reduction(op)
        if kind in _SUMS and self._sum is None:
            self._sum = user_line(sys._getframe(1))
        return kind in _IDEMPOTENT | _SUMS

    def check_end(self, asked_size: bool) -> None:
        """Raise ``Refused`` if the step has summed over ranks and has not asked for their number."""
        if self._sum is not None and not asked_size:
            refuse(
                Refused,
                "it sums over the ranks, but a compiled step is written as for one device that holds the whole batch, "
                f"and its values are sums already ({self._sum}). If it divides by a number of ranks from outside, that "
                "would be one factor too many. Leave the sum out, use ReduceOp.AVG, or divide by "
                "torch.distributed.get_world_size(), which is 1 in a step.",
            )

    def _takes(self, args: Sequence[Any]) -> bool:
        """Whether the group is of all ranks, and the reduction, if there is one, leaves equal values as they are."""
        objects = [each for each in args if isinstance(each, torch.ScriptObject)]
        return is_whole_world(objects[0]) and all(map(self.note_reduction, objects[1:]))

    @contextmanager
    def with_autograd(self) -> Iterator[None]:
        """Let the functions of ``torch.distributed.nn`` be those of a world of one rank, with their gradients.

        Functions that send Python objects are refused.
        """

        def refuse_objects(*_: Any) -> NoReturn:
            raise Refused(f"it sends a Python object to other ranks (all_gather_object and the like). {LEAVE_OUT}")

        def reduced(op: Any, group: Any, *tensors: Tensor) -> Tensor:
            if not (is_whole_world(group) and self.note_reduction(op)):
                raise Refused(f"it reduces over a group of some ranks, or by {op}. {LEAVE_OUT}")
            return tensors[-1].clone()

        def gathered(group: Any, tensor: Tensor) -> tuple[Tensor, ...]:
            if not is_whole_world(group):
                raise Refused(f"it gathers over a group of some ranks. {LEAVE_OUT}")
            return (tensor.clone(),)

        def exchanged(group: Any, outs: Sequence[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
            if len(outs) > 1 or len(tensors) > 1:
                raise Refused(f"it exchanges a tensor with each of several ranks. {LEAVE_OUT}")
            return gathered(group, *tensors)

        bodies: dict[str, Callable[..., Any]] = {
            "_AllReduce": reduced,
            "_AllGather": gathered,
            "_AlltoAll": exchanged,
            "_Reduce": lambda source, op, group, tensor: reduced(op, group, tensor),
            "_Broadcast": lambda source, group, tensor: gathered(group, tensor)[0],
        }
        with object_collectives(refuse_objects), autograd_collectives(bodies):
            yield


LEAVE_OUT = (
    "A compiled step is written as for one device that holds the whole batch, and spmd adds the communication. Leave "
    "it out."
)


class OnOneDevice(TorchDispatchMode):
    """Runs the collectives of a plain step as in a world of one rank."""

    def __init__(self, collectives: OwnCollectives) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._collectives = collectives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copies = self._collectives.copies(func, args) if func.namespace == "c10d" else None
        if copies is None:
            return func(*args, **(kwargs or {}))
        for out, given in copies:
            out.copy_(given)
        return result_of(func, args)


def result_of(func: Any, args: Sequence[Any]) -> Any:
    """The returns of an op of ``c10d`` that is done: its first argument and a handle, or one of these, or nothing."""
    returns = len(schema(func).results)
    return (args[0], finished_work()) if returns == 2 else finished_work() if returns else None


def _nothing(*_: Any) -> Copies:
    return []


def _one(out: Tensor, given: Tensor, *_: Any) -> Copies:
    return [(out, given)]


def _each(outs: Sequence[Tensor], given: Sequence[Tensor], *_: Any) -> Copies:
    return list(zip(outs, given, strict=True))


def _gathered(outs: Sequence[Sequence[Tensor]], given: Sequence[Tensor], *_: Any) -> Copies:
    return [(out, each) for (out,), each in zip(outs, given, strict=True)]


def _scattered(outs: Sequence[Tensor], given: Sequence[Sequence[Tensor]], *_: Any) -> Copies:
    return [(out, each) for out, (each,) in zip(outs, given, strict=True)]


def _all_to_all(outs: Sequence[Tensor], given: Sequence[Tensor], *_: Any) -> Copies:
    (out,), (each,) = outs, given
    return [(out, each)]


def _all_to_all_single(
    out: Tensor, given: Tensor, _: Any, outs: Sequence[int], sizes: Sequence[int], *__: Any
) -> Copies:
    if len(outs) > 1 or len(sizes) > 1:
        raise ValueError("a size for each of several ranks")
    return [(out, given)]


_PAIRS: dict[str, Callable[..., Copies]] = {
    "allreduce_": _nothing,
    "allreduce_coalesced_": _nothing,
    "reduce_": _nothing,
    "broadcast_": _nothing,
    "barrier": _nothing,
    "monitored_barrier_": _nothing,
    "allgather_": _gathered,
    "allgather_coalesced_": _gathered,
    "allgather_into_tensor_coalesced_": _each,
    "_allgather_base_": _one,
    "reduce_scatter_": _scattered,
    "reduce_scatter_tensor_coalesced_": _each,
    "_reduce_scatter_base_": _one,
    "alltoall_": _all_to_all,
    "alltoall_base_": _all_to_all_single,
}
