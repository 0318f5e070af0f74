"""The vocabulary of collectives: which op means which kind, on which mesh axis, of how many bytes.

Everything that counts, merges or moves communication asks here, so that a collective is counted by what it means and
not by the op that performs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import fx

from .roles import Role

c10d = torch.ops._c10d_functional  # the functional collectives; private by name, the only ones make_fx and DTensor emit


class Kind(StrEnum):
    """What a collective means."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"


@dataclass(frozen=True)
class Collective:
    """What is known of one collective, kept in ``node.meta["collective"]``.

    ``axis`` is the name of the mesh axis, ``reduction`` is ``"sum"``, ``"max"``, ... or None, ``role`` says what is
    communicated, ``why`` is a sentence for reports, ``of`` names the values (parameters, results) it serves.
    """

    kind: Kind
    axis: str
    reduction: str | None = None
    role: Role = Role.UNKNOWN
    why: str = ""
    of: tuple[str, ...] = ()


# Each op with its kind and the positions of (reduction, group name) among its arguments.
_OPS: dict[Any, tuple[Kind, int | None, int]] = {
    c10d.all_reduce.default: (Kind.ALL_REDUCE, 1, 2),
    c10d.all_reduce_.default: (Kind.ALL_REDUCE, 1, 2),
    c10d.all_reduce_coalesced.default: (Kind.ALL_REDUCE, 1, 2),
    c10d.all_gather_into_tensor.default: (Kind.ALL_GATHER, None, 2),
    c10d.all_gather_into_tensor_coalesced.default: (Kind.ALL_GATHER, None, 2),
    c10d.reduce_scatter_tensor.default: (Kind.REDUCE_SCATTER, 1, 3),
    c10d.reduce_scatter_tensor_coalesced.default: (Kind.REDUCE_SCATTER, 1, 3),
    c10d.all_to_all_single.default: (Kind.ALL_TO_ALL, None, 3),
    c10d.broadcast.default: (Kind.BROADCAST, None, 2),
}

WAIT = c10d.wait_tensor.default


def is_collective(node: fx.Node) -> bool:
    """Whether ``node`` starts a collective."""
    return node.op == "call_function" and node.target in _OPS


def is_wait(node: fx.Node) -> bool:
    """Whether ``node`` waits for a collective."""
    return node.op == "call_function" and node.target is WAIT


def kind_of(node: fx.Node) -> Kind:
    """The kind of a collective node."""
    return _OPS[node.target][0]


def group_of(node: fx.Node) -> str:
    """The process group's name, as the op has it."""
    group = node.args[_OPS[node.target][2]]
    assert isinstance(group, str)
    return group


def reduction_of(node: fx.Node) -> str | None:
    """``"sum"``, ``"max"``, ... or None for a collective that reduces nothing."""
    position = _OPS[node.target][1]
    if position is None:
        return None
    reduction = node.args[position]
    assert isinstance(reduction, str)
    return reduction


def input_bytes(node: fx.Node) -> int:
    """Bytes of one rank's local input, padding included."""
    operands = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
    return sum(_bytes(operand.meta["val"]) for operand in operands if isinstance(operand, fx.Node))


def _bytes(val: torch.Tensor) -> int:
    return val.numel() * val.element_size()
