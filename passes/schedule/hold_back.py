"""An order of nodes in which work that a collective does not need runs behind its start, where compute would wait.

Backward often computes a weight's gradient right before the gradient that is reduced along a model's axis: the other
way around, one hides the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from ..analysis.reachability import reached
from ..ir.collectives import Kind, is_collective, is_wait, waits_of
from ..ir.effects import is_pure
from ..ir.ops import Trait, has
from ..ir.program import Program
from ..memory.pieces import Pieces
from ..update.update_last import late_nodes
from .node_costs import NodeCosts
from .simulation import Rank

_WINDOW = 500  # nodes before a start among which work is looked for


def hold_back(program: Program, costs: NodeCosts, spare: int = 0) -> list[fx.Node]:
    """All nodes of ``program``, in an order by which one rank waits less.

    What is held back leaves ``spare`` bytes below the peak of the bytes in use now.

    Work moves from before the start of a collective to behind it, the nearest first, until there is as much as compute
    waits for the collective; from no further up than the wait before, at which compute is idle as well. It moves if
    nothing before the start reads it, and if there is room for what it reads. Nothing moves among the nodes that update
    state, or behind one of them. Gathers with ``Collective.ahead`` start no earlier than that allows: nothing is held
    back behind them, nor what reads their results last.
    """
    search = _Search(program, costs, spare)
    held = {start: search.work_before(start, idle) for start, idle in search.exposed()}
    moving = {node for nodes in held.values() for node in nodes}
    order = []
    for node in program.graph.nodes:
        if node not in moving:
            order += [node, *held.get(node, ())]
    return order


class _Search:
    """A program with what it costs, and the room that is left at each position."""

    def __init__(self, program: Program, costs: NodeCosts, spare: int) -> None:
        self._nodes = list(program.graph.nodes)
        self._position = {node: k for k, node in enumerate(self._nodes)}
        self._costs = {node: costs.of(node) for node in self._nodes}
        self._rank = Rank(costs.rates.is_asynchronous)
        self._idle_at, self._late = dict(self._idle()), late_nodes(program)
        self._pieces = Pieces(program.graph)
        self._size = {piece.node: piece.size for piece in self._pieces.all}
        self._last = {piece.node: piece.last for piece in self._pieces.all}
        self._used = _used(self._pieces, len(self._nodes))
        self._most = max(self._used) - spare
        self._bounded = {node for node in program.collectives() if _is_bounded(node)}
        self._whole = {piece for node in _unpacked(self._bounded) for piece in self._pieces.found[node]}
        self._held = set[fx.Node]()  # behind the starts that were looked at so far

    def _idle(self) -> Iterator[tuple[fx.Node, float]]:
        """The waits at which compute is idle, and for how long."""
        for node in self._nodes:
            if (idle := self._rank.idle(node)) > 0:
                yield node, idle
            self._rank.step(node, self._costs[node])

    def exposed(self) -> Iterator[tuple[fx.Node, float]]:
        """The collectives at whose waits compute is idle, in order, and for how long."""
        for node in self._nodes:
            if is_collective(node) and node not in self._late and node not in self._bounded:
                idle = sum(self._idle_at.get(wait, 0.0) for wait in waits_of(node))
                if idle > 0:
                    yield node, idle

    def work_before(self, start: fx.Node, idle: float) -> list[fx.Node]:
        """The work that is held back until ``start``, in order."""
        needed, held, seconds = set(start.all_input_nodes), set[fx.Node](), 0.0
        end = self._position[start]
        for node in reversed(self._nodes[max(0, end - _WINDOW) : end]):
            if seconds >= idle or node in self._idle_at or not _is_known(node):
                break
            if node in needed:
                needed.update(node.all_input_nodes)
            elif node not in self._held and self._can_wait(node, start, held):
                held.add(node)
                self._held.add(node)
                seconds += self._seconds(node)
        return sorted(held)

    def _can_wait(self, node: fx.Node, start: fx.Node, held: set[fx.Node]) -> bool:
        """Whether nothing but ``held`` reads ``node`` before ``start``, and what it reads can stay until then."""
        if not is_pure(node) or is_collective(node) or is_wait(node):
            return False
        if any(self._position[user] < self._position[start] and user not in held for user in node.users):
            return False
        return self._keep(node, self._position[start])

    def _keep(self, node: fx.Node, until: int) -> bool:
        """Keep what ``node`` reads until a position, in place of its result, if there is room."""
        pieces = {piece for needed in node.all_input_nodes for piece in self._pieces.found[needed]}
        ending = [piece for piece in pieces if self._last.get(piece, until) < until]
        if self._whole.intersection(ending):
            return False
        changes = [(self._last[piece] + 1, self._size[piece]) for piece in ending]
        changes.append((self._position[node], -self._size.get(node, 0)))
        first = min(position for position, _ in changes)
        used = self._used[first : until + 1]
        for position, size in changes:
            for k in range(position - first, len(used)):
                used[k] += size
        if max(used) > self._most:
            return False
        self._used[first : until + 1] = used
        self._last |= dict.fromkeys(ending, until)
        return True

    def _seconds(self, node: fx.Node) -> float:
        cost = self._costs[node]
        return cost.compute + (0.0 if self._rank.is_asynchronous else cost.launch)


def _is_bounded(node: fx.Node) -> bool:
    """Whether a node gathers what is to be whole for a short time only."""
    described = node.meta["collective"]
    return described.kind is Kind.ALL_GATHER and described.ahead is not None


def _unpacked(gathers: Iterable[fx.Node]) -> set[fx.Node]:
    """The results of gathers, and what only unpacks these."""
    waits = [wait for gather in gathers for wait in waits_of(gather)]
    return set(reached(waits, lambda node: [u for u in node.users if has(u.target, Trait.VIEW, Trait.UNPACKS)]))


def _is_known(node: fx.Node) -> bool:
    """Whether a node reads and writes nothing but its arguments."""
    return is_pure(node) or is_collective(node) or is_wait(node)


def _used(pieces: Pieces, count: int) -> list[int]:
    """The bytes in use at each position."""
    changes = [0] * (count + 1)
    for piece in pieces.all:
        changes[piece.first] += piece.size
        changes[min(piece.last + 1, count)] -= piece.size
    used, total = [], 0
    for change in changes:
        total += change
        used.append(total)
    return used
