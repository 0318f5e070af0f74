"""The stages that compute each node of a share: what crosses stages, and where state lives, follow from them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import fx

from passes import Input, OutputKind, PartitionError, Phase, Program, Role
from passes.analysis.aliases import is_view
from passes.analysis.reachability import ancestors, descendants
from passes.ir.collectives import is_collective, is_wait

from ..micro_batches.lines import described
from .agreed import Agreed

Ranks = frozenset[int]  # along the axis of stages


class Part(StrEnum):
    """The programs of a stage: the last one runs once, behind all micro-batches, the others for each of them.

    Where gradients of weights are computed apart (``WEIGHTS``), backward has only what earlier stages wait for.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHTS = "weights"
    UPDATE = "update"


@dataclass(frozen=True)
class Placed:
    """The stage of each node: one of ``count``, of which rank r of ``ranks`` has r, r + ranks, ...

    ``parts``: of the nodes that run for each micro-batch; those of ``grown`` add to accumulators. A node in ``free``
    follows from arguments alone, one in ``fixed`` from nothing that micro-batches differ in: each is computed wherever
    it is read, and neither has ``stages``. ``update``: the ranks of the nodes that run once. ``homes``: the ranks that
    keep each state tensor, by name. ``agreed``: what all ranks know of the nodes.
    """

    count: int
    ranks: int
    parts: Mapping[fx.Node, Part]
    grown: Mapping[fx.Node, fx.Node]  # to the placeholder of the accumulator
    free: set[fx.Node]
    fixed: set[fx.Node]
    stages: Mapping[fx.Node, int]
    update: Mapping[fx.Node, Ranks]
    homes: Mapping[str, Ranks]
    agreed: Agreed


def place_nodes(
    program: Program,
    stage_of: Callable[[fx.Node], int],
    count: int,
    ranks: int,
    kept: Mapping[str, Ranks],
    splits_backward: bool = False,
) -> Placed:
    """Place the nodes of a share of one micro-batch. ``stage_of``: the stage of a node of forward.

    ``kept``: the ranks that keep state already, by name; ``splits_backward``: whether gradients of weights are computed
    apart. Raises ``PartitionError`` for what no order of stages computes.
    """
    return _Placing(program, stage_of, count, ranks, kept).placed(splits_backward)


@dataclass
class _Placing:
    program: Program
    stage_of: Callable[[fx.Node], int]
    count: int
    ranks: int
    kept: Mapping[str, Ranks]
    stages: dict[fx.Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        program = self.program
        self.agreed = Agreed(program)
        self.nodes = [node for node in program.graph.nodes if node.op != "output"]
        self.inputs = dict(zip(program.placeholders, program.inputs, strict=True))
        pairs = list(zip(program.output_values(), program.outputs, strict=True))
        by_name = {each.name: node for node, each in self.inputs.items()}
        self.grown = {v: by_name[o.name] for v, o in pairs if o.role.is_sum}
        self.outputs = [(v, o) for v, o in pairs if not o.role.is_sum and isinstance(v, fx.Node)]
        self.written = {o.name for _, o in self.outputs if o.kind is OutputKind.UPDATE}
        micro = program.micro_batches
        assert micro is not None, "a pipeline runs micro-batches"
        grown = {self.inputs[n].name: v for v, n in self.grown.items()}
        self.rows = {by_name[whole]: grown[name] for whole, name in micro.whole.items() if name in grown}
        split = {n for n, d in self.inputs.items() if program.varies(d)}
        state = {n for n in self.inputs if not self._is_everywhere(n)}
        varying, of_state = descendants(self.nodes, split), descendants(self.nodes, state)
        self.fixed = set(self.nodes) - varying
        self.free = set(self.nodes) - of_state - set(self.grown)
        self.run_each = ancestors(self.grown)
        self.fixed -= self._known_gradients() - self.free
        self.of_grown = descendants(self.nodes, set(self.grown))

    def _is_everywhere(self, node: fx.Node) -> bool:
        """Whether all stages have an input: arguments, numbers, and buffers that the step does not write."""
        declared = self.inputs[node]
        return not self._has_home(declared) or (declared.role is Role.BUFFER and declared.name not in self.written)

    def _has_home(self, declared: Input) -> bool:
        """Whether an input is state that some stages have, or what the user keeps of such."""
        return declared.role.is_state or (declared.role is Role.KEPT and declared.name in self.kept)

    def _known_gradients(self) -> set[fx.Node]:
        """Backward nodes that no row decides, as of a mean: one stage has their parameters, and sends them."""
        nodes = [node for node in self.nodes if node in self.run_each and node.meta.get("phase") is Phase.BACKWARD]
        filled = {node for node in self.run_each if node.op == "call_function" and not node.all_input_nodes}
        return descendants(nodes, filled)

    def placed(self, splits_backward: bool) -> Placed:
        """Forward in its order, backward towards earlier stages, and the update where state is."""
        parts = self._parts()
        own = [node for node in self.nodes if node in parts and node not in self.fixed | self.free]
        self._place_forward([node for node in own if parts[node] is Part.FORWARD])
        self._params = self._read_at()
        self._available = self._where_read([node for node in own if parts[node] is Part.FORWARD])
        backward = [node for node in own if parts[node] is Part.BACKWARD]
        self._place_backward(backward)
        self._move_down(backward)
        if splits_backward:
            parts |= dict.fromkeys(self._of_weights(backward), Part.WEIGHTS)
        homes = self._homes()
        update = self._place_update(homes)
        of_node = self.grown, self.free, self.fixed, self.stages
        return Placed(self.count, self.ranks, parts, *of_node, update, homes, self.agreed)

    def _parts(self) -> dict[fx.Node, Part]:
        nodes = [node for node in self.nodes if node in self.run_each and node.op != "placeholder"]
        late = descendants(nodes, {node for node in nodes if node.meta.get("phase") is Phase.BACKWARD})
        late |= {node for node in nodes if node.meta.get("recompute_of")}
        return {node: Part.BACKWARD if node in late else Part.FORWARD for node in nodes}

    # Forward and backward

    def _place_forward(self, nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            least = [self.stages[each] for each in node.all_input_nodes if each in self.stages]
            if node.target is operator.getitem or is_wait(node):
                self.stages[node] = least[0]
            else:
                self.stages[node] = max([self.stage_of(node), *least])

    def _read_at(self) -> dict[fx.Node, set[int]]:
        """The stages of forward that read each input, through what is fixed or free."""
        found: dict[fx.Node, set[int]] = {}
        for node in reversed(self.nodes):
            here = {self.stages[node]} if node in self.stages else found.get(node, set())
            for each in node.all_input_nodes:
                if each not in self.stages:
                    found.setdefault(each, set()).update(here)
        return found

    def _where_read(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, set[int]]:
        """The stages that have each value of forward: its own, and those that read it in forward."""
        found = {node: {self.stages[node]} for node in nodes}
        for node in nodes:
            for each in node.all_input_nodes:
                if each in found:
                    found[each].add(self.stages[node])
        return found

    def _place_backward(self, nodes: Sequence[fx.Node]) -> None:
        """Each at the last stage that has what it reads of forward, and not behind that of a gradient it reads."""
        for node in nodes:
            gradients = [self.stages[n] for n in node.all_input_nodes if n in self.stages and n not in self._available]
            last = min(gradients, default=self.count - 1)
            if node.target is operator.getitem or is_wait(node):
                self.stages[node] = last
                continue
            home = self._home_of_gradient(node)
            possible = set(range(last + 1)) if home is None else {min(home, last)}
            for each in node.all_input_nodes:
                possible &= self._stages_with(each) or possible
            if not possible:
                reads = [(each, self._stages_with(each)) for each in node.all_input_nodes]
                possible = {max(self.stages.get(each, max(has)) for each, has in reads if has)}
            self.stages[node] = max(possible)
            if self.stages[node] > last:
                raise PartitionError(
                    f"{described(node)} reads a gradient of stage {last} and a value of stage {self.stages[node]}, "
                    "which comes later: a pipeline computes gradients from the last stage to the first"
                )
            for each in node.all_input_nodes:
                if each in self._available:
                    self._available[each].add(self.stages[node])

    def _home_of_gradient(self, node: fx.Node) -> int | None:
        """The stage of the parameter whose gradient a node adds up."""
        name, followed = None, node
        while node in self.grown and name is None:  # reductions over ranks may come before the whole gradient
            name = followed.meta.get("grad_of")
            readers = [user for user in followed.users if user.op != "output"]
            if len(readers) != 1:
                break
            followed = readers[0]
            if sum(each in self.of_grown for each in followed.all_input_nodes) > 1:
                break  # each stage that reads a tied weight adds up its own
        found = [n for n, declared in self.inputs.items() if declared.name == name and self._params.get(n)]
        return min(self._params[found[0]]) if found else None

    def _stages_with(self, node: fx.Node) -> set[int]:
        """The stages that have a value that backward reads; empty for one that any stage can have."""
        if node in self._available:
            return self._available[node]
        if node in self.stages or node not in self.fixed or node in self.free:
            return set()
        homes = [self._params[each] for each in ancestors([node]) if each in self._params and self._is_kept(each)]
        return set[int].intersection(*homes) if homes else set()

    def _is_kept(self, node: fx.Node) -> bool:
        return node.op == "placeholder" and not self._is_everywhere(node)

    def _move_down(self, nodes: Sequence[fx.Node]) -> None:
        """Move what reads gradients alone to the stage of its readers, where that sends no more than before."""
        moved = True
        while moved:
            moved = False
            for node in reversed(nodes):
                reads = [each for each in node.all_input_nodes if each in self.stages]
                readers = [self.stages[each] for each in node.users if each in self.stages]
                rest = [each for each in node.all_input_nodes if each not in self.free and each not in reads]
                lower = max(readers, default=self.count)
                fixed = is_collective(node) or is_wait(node) or node.target is operator.getitem or bool(rest)
                if fixed or lower >= self.stages[node] or any(source_of(each) in self._available for each in reads):
                    continue
                sent = sum(self.agreed.bytes(each) for each in reads if lower not in self._readers(each, node))
                if sent <= self.agreed.bytes(node) and all(
                    isinstance(each.meta.get("val"), torch.Tensor) for each in reads
                ):
                    self.stages[node], moved = lower, True

    def _of_weights(self, nodes: Sequence[fx.Node]) -> set[fx.Node]:
        """Backward nodes that no other stage waits for: gradients of weights."""
        awaited, found = set[fx.Node](), set[fx.Node]()
        for node in reversed(nodes):
            users = [user for user in node.users if user in self.stages]
            if any(user in awaited or self.stages[user] != self.stages[node] for user in users):
                awaited.add(node)
        for node in nodes:
            follows = node.target is operator.getitem or is_wait(node)
            if node.all_input_nodes[0] in found if follows else node not in awaited:
                found.add(node)
        return found

    def _readers(self, node: fx.Node, but: fx.Node) -> set[int]:
        return {self.stages[each] for each in node.users if each in self.stages and each is not but}

    # The update

    def _homes(self) -> dict[str, Ranks]:
        """State lives where forward and backward read it; what belongs to a parameter, or averages it, with that.

        State that has a home stays there if this step reads it nowhere else. A step that trains nothing divides none.
        """
        every, read = frozenset(range(self.ranks)), self._read_at()
        found: dict[str, Ranks] = {}
        state = [(node, declared) for node, declared in self.inputs.items() if self._has_home(declared)]
        trains = any(declared.role is Role.PARAMETER and declared.name in self.written for _, declared in state)
        for node, declared in state:
            if not declared.shape or self._is_everywhere(node) or declared.role is Role.SCALER:
                found[declared.name] = every
            elif declared.of is None or declared.role is Role.BUFFER:
                needed = frozenset(stage % self.ranks for stage in read.get(node) or ())
                kept = self.kept.get(declared.name)
                if kept is not None and needed <= kept:
                    found[declared.name] = kept
                elif kept is None and not trains:
                    found[declared.name] = every
                elif needed:
                    found[declared.name] = needed
        for node, declared in state:
            home = found.get(declared.of or "") or self._home_beside(node, found)
            found.setdefault(declared.name, home or frozenset({0}))
        return found

    def _home_beside(self, node: fx.Node, homes: Mapping[str, Ranks]) -> Ranks | None:
        """The home of the nearest state of the same shape that the update computes with together with this one."""
        seen, pending = {node}, [node]
        for each in pending:
            near = dict.fromkeys([*each.all_input_nodes, *each.users])
            for other in near:
                if other in seen or self.agreed.shape(other) != self.agreed.shape(node):
                    continue
                seen.add(other)
                declared = self.inputs.get(other)
                if declared is not None and declared.name in homes:
                    return homes[declared.name]
                if declared is None and other not in self.run_each:
                    pending.append(other)
        return None

    def _place_update(self, homes: Mapping[str, Ranks]) -> dict[fx.Node, Ranks]:
        """Place the update: a node that several ranks can compute where it is read, one that joins ranks on one.

        ``grown`` nodes, which are complete then, are where they add up.
        """
        every = frozenset(range(self.ranks))
        needed = _until([value for value, _ in self.outputs], self.grown)
        possible: dict[fx.Node, Ranks] = {}
        own: dict[fx.Node, Ranks] = {}  # state, and its new values, which are computed where it is kept
        for node in self.nodes:
            if node not in needed:
                continue
            if node in self.grown:
                possible[node] = frozenset({self.stages[node] % self.ranks})
            elif node in self.rows:
                possible[node] = frozenset({self.stages[self.rows[node]] % self.ranks})
            elif node.op == "placeholder":
                possible[node] = homes.get(self.inputs[node].name, every)
                if self._is_kept(node) and self.inputs[node].shape:
                    own[node] = possible[node]
            else:
                self._check_known(node)
                shape = self.agreed.shape(node)
                of_own = [
                    own[each] for each in node.all_input_nodes if each in own and self.agreed.shape(each) == shape
                ]
                both = every.intersection(*(possible[each] for each in node.all_input_nodes))
                possible[node] = both or frozenset({self._with_most(node, possible)})
                if of_own:
                    possible[node] = own[node] = of_own[0]
                self._check_state(node, possible)
        wanted: dict[fx.Node, set[int]] = {}
        for value, output in self.outputs:
            of_state = homes.get(output.name if output.kind is OutputKind.UPDATE else output.of or "", every)
            wanted.setdefault(value, set()).update(of_state if output.shape else every)
        update: dict[fx.Node, Ranks] = {}
        for node in reversed(self.nodes):
            if node in needed:
                update[node] = (possible[node] & wanted.get(node, set())) or frozenset({min(possible[node])})
                if node not in self.grown:
                    for each in node.all_input_nodes:
                        wanted.setdefault(each, set()).update(update[node])
        return update

    def _with_most(self, node: fx.Node, possible: Mapping[fx.Node, Ranks]) -> int:
        sizes: dict[int, int] = {}
        for each in node.all_input_nodes:
            for stage in possible[each]:
                sizes[stage] = sizes.get(stage, 0) + self.agreed.bytes(each)
        return max(sizes, key=lambda stage: (sizes[stage], stage))

    def _check_state(self, node: fx.Node, possible: Mapping[fx.Node, Ranks]) -> None:
        """Raise ``PartitionError`` where a node reads state of several stages as it lies."""
        state = [each for each in node.all_input_nodes if each.op == "placeholder" and self._is_kept(each)]
        if any(not possible[node] <= possible[each] for each in state):
            raise PartitionError(f"{described(node)} reads parameters or state of several stages of a pipeline at once")

    def _check_known(self, node: fx.Node) -> None:
        if node in self.run_each and node not in self.fixed:
            raise PartitionError(f"{described(node)} is read behind all micro-batches, of which each has its own")


def source_of(node: fx.Node) -> fx.Node:
    """The source of a view, which is what stages send."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _until(values: Iterable[fx.Node], ends: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """``values`` and all that they depend on, but for what ``ends`` depend on."""
    found, pending = set[fx.Node](), list(values)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [] if node in ends else node.all_input_nodes
    return found
