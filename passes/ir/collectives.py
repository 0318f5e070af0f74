"""The vocabulary of collectives: which op means which kind, on which mesh axis, of how many bytes.

Everything that counts, merges or moves communication asks here, so that a collective is counted by what it means and
not by the op that performs it. The ops of ours are in ``passes/runtime/`` (``*_collectives.py``). A new kind or op
also needs algorithms (``analysis/collective_algorithms.py``), what it computes (``spmd/verification``:
``collective_semantics.py``) and a way to be measured (``spmd/cli/measured_collectives.py``).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import fx

from .._torch import c10d as c10d
from ..runtime import coalesced_collectives, message_collectives, shared_memory_collectives
from .roles import Role
from .schemas import argument, position_of


class Kind(StrEnum):
    """The semantics of a collective, whatever op performs it."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND = "send"  # to one rank, which receives it
    RECV = "recv"


@dataclass(frozen=True)
class Collective:
    """The description of one collective, kept in ``node.meta["collective"]``.

    ``axis`` is the name of the mesh axis, ``reduction`` is ``"sum"``, ``"max"``, ... or None, ``role`` says what is
    communicated, ``why`` is a sentence for reports, ``of`` names the values (parameters, results) it serves.

    ``ahead`` bounds how much is whole at once: how many others of its kind a gather may start before, in the order of
    their readers, or how many may start before it is waited for, if it reduces; None for any number.

    ``by`` names the implementation where it is not the backend's own op: a short noun phrase for reports and dumps.
    """

    kind: Kind
    axis: str
    reduction: str | None = None
    role: Role = Role.UNKNOWN
    why: str = ""
    of: tuple[str, ...] = ()
    by: str = ""
    ahead: int | None = None


_KINDS: dict[Any, Kind] = {
    c10d.all_reduce.default: Kind.ALL_REDUCE,
    c10d.all_reduce_.default: Kind.ALL_REDUCE,
    c10d.all_reduce_coalesced.default: Kind.ALL_REDUCE,
    c10d.all_gather_into_tensor.default: Kind.ALL_GATHER,
    c10d.all_gather_into_tensor_coalesced.default: Kind.ALL_GATHER,
    c10d.reduce_scatter_tensor.default: Kind.REDUCE_SCATTER,
    c10d.reduce_scatter_tensor_coalesced.default: Kind.REDUCE_SCATTER,
    c10d.all_to_all_single.default: Kind.ALL_TO_ALL,
    c10d.broadcast.default: Kind.BROADCAST,
    message_collectives.exchange.default: Kind.ALL_TO_ALL,
    message_collectives.swap.default: Kind.ALL_TO_ALL,
    message_collectives.gather_by_broadcast.default: Kind.ALL_GATHER,
    message_collectives.gather_by_sending.default: Kind.ALL_GATHER,
    message_collectives.send.default: Kind.SEND,
    message_collectives.recv.default: Kind.RECV,
    shared_memory_collectives.shared_all_reduce.default: Kind.ALL_REDUCE,
    shared_memory_collectives.shared_all_gather.default: Kind.ALL_GATHER,
    shared_memory_collectives.shared_reduce_scatter.default: Kind.REDUCE_SCATTER,
    coalesced_collectives.coalesced_all_gather.default: Kind.ALL_GATHER,
    coalesced_collectives.coalesced_reduce_scatter.default: Kind.REDUCE_SCATTER,
}

OUT_VARIANTS: dict[Any, Any] = (
    message_collectives.OUT_VARIANTS | shared_memory_collectives.OUT_VARIANTS | coalesced_collectives.OUT_VARIANTS
)
"""For each functional collective, the op with the same arguments and ``out=``, which allocates nothing."""

_KINDS |= {out: _KINDS[op] for op, out in OUT_VARIANTS.items()}

_IDS = frozenset(map(id, _KINDS))  # every pass asks for every node, and the hash of an op is slow

_SHARED = shared_memory_collectives.OUT_VARIANTS

WAIT = c10d.wait_tensor.default


def is_collective(node: fx.Node) -> bool:
    """Whether ``node`` starts a collective."""
    return node.op == "call_function" and id(node.target) in _IDS


def collectives_in(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that start a collective, in order: each pass asks for them, so nothing is called for a node."""
    return [node for node in graph.nodes if id(node.target) in _IDS]


def is_wait(node: fx.Node) -> bool:
    """Whether ``node`` waits for a collective."""
    return node.op == "call_function" and node.target is WAIT


def is_message(node: fx.Node) -> bool:
    """Whether ``node`` starts a send or a recv: what one rank does alone, and another one matches."""
    return is_collective(node) and _KINDS[node.target] in (Kind.SEND, Kind.RECV)


def peer_of(node: fx.Node) -> int:
    """The rank of its group that a message goes to, or comes from."""
    peer = argument(node, "peer")
    assert isinstance(peer, int), f"{node} names its peer by {peer!r}"
    return peer


def channel_of(node: fx.Node) -> str:
    """The name of what a message carries."""
    return str(argument(node, "channel"))


def line_of(node: fx.Node, backend: str) -> str:
    """The messages between two ranks among which a message has its place: its channel's, on NCCL its group's."""
    return group_of(node) if backend == "nccl" else channel_of(node)


def kind_of(node: fx.Node) -> Kind:
    """The kind of a collective node, by its op; what it means may be another (``meta["collective"].kind``)."""
    return _KINDS[node.target]


def group_of(node: fx.Node) -> str:
    """The process group's name, as the op has it."""
    group = argument(node, "group_name")
    assert isinstance(group, str), f"{node} names its process group by {group!r}"
    return group


def communicate_in(node: fx.Node, group: str) -> None:
    """Let a collective communicate in another process group."""
    position = position_of(node.target, "group_name")  # type: ignore[arg-type]
    assert position is not None, f"{node} communicates"
    node.args = (*node.args[:position], group, *node.args[position + 1 :])


def group_size_of(node: fx.Node) -> int:
    """The number of ranks, as the op of an all_gather or a reduce_scatter has it."""
    size = argument(node, "group_size")
    assert isinstance(size, int), f"{node} gives its number of ranks as {size!r}"
    return size


def reduction_of(node: fx.Node) -> str | None:
    """``"sum"``, ``"max"``, ... or None for a collective that reduces nothing."""
    reduction = argument(node, "reduce_op")
    return None if reduction is None else str(reduction)


def is_shared(node: fx.Node) -> bool:
    """Whether other ranks look at the operand of ``node`` where it lies, if it starts a collective."""
    return node.op == "call_function" and (node.target in _SHARED or node.target in _SHARED.values())


def operands(node: fx.Node) -> list[fx.Node]:
    """The tensors that a collective sends: one, or several for a coalesced one; none for a recv."""
    sent = node.args[0] if node.args else next(iter(node.kwargs.values()))
    return [
        operand for operand in (sent if isinstance(sent, (list, tuple)) else [sent]) if isinstance(operand, fx.Node)
    ]


def waits_of(node: fx.Node) -> Iterator[fx.Node]:
    """The waits on a collective's result, also through the ``getitem``s of a coalesced one."""
    for user in node.users:
        if is_wait(user):
            yield user
        elif user.target is operator.getitem:
            yield from waits_of(user)


def moved(node: fx.Node) -> list[fx.Node]:
    """The values that count as what a collective moves: its operands; of a recv, the result."""
    return [node] if kind_of(node) is Kind.RECV else operands(node)


def input_bytes(node: fx.Node) -> int:
    """Bytes of one rank's local input, padding included; of a recv, those that arrive.

    Equal on all ranks of a collective's group: uneven shards are padded.
    """
    return sum(_bytes(each.meta["val"]) for each in moved(node))


def output_bytes(node: fx.Node) -> int:
    """Bytes of one rank's local result, equal within its group; ``agreed_sizes.py`` says what all ranks know."""
    val = node.meta["val"]
    return sum(map(_bytes, val)) if isinstance(val, (list, tuple)) else _bytes(val)


def _bytes(val: torch.Tensor) -> int:
    return val.numel() * val.element_size()
