"""The memory that one rank needs for a step, by plan: its peak, what it is made of, and what lives then."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any

from torch import fx

from ..ir.program import Program
from ..ir.roles import Holds
from ..runtime.arena import reserve
from .left_behind import replaced_bytes
from .pieces import Piece, Pieces, Space, tensors
from .value_roles import holds, names

_LARGEST = 5  # values named


@dataclass(frozen=True)
class LiveValue:
    """A value that lives at the peak: its name or its op and module, what it is, and this rank's bytes and shape."""

    name: str
    role: str
    bytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class PlannedMemory:
    """The memory of one rank on one device, or what local ranks can read, in bytes.

    ``peak``: state and arguments, gradients that the step replaces, the arena, and the most that ops allocate beside
    it at once. ``roles``: what is in use of that when most is, by what it holds (``Holds``); ``unused``: the rest.
    ``at``: the op at which most is in use, and its module. ``arena``: kept between calls; ``arena_used``: the most that
    lives in it at once, below which no arena can be; ``allocated``: the most beside it. ``largest``: values that live
    at the peak. ``phase`` and ``line``: the part of the step that the op belongs to, and the user's line. What ops need
    while they run is not known, nor what the allocator keeps.
    """

    peak: int
    roles: dict[str, int]
    unused: int
    arena: int
    arena_used: int
    allocated: int
    at: str
    largest: tuple[LiveValue, ...]
    phase: str = ""
    line: str = ""

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> PlannedMemory:
        """Build from the plain data that ``dataclasses.asdict`` makes."""
        largest = tuple(LiveValue(**{**each, "shape": tuple(each["shape"])}) for each in given["largest"])
        return cls(**{**given, "largest": largest})


def planned_memory(program: Program, whole: Program | None = None) -> dict[str, PlannedMemory]:
    """By device; ``"cpu, shared with local ranks"`` is what these can read. Of runs, the one that needs the most.

    ``whole``: the program of the call, where ``program`` is a run of it.
    """
    found: dict[str, PlannedMemory] = {}
    for run in {id(each.graph): each for each in program.in_order()}.values():
        plan = _Plan(run, whole or program)
        for space in dict.fromkeys([piece.space for piece in plan.pieces.all] + list(plan.arenas)):
            most = plan.of(space)
            if str(space) not in found or most.peak > found[str(space)].peak:
                found[str(space)] = most
    return found


def live_bytes(program: Program) -> dict[str, list[tuple[int, int]]]:
    """By device, the bytes in use from a position in the graph on, at each position where they change.

    Of a graph whose memory is not planned yet, what its ops would allocate.
    """
    arenas: dict[Space, Any] = {Space.of(node): node.args[0] for node in _arenas(program)}
    by_space: dict[Space, list[Piece]] = {}
    for piece in Pieces(program.graph).all:
        by_space.setdefault(piece.space, []).append(piece)
    return {str(space): list(_AddressSpace(each, arenas.get(space, 0)).in_use()) for space, each in by_space.items()}


def _arenas(program: Program) -> Sequence[fx.Node]:
    return list(program.graph.find_nodes(op="call_function", target=reserve))


class _Plan:
    """The analyses of a program's memory from which the plan of each space is made."""

    def __init__(self, program: Program, whole: Program) -> None:
        """``whole``: the program that a call runs, of which this one may be a run."""
        self.whole, self.pieces = whole, Pieces(program.graph)
        self.holds, self.names = holds(program, self.pieces), names(program, self.pieces)
        self.nodes = list(program.graph.nodes)
        self.arenas: dict[Space, fx.Node] = {Space.of(node): node for node in _arenas(program)}

    def of(self, space: Space) -> PlannedMemory:
        """The plan of one space."""
        pieces = [piece for piece in self.pieces.all if piece.space == space]
        size, used = self._arena(space)
        memory = _AddressSpace(pieces, size)
        at = memory.fullest()
        visible = memory.visible(at)
        roles = {str(kind): 0 for kind in Holds}
        for piece, count in visible.items():
            roles[self.holds[piece.node]] += count
        allocated = most_allocated(pieces)
        replaced = 0 if space.shared else replaced_bytes(self.whole, space.device)
        roles[Holds.GRADIENTS] += replaced
        peak = sum(piece.size for piece in pieces if piece.is_state) + replaced + size + allocated
        largest = sorted(visible, key=lambda piece: -piece.size)[:_LARGEST]
        values = tuple(self._value(piece) for piece in largest)
        unused = peak - sum(roles.values())
        name, source = self.names[self.nodes[at]], next((n for n in self.nodes[at:] if n.meta.get("source")), None)
        meta = {} if source is None else source.meta
        where = str(meta.get("phase", "")), str(meta.get("source", ""))
        return PlannedMemory(peak, roles, unused, size, used, allocated, name, values, *where)

    def _arena(self, space: Space) -> tuple[int, int]:
        """The bytes of the arena, and the most that lives in it at once."""
        arena: Any = self.arenas.get(space)
        return (0, 0) if arena is None else (arena.args[0], arena.meta["live_bytes"])

    def _value(self, piece: Piece) -> LiveValue:
        val = next(tensors(piece.node.meta["val"]))
        dtype = str(val.dtype).removeprefix("torch.")
        name, role = self.names[piece.node], str(self.holds[piece.node])
        return LiveValue(name, role, piece.size, dtype, tuple(val.shape))


def most_allocated(pieces: Iterable[Piece], temporary: Mapping[int, int] | None = None) -> int:
    """The most bytes that ops allocate at once; ``temporary``: those that an op needs while it runs, by position."""
    pieces = list(pieces)
    changes = [(piece.first, piece.size) for piece in pieces if piece.is_allocated]
    changes += [(piece.last + 1, -piece.size) for piece in pieces if piece.is_allocated]
    for position, size in (temporary or {}).items():
        changes += [(position, size), (position + 1, -size)]
    return max(accumulate(change for _, change in sorted(changes)), default=0)


class _AddressSpace:
    """Pieces at their offsets in the arena, or behind it, each on its own; counts bytes where they lie on another."""

    def __init__(self, pieces: Sequence[Piece], arena: int) -> None:
        self.pieces = pieces
        self.start: dict[Piece, int] = {}
        for piece in pieces:
            self.start[piece] = arena if piece.offset is None else piece.offset
            arena += piece.size if piece.offset is None else 0
        self.bounds = sorted({edge for piece in pieces for edge in (self.start[piece], self._end(piece))})

    def fullest(self) -> int:
        """The first position at which most bytes are in use."""
        most, at = 0, 0
        for position, used in self.in_use():
            if used > most:
                most, at = used, position
        return at

    def in_use(self) -> Iterator[tuple[int, int]]:
        """The positions at which values come or go, in order, and the bytes in use from there on."""
        living, used = [0] * len(self.bounds), 0
        changes = [(piece.first, 1, piece) for piece in self.pieces]
        changes += [(piece.last + 1, -1, piece) for piece in self.pieces]
        for position, group in groupby(sorted(changes, key=itemgetter(0)), key=itemgetter(0)):
            for _, change, piece in group:
                for k in self._cells(piece):
                    was, living[k] = living[k], living[k] + change
                    used += (bool(living[k]) - bool(was)) * (self.bounds[k + 1] - self.bounds[k])
            yield position, used

    def visible(self, at: int) -> dict[Piece, int]:
        """The bytes of each piece that lives at a position; where several lie on another, those of the last one."""
        owner: dict[int, Piece] = {}
        for piece in sorted(self.pieces, key=lambda piece: piece.first):
            if piece.first <= at <= piece.last:
                owner |= dict.fromkeys(self._cells(piece), piece)
        found: dict[Piece, int] = Counter()
        for k, piece in owner.items():
            found[piece] += self.bounds[k + 1] - self.bounds[k]
        return found

    def _end(self, piece: Piece) -> int:
        return self.start[piece] + piece.size

    def _cells(self, piece: Piece) -> range:
        """The intervals between bounds that a piece is made of."""
        return range(bisect_left(self.bounds, self.start[piece]), bisect_left(self.bounds, self._end(piece)))
