"""The types of a rule: it maps a call of an op, on global shapes, to the placements it can run with along a mesh axis.

A rule never chooses. It lists the combinations that are *correct*: run the op, or a small program of the option's own,
on every rank's local operands, and the local results are the global result under the placements of the option. The
partitioner chooses by cost, and communicates before and after; an option's program may also communicate in between. On
a mesh of several axes it calls the rule once per axis, with the shapes that the previous axes leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from passes import Kind, Mesh
from passes.ir.program import Placements
from passes.ir.schemas import schema

from .._torch import OpOverload
from ..placements import ByGroup, Interleaved, Mirrored, OwnRows, local_shape, local_start, smallest_shape

# As in torch's own notation for placements: R, P, S(0).
R = Replicate()
P = Partial("sum")


def S(dim: int) -> Shard:
    """Split along ``dim``."""
    return Shard(dim)


@dataclass(frozen=True)
class Info:
    """Shape and dtype of a tensor in a call; along ``iota_dim``, if known, it holds 0, 1, 2, ... (``iota.py``).

    ``group``: the rows that go to the ranks of their experts, where the tensor says whose they are. ``numbered``: how
    many experts there are, where it holds their numbers, by which weights are looked up where these lie. ``positions``:
    what is known of its elements by their positions (``sequences/bands.py``).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    iota_dim: int | None = None
    group: ByGroup | None = None
    positions: Any = None
    numbered: int | None = None

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@cache
def parameters(op: OpOverload) -> dict[str, tuple[int | None, Any]]:
    """The position (None if keyword-only) and the default of each argument of ``op``, by name."""
    return {
        argument.name: (None if argument.kwarg_only else position, argument.default)
        for position, argument in enumerate(schema(op).arguments)
    }


@dataclass(frozen=True)
class OpCall:
    """One call of ``target``.

    ``args`` and ``kwargs`` are the call's own, with an ``Info`` instead of each tensor; ``operands`` are those Infos in
    the order of ``tree_leaves((args, kwargs))``; ``results`` has one Info per tensor the op returns (None for an output
    that is no tensor or is absent); ``size`` is the number of ranks along the axis; ``interleaved`` lists for each
    operand the splits in runs of rows in which it is available; ``of_parts`` says whether axes before split some of the
    tensors, so that positions in these are not those in the whole. ``owned`` lists for each operand the own rows in
    which it is available; ``hinted`` are those that the first result should have. ``own_order``: how it is computed
    along axes that split tokens, with rows that each rank sorts by itself. ``of_weights``: how its first result lies
    along the axis of experts, in the gradient of weights that are looked up where they lie.
    """

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[Info, ...]
    results: tuple[Info | None, ...]
    size: int
    interleaved: tuple[tuple[Interleaved, ...], ...] = ()
    of_parts: bool = False
    owned: tuple[tuple[OwnRows, ...], ...] = ()
    hinted: OwnRows | None = None
    own_order: Option | None = None
    of_weights: Placement | None = None

    def arg(self, name: str, default: Any = None) -> Any:
        """The argument called ``name`` in the op's schema, given by position, by name or by the schema's default."""
        position, value = parameters(self.target).get(name, (None, None))
        if position is not None and position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default if value is None else value)

    def even(self, size: int) -> bool:
        """Whether a dim of ``size`` splits into equal parts along this axis."""
        return size % self.size == 0

    def fills(self, size: int) -> bool:
        """Whether every rank has some of a dim of ``size`` that is split along this axis."""
        return size > 0 and -(-size // -(-size // self.size)) == self.size


_REPLICATED = frozenset({Replicate, Partial})


@dataclass(frozen=True)
class LocalPart:
    """A rank's part of a tensor: its start, its shape, and the shape of the smallest part on any rank.

    ``mirrored``: whether it consists of an early and a late run of rows; it has no start then.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    smallest: tuple[int, ...]
    mirrored: bool = False

    @classmethod
    def of(cls, shape: Sequence[int], placement: Placements, mesh: Mesh) -> LocalPart:
        """This rank's part of a tensor of a global shape."""
        if _REPLICATED.issuperset(map(type, placement)):
            return cls((0,) * len(shape), tuple(shape), tuple(shape))
        placed = (shape, placement, mesh)
        mirrored = any(isinstance(entry, Mirrored) for entry in placement)
        return cls(local_start(*placed), local_shape(*placed), smallest_shape(*placed), mirrored)


def parts_of(infos: Sequence[Info | None], placements: Sequence[Any], mesh: Mesh) -> list[LocalPart | None]:
    """This rank's part of each tensor, None for anything else."""
    pairs = zip(infos, placements, strict=True)
    return [None if info is None else LocalPart.of(info.shape, placement, mesh) for info, placement in pairs]


class Run(Protocol):
    """Runs ops on this rank's tensors, or writes them into its graph. ``size``, ``rank``: along the option's axis.

    ``kwargs``: the keyword arguments of the call, on this rank.
    """

    size: int
    rank: int
    kwargs: dict[str, Any]

    def __call__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, numbers: str = "") -> Any:
        """The result of an op; of an op with several, an access by index is an op, too (``operator.getitem``).

        ``numbers``: what the numbers among the arguments are, where other ones on the same operands have another
        meaning: on some rank these may be equal.
        """

    def whole(self, name: str) -> Any:
        """A captured node that says whose rows are whose."""

    def own_ends(self, ends: Any, position: int, dim: int) -> Any:
        """The ends of groups in this rank's rows of an operand, for ``ends`` in the whole; of its own groups alone."""

    def own_numbers(self, position: int | None) -> Any:
        """The experts of this rank's rows of an operand, or of the first result, numbered from its first one."""

    def only_own(self, tensor: Any, position: int) -> Any:
        """An operand with zeros behind this rank's own rows."""

    def shape(self, tensor: Any) -> Sequence[int]:
        """The shape of a tensor on this rank."""

    def rows(self, tensor: Any, dim: int, start: int, end: int, numbers: str) -> Any:
        """The rows of a tensor that this rank needs, of which each rank may need another number."""

    def all_to_all(self, tensor: Any, received: list[int], sent: list[int], numbers: str = "") -> Any:
        """The rows that this rank receives from each one of the axis, for those of ``tensor`` that it sends to each.

        Where parts are even, let each rank send and receive as many rows in all as any other: passes order by that.
        """


Parts = list[LocalPart | None]
"""The parts of a call's operands or results on one rank; None for what is no tensor."""

Local = Callable[[Run, OpCall, tuple[Any, ...], Parts, Parts], Any]
"""``(run, call, args, parts of operands, parts of results) -> results``: a rank's computation instead of the op."""


@dataclass(frozen=True)
class Sent:
    """A collective of an option's own: its kind, and the bytes of this rank's input."""

    kind: Kind
    nbytes: int


Sends = Callable[[OpCall, Parts, Parts], Sequence[Sent]]
"""``(call, parts of operands, parts of results) -> collectives`` that ``local`` runs along the axis."""


@dataclass(frozen=True)
class Option:
    """One correct combination: a placement for each operand and one for each result (None where no tensor).

    ``from_zero``: the positions of iota operands that are split and must number a rank's own rows from 0. ``local``:
    a rank's computation, where it is not the op itself on its parts: an op with indices needs one, since these are
    positions in the whole dim and a rank has a part of it. All ranks must run the same ops; only numbers may differ.
    It returns a node or tensor for the one result, or a tuple for several.
    ``sends``: the collectives of ``local``, by which the option is counted and chosen; whatever it computes in the end
    must be as promised. ``name``: what tells it from another option of the same placements.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement | None, ...]
    from_zero: tuple[int, ...] = ()
    local: Local | None = None
    sends: Sends | None = None
    name: str = ""


Rule = Callable[[OpCall], list[Option]]
"""Lists the options except "all replicated", which is always correct and which the partitioner adds."""

Localize = Callable[[OpCall, tuple[Any, ...], dict[str, Any], tuple[tuple[int, ...] | None, ...]], tuple[Any, ...]]
"""``(call, args, kwargs, local result shapes) -> args``: replaces global sizes among the arguments by local ones."""
