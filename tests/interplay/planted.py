"""Faults that were real, planted again: each undoes one mend, in the code as it is today, while its ``with`` lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from passes.analysis import out_variants
from passes.memory import buffers, canonicalize
from passes.regions import form_islands
from passes.update import cut_and_join
from spmd.capture import hyper_conditions, set_data
from spmd.deferral.deferred_update import PendingUpdate
from spmd.micro_batches import follow_the_run
from spmd.partitioner import emit, operand_layouts
from spmd.ranks.watched_mesh import WatchedMesh


def shared_passes() -> Any:
    """The first rank runs passes for all, also where a pass asks which rank this is: two hosts send the same halves."""
    return patch.object(WatchedMesh, "was_asked", False)


def floor_in_kernels() -> Any:
    """Kernels compute quotients that are rounded down: 1.0 // 0.1 is 10."""
    return patch.object(form_islands, "_OTHERWISE", ())


def data_that_is_put_back() -> Any:
    """What shared the memory of ``p.data`` before it was assigned follows the assignment."""
    return patch.object(set_data.SetDataCopies, "_keep_for", lambda self, others: None)


def deferred_data() -> Any:
    """A deferred update does not write to parameters of which it reads nothing, as those that were put back."""
    return patch.object(cut_and_join._Cutter, "_updated", lambda self: set())


def remainder_behind_a_bound() -> Any:
    """A remainder of a sum is printed without parentheses, once its operand is known to be positive."""
    return patch.object(hyper_conditions, "_is_mod", lambda expression: False)


def draw_of_the_last_part() -> Any:
    """What says where a draw begins takes names of other nodes: a shorter last micro-batch has none of it."""
    insert = follow_the_run.insert_before

    def unnamed(*args: Any, name: str = "", **options: Any) -> Any:
        return insert(*args, **options) if name in ("rows_before", "first_row") else insert(*args, name=name, **options)

    return patch.object(follow_the_run, "insert_before", unnamed)


@contextmanager
def planned_layouts() -> Iterator[None]:
    """Whatever has an out variant writes into planned memory, however its kernel takes that to lie."""

    def can_be_planned(node: Any, _layouts: Any) -> bool:
        return out_variants.out_variant(node) is not None

    here, there = (patch.object(each, "can_be_planned", can_be_planned) for each in (buffers, canonicalize))
    with here, there:
        yield


def norms_of_two_layouts() -> Any:
    """The operands of a norm's backward may lie in two ways: each as in eager, or contiguous."""
    lies = operand_layouts.lies
    return patch.object(emit, "lies", lambda val, layout, traced, as_traced: lies(val, layout, traced, True))


def replaced_while_pending() -> Any:
    """A deferred update is of whatever state is there when it is done."""
    return patch.object(PendingUpdate, "replaced", lambda self, tensors: [])


FAULTS: dict[str, Callable[[], Any]] = {
    each.__name__: each
    for each in (
        *(shared_passes, floor_in_kernels, data_that_is_put_back, deferred_data, remainder_behind_a_bound),
        *(draw_of_the_last_part, planned_layouts, norms_of_two_layouts, replaced_while_pending),
    )
}


def planted(fault: str) -> Any:
    """A fault by its name, for the length of a ``with``; none for no name."""
    return FAULTS[fault]() if fault else nullcontext()
