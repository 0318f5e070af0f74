"""Recover state after a call that failed while it was written: all ranks get that of a rank whose state is whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

import torch

from passes import SpmdError
from passes.ir.program import is_pending, is_sharded

from .._torch import local_tensor
from ..call.call import Call
from ..call.refuse_saves import allow_all, refusal_of
from ..call.state import Slot
from ..ranks.connection import Connection, connect
from ..ranks.consensus import MeshRanks, agree_on_program, identity_of, notifying, standing_of
from ..ranks.standing import Standing, StateError
from . import master_copies
from .equal_on_ranks import broadcast_along


def recover(call: Call, ranks: MeshRanks, what: str, is_edited: bool = False) -> None:
    """Copy the state of ``call`` from the rank that has it whole and oldest to all others; all ranks call it.

    ``is_edited``: all have it whole, but have written other values to equal copies; then those of the first rank count.

    Raises ``SpmdError`` on all ranks, and changes nothing, where no rank has it whole, or where it is split.
    """
    carried, partly = refusal_of(call.given)
    if not ranks.groups:
        standing = carried or standing_of(None)
        if partly := partly or standing.partly:
            why = f"{what} cannot recover: its state is partly updated ({partly}), and there is no other rank"
            raise StateError(f"{why}. Load a checkpoint into model and optimizer", standing)
        return
    connection = _connection(ranks, what, carried, partly)
    whole = [(each.updates, rank) for rank, each in enumerate(connection.standings) if not each.partly]
    is_equal = len(whole) == len(connection.standings) and len({updates for updates, _ in whole}) == 1
    if is_equal and not is_edited:
        return
    call.groups.communicate_in(connection)
    slots = [slot for slot in call.slots if not (is_equal and _is_of_one_rank(slot, call))]
    _check([] if is_equal else slots, connection, whole, what)
    updates, source = min(whole)
    with torch.no_grad():
        for slot in slots:
            _copy(slot, call, source)
    for slot in slots:
        master_copies.take(slot.get())
    _copy_numbers(call, connection, source, what)
    connection.standing.restore(updates)
    allow_all(call.given)


def _connection(ranks: MeshRanks, what: str, carried: Standing | None, partly: str) -> Connection:
    """Connect to the other ranks, once all of them have come to recover: one may still make a call, which raises.

    Steps of other models may have connected the ranks since the call that failed, so they compare their state anew.
    """
    purpose = f"recover() of {what}"
    connect_anew = partial(connect, ranks.groups, ranks.members, ranks.timeout, purpose, to_recover=True)
    while True:
        try:
            connection = connect_anew(carried=carried, partly=partly)
        except StateError:
            continue
        agree_on_program(connection, purpose, identity_of(purpose, ""), lambda: [purpose], ranks.timeout)
        with notifying(connection, purpose):
            connection.compare(purpose, recovers=True, partly=partly)
        connection.is_in_call = False
        return connection


def _is_of_one_rank(slot: Slot, call: Call) -> bool:
    ignored = slot.input.name in call.annotations.ignored
    return ignored or is_pending(slot.input.placement)


def _check(slots: Sequence[Slot], connection: Connection, whole: list[tuple[int, int]], what: str) -> None:
    """Raise ``SpmdError`` on all ranks if one of them cannot recover."""
    names = [slot.input.name for slot in slots]
    split = [slot.input.name for slot in slots if is_sharded(slot.input.placement)]
    pending = [slot.input.name for slot in slots if is_pending(slot.input.placement)]
    problem = "no rank has its state whole" if not whole else ""
    problem = f"{split[0]} is split over ranks, and each holds its own part" if split else problem
    problem = f"{pending[0]} is a pending sum over ranks, and each holds its own summand" if pending else problem
    problems = connection.all_gather_text(json.dumps([problem, names]), f"recover() of {what}")
    found = [text for text, _ in map(json.loads, problems) if text]
    if len({json.dumps(names) for _, names in map(json.loads, problems)}) > 1:
        found.append("the first call failed, and only some ranks have state of the optimizer")
    if found:
        connection.close()
        raise SpmdError(f"{what} cannot recover: {found[0]}. Load a checkpoint on all ranks")


def _copy(slot: Slot, call: Call, source: int) -> None:
    """From the ``source``-th rank of the mesh to all that have the same part: along the first axis, then the next."""
    mesh = call.device_mesh
    coordinate = [int(k[0]) for k in torch.unravel_index(torch.tensor([source]), mesh.mesh.shape)]
    split = {k for k, entry in enumerate(slot.input.placement) if not entry.is_replicate()}
    for axis, position in enumerate(coordinate):
        if axis not in split:
            broadcast_along(local_tensor(slot.get()), call, axis, position)


def _copy_numbers(call: Call, connection: Connection, source: int, what: str) -> None:
    """The numbers that optimizers keep in their state, such as counters."""
    numbers = [each for each in call.hyper_parameters if isinstance(each.get(), (int, float))]
    texts = connection.all_gather_text(json.dumps([each.get() for each in numbers]), f"recover() of {what}")
    for each, value in zip(numbers, json.loads(texts[source]), strict=True):
        if each.item is None:
            each.group[each.key] = value
