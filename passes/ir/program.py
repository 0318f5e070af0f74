"""``Program``: the one central type, from capture to lowering.

A graph of flat tensors in and flat tensors out, with a role, a name and a placement for each of them. Its checker is in
``check.py``, its printer in ``printer.py``, its interpreter in ``interpret.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, cast

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard

from .._torch import LazyGraphModule, Placement
from ..runtime.arena import aligned
from .collectives import Collective, collectives_in, group_of, kind_of, reduction_of
from .rates import UNMEASURED, Rate
from .roles import AxisRole, InputSource, Memory, Role

Placements = tuple[Placement, ...]  # one per mesh axis; empty before partition

LAST = "last"  # the role of a program among those that a call runs, where it runs earlier ones before it


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as this rank sees it: ``group`` is the process group's name in collectives.

    ``backend`` is what moves the data: "gloo", "nccl", "fake", or empty if it is not known. ``shared``: the ranks
    of each group along this axis are connected, and share memory (``local_peers.py``). ``gathers``: the name of a
    second process group of the same ranks, for what is gathered, so that it need not stand in line behind what is
    reduced; empty if there is none. Where reductions are left in flight, it is for all that is waited for, and of
    stages on NCCL for messages to earlier ranks.
    ``roles``: what the parallel mode uses the axis for, in its order. ``ordered``: sums along it add up what ranks have
    in one order, to the last bit, so that nothing else may become a summand.
    """

    name: str
    size: int
    group: str
    coordinate: int = 0
    backend: str = ""
    shared: bool = False
    rate: Rate = UNMEASURED
    gathers: str = ""
    roles: tuple[AxisRole, ...] = ()
    ordered: bool = False

    @cached_property
    def of_ranks(self) -> bool:
        """Whether its parts are ranks."""
        return all(role.of_ranks for role in self.roles)

    @cached_property
    def at_once(self) -> bool:
        """Whether its parts compute at the same time; else one after the other."""
        return all(role.at_once for role in self.roles)

    @cached_property
    def rows_move(self) -> bool:
        """Whether rows of activations go to parameters that are split over it."""
        return any(role.rows_move for role in self.roles)

    @cached_property
    def sums_last(self) -> bool:
        """Whether sums along it are computed after those along other axes that leave each rank a part."""
        return any(role.sums_last for role in self.roles)


@dataclass(frozen=True)
class Mesh:
    """The mesh of a program: plain data, no process group is needed to look at it.

    ``subgroups``: parts of axes, called ``"dp/2"``, that the program communicates in, too: here each group of 2
    consecutive ranks along ``dp``.
    """

    axes: tuple[Axis, ...] = ()
    subgroups: tuple[Axis, ...] = ()

    @property
    def size(self) -> int:
        """The number of ranks: not of parts that run one after the other."""
        return math.prod(axis.size for axis in self.axes if axis.of_ranks)

    def axes_with(self, *roles: AxisRole) -> tuple[int, ...]:
        """The positions of the axes that have one of these roles, in order."""
        return tuple(k for k, axis in enumerate(self.axes) if any(role in axis.roles for role in roles))

    def axis_of_group(self, group: str) -> Axis | None:
        """The axis, or part of one, whose process group has this name."""
        return next((a for a in (*self.axes, *self.subgroups) if group and group in (a.group, a.gathers)), None)

    def subgroup(self, axis: str, size: int) -> Axis:
        """The part of ``axis`` whose groups have ``size`` ranks."""
        return next(each for each in self.subgroups if each.name == f"{axis}/{size}")

    def __str__(self) -> str:
        return " x ".join(f"{axis.name}={axis.size}" for axis in self.axes) or "one rank"


@dataclass(frozen=True)
class Input:
    """The declaration of one placeholder.

    ``shape`` is the global shape; a hyper-parameter is a plain float and has no ``dtype``. ``of`` names the parameter
    that optimizer state or a gradient belongs to. ``in_place`` says that the graph itself writes the update into it.
    ``parts``: the inputs that this one holds, one after the other, if it is the flat storage of several. ``memory``:
    where it lives; the update of what lives on the host is computed there. ``numbers``: the names of those of a call
    that it brings to the device, if it does; its memory is then the same at every call. ``wire``: the dtype in which
    ranks sent what they hold of a parameter, if this is a master copy of it.
    """

    role: Role
    name: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    placement: Placements = ()
    of: str | None = None
    in_place: bool = False
    parts: tuple[Part, ...] = ()
    memory: Memory = Memory.DEVICE
    numbers: tuple[str, ...] = ()
    wire: torch.dtype | None = None

    @property
    def inside(self) -> list[Input]:
        """The inputs that lie in this one, or itself."""
        return [part.input for part in self.parts] or [self]


@dataclass(frozen=True)
class Part:
    """An input that lies in a flat one: ``numel`` elements from ``offset`` on, in the local ``shape``.

    A graph shows it as ``view(split_with_sizes(flat, sizes)[k], shape)``, once it is read or updated.
    """

    input: Input
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements on this rank."""
        return math.prod(self.shape)


class OutputKind(StrEnum):
    """Where an output goes."""

    RESULT = "result"  # a leaf of what the step returns
    UPDATE = "update"  # the new value of the input with the same name
    NEW = "new"  # state that did not exist before this call
    CHANNEL = "pending"  # what another program of a bundle takes as an input of this name


@dataclass(frozen=True)
class Output:
    """The declaration of one output: a result, the update of the input ``name``, new state, or a pending value.

    ``replaces``: a gradient in the place of one that the step clears before it reads it, and that lives until state is
    written. The caller copies it, before another program runs: it may lie in planned memory.
    """

    kind: OutputKind
    name: str
    role: Role = Role.UNKNOWN
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    placement: Placements = ()
    of: str | None = None
    pending: bool = False  # a gradient that stays a sum over ranks, which a later program reduces
    replaces: bool = False


@dataclass(frozen=True)
class Spread:
    """How ranks divide the runs of a call: this is number ``rank`` of the ``ranks`` in ``group``.

    All run equally often: a rank with fewer runs of its own than another first runs one for nothing. Before that,
    arguments are gathered; ``rows``: how many all ranks have of each.
    """

    rank: int
    ranks: int
    group: str
    rows: Mapping[str, int]

    def runs(self, count: int, rank: int | None = None) -> range:
        """The numbers of the runs of a rank, by default this one, of ``count``."""
        rank = self.rank if rank is None else rank
        return range(rank * count // self.ranks, (rank + 1) * count // self.ranks)


@dataclass(frozen=True)
class MicroBatches:
    """How often a program runs in a call, and what each run takes.

    Of the inputs in ``split``, by name, run k takes the k-th of ``count`` parts along a dim, cut as by ``torch.chunk``.
    An accumulator (an input of that role) is zero in the first run, and in the others what the run before made of it.
    Results in ``joined`` are rows of all runs, one after the other along a dim. All other outputs, state included, are
    those of the last run. ``whole``: inputs that are all of an argument, by name, with that of the argument.
    ``tree``: where sums are those of a balanced tree, by the name of an accumulator, which then holds the first run of
    a pair, the accumulators of the first pair of two, of the first two pairs of four, and so on (``ascend``).
    ``spread``: where ranks divide the runs; the accumulators above one are then those of a rank's subtrees, in order.
    ``together``: how many parts each run computes side by side.
    """

    count: int
    split: Mapping[str, int]
    whole: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, int] = field(default_factory=dict)
    tree: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    spread: Spread | None = None
    together: int = 1

    def __str__(self) -> str:
        split = ", ".join(f"{name} along dim {dim}" for name, dim in self.split.items())
        by = "" if self.spread is None else f", which {self.spread.ranks} ranks divide"
        each = f"{self.together} parts together" if self.together > 1 else "parts"
        return f"runs {self.count} times in a call{by}, on {each} of {split}"

    @property
    def runs(self) -> range:
        """The numbers of the runs of this rank."""
        return range(self.count) if self.spread is None else self.spread.runs(self.count)

    def turns(self, earlier: Collection[str]) -> list[tuple[str, int]]:
        """The roles of the programs that this rank runs in a call, in order, each with the number of the run.

        ``earlier``: the roles of those before the last one. These are "accumulating", with the same inputs, if their
        parts are longer, or ``SplitMicroBatches`` has left them accumulators and rows alone. The first one is
        "opening", if it communicates for all of them.
        """
        numbers = [*self.idle_runs, *self.runs]
        roles = ["accumulating" if "accumulating" in earlier else LAST] * (len(numbers) - 1)
        if roles and "opening" in earlier:
            roles[0] = "opening"
        return list(zip([*roles, LAST], numbers, strict=True))

    @property
    def idle_runs(self) -> list[int]:
        """The numbers of the runs before these, whose sums are dropped: the rank takes part in what others gather."""
        most = len(self.runs) if self.spread is None else -(-self.count // self.spread.ranks)
        return [self.runs.start] * (most - len(self.runs))

    def join(self, outputs: Sequence[Output], last: Sequence[Any], before: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The values of ``outputs`` in the last run, with the rows of the runs ``before`` it, by name of the result."""
        return [
            torch.cat([*(each[output.name] for each in before), value], dim=self.joined[output.name])
            if output.name in self.joined
            else value
            for output, value in zip(outputs, last, strict=True)
        ]

    def of_run(self, declared: Sequence[Input], inputs: Sequence[Any], k: int) -> list[Any]:
        """The inputs of run ``k``, of those of a call."""
        return [self._input(each, value, k) for each, value in zip(declared, inputs, strict=True)]

    def _input(self, declared: Input, value: Any, k: int) -> Any:
        if declared.role.source is InputSource.RUN:
            return k
        if declared.name in self.split:
            dim = self.split[declared.name]
            step = -(-value.shape[dim] // self.count)
            value = value.narrow(dim, k * step, min(step, value.shape[dim] - k * step)).contiguous()
        is_given = self.tree and isinstance(value, torch.Tensor) and declared.role in (Role.BATCH, Role.ARGUMENT)
        return aligned(value) if is_given else value


@dataclass
class Program:
    """A train step as one graph.

    ``inputs`` and ``outputs`` stand in the order of the graph's placeholders and of its output's arguments. The graph
    is functional (an update is an output) until the pass that writes updates in place. ``history`` has one line a
    stage. Each node's ``meta`` has ``val`` (this rank's fake value) and, where known, ``phase``, ``module``, ``source``
    (the user's line), ``placement``, ``collective`` and others: ``meta.py`` declares them all. Keys of your own need a
    dot in their names.
    ``units`` stand in the order in which their gradients come about, the parameters of each in order of registration.
    """

    graph_module: fx.GraphModule
    inputs: list[Input]
    outputs: list[Output]
    mesh: Mesh = field(default_factory=Mesh)
    history: list[str] = field(default_factory=list)
    name: str = "program"
    notes: list[str] = field(default_factory=list)  # sentences for the report: what ran whole, and what it cost
    units: tuple[tuple[str, ...], ...] = ()  # parameters by name that are communicated and stored together
    reshard: frozenset[str] = frozenset()  # parameters that are gathered again for backward, instead of kept whole
    gathers_once: bool | None = None  # whether runs of a call gather parameters once in it; None: nothing has decided
    kept_by: Mapping[str, int] = field(default_factory=dict)  # of these, how many ranks keep one together, by name
    prefetch: tuple[int, int] = (1, 1)  # how many units ahead such gathers may start, in forward and in backward
    limit_gathers: int | None = None  # how many units may be gathered at once, with the one that is read next
    stored: tuple[tuple[str, ...], ...] = ()  # state that makes up one storage already, in the order in which it lies
    fixed: frozenset[str] = frozenset()  # state that has to stay where it lies
    annotations: Any = None  # what users asked for modules, for the parallel mode to read
    micro_batches: MicroBatches | None = None  # if it runs several times in a call, how
    earlier: Mapping[str, Program] = field(default_factory=dict)  # what a call runs before it, by role, if it is other
    writes: frozenset[str] | None = None  # all that it updates, where that is declared, as of an earlier program
    stages: Any = None  # if ranks run stages of it in its place, the bundle of their programs
    schedules: tuple[Any, ...] = ()  # of a pipeline, those that fit the step, the one that it has first
    room: float | None = None  # rows of experts that a rank has room for, as a multiple of the mean; None: for all
    same_bits: bool = False  # it has the same bits on any number of ranks: values begin at multiples of ``ALIGNMENT``
    assignment: Any = None  # how each captured node is computed on the ranks, if a partitioner noted it

    @classmethod
    def from_graph(
        cls,
        graph_module: fx.GraphModule,
        roles: Mapping[str, Role] | Sequence[Role] | None = None,
        mesh: Mesh | None = None,
    ) -> Program:
        """Take any FX graph with functional collectives. A placeholder without a role is "unknown".

        ``roles``: by placeholder name, or one per placeholder in order. All outputs are results. Raises
        ``ValueError`` where ``roles`` does not fit the placeholders.
        """
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        by_name = _roles_by_name([node.name for node in placeholders], roles)
        inputs = [_input_of(node, by_name.get(node.name, Role.UNKNOWN)) for node in placeholders]
        values = output_values(graph_module.graph)
        outputs = [Output(OutputKind.RESULT, f"result.{k}", *_described(value)) for k, value in enumerate(values)]
        program = cls(graph_module, inputs, outputs, mesh or Mesh())
        program.note_collectives()
        return program

    @property
    def graph(self) -> fx.Graph:
        """The FX graph."""
        return self.graph_module.graph

    @property
    def node_count(self) -> int:
        """The number of nodes."""
        return len(self.graph.nodes)

    @property
    def placeholders(self) -> list[fx.Node]:
        """The placeholders, in the order of ``inputs``."""
        return list(self.graph.find_nodes(op="placeholder"))

    @property
    def output_node(self) -> fx.Node:
        """The one output node; its first argument is the flat tuple of ``outputs``."""
        return self.graph.output_node()

    def output_values(self) -> tuple[Any, ...]:
        """The values returned, one per entry of ``outputs``."""
        return output_values(self.graph)

    def living_on(self) -> set[fx.Node]:
        """The values returned whose memory lives on after the call: all but what the caller copies."""
        pairs = zip(self.output_values(), self.outputs, strict=True)
        return {value for value, output in pairs if isinstance(value, fx.Node) and not output.replaces}

    def set_outputs(self, values: Sequence[Any], outputs: Sequence[Output]) -> None:
        """Replace what the graph returns, and its description."""
        assert len(values) == len(outputs), "one description per output"
        self.output_node.args = (tuple(values),)
        self.outputs = list(outputs)

    def positions(self) -> dict[str, int]:
        """The position of every input, by name. Made anew at each call, from what ``inputs`` is then: ask once."""
        return {declared.name: position for position, declared in enumerate(self.inputs)}

    def members(self) -> dict[str, Program]:
        """The programs that this rank runs in a call, by role: this one and earlier ones, or stages in their place."""
        if self.stages is not None:
            return {role: self.stages.programs[role] for role in self.stages.roles_of(self)}
        return {LAST: self, **self.earlier}

    def in_order(self) -> list[Program]:
        """The programs that this rank runs in a call, one after the other; each as one that runs once."""
        if self.stages is not None:
            return [self.stages.programs[role] for role in self.stages.order_of(self)]
        if self.micro_batches is None:
            return [self]
        alone = {**self.earlier, LAST: replace(self, micro_batches=None, earlier={})}
        return [alone[role] for role, _ in self.micro_batches.turns(self.earlier)]

    @property
    def how_it_runs(self) -> list[str]:
        """A line for people, where a call runs it several times."""
        return [] if self.micro_batches is None else [str(self.micro_batches)]

    def map(self, rewritten: Callable[[Program], Program]) -> Program:
        """The same, with this program and all others of this rank as a function makes them."""
        earlier = {role: rewritten(each) for role, each in self.earlier.items()}
        stages = None if self.stages is None else self.stages.mapped_for(self, rewritten)
        return replace(rewritten(self), earlier=earlier, stages=stages)

    def with_facts(self, **facts: Any) -> Program:
        """The same with these fields, which earlier programs of a call have, too."""
        earlier = {role: replace(each, **facts) for role, each in self.earlier.items()}
        return replace(self, earlier=earlier, **facts)

    def varies(self, declared: Input) -> bool:
        """Whether each run of a call may find another value of an input."""
        micro = self.micro_batches
        is_cut = micro is not None and declared.name in micro.split
        return is_cut or declared.role.is_given_by_runs

    def varying(self) -> set[fx.Node]:
        """The nodes that follow from inputs that vary, and may have another value in each run of a call."""
        inputs = zip(self.inputs, self.placeholders, strict=True)
        found = {node for declared, node in inputs if self.varies(declared)}
        for node in self.graph.nodes if found else ():
            if not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found

    def values(self) -> dict[str, tuple[Input, fx.Node]]:
        """Every input that is no flat storage, and in the place of one the parts that are read; each with its node."""
        found: dict[str, tuple[Input, fx.Node]] = {}
        for declared, node in zip(self.inputs, self.placeholders, strict=True):
            found |= _shown(declared.parts, node) if declared.parts else {declared.name: (declared, node)}
        return found

    def taken_from(self, declared: Input) -> str:
        """The name of the value that an input takes; that of an argument for all of its rows beside a micro-batch's."""
        return (
            declared.name if self.micro_batches is None else self.micro_batches.whole.get(declared.name, declared.name)
        )

    @property
    def code(self) -> str:
        """The graph as torch.fx writes it, from which nothing is compiled."""
        return self.graph.python_code("self").src

    @property
    def draws(self) -> bool:
        """Whether a call brings it a seed."""
        return any(declared.role is Role.SEED for declared in self.inputs)

    def collectives(self) -> list[fx.Node]:
        """The nodes that start a collective, in order."""
        return collectives_in(self.graph)

    def note_collectives(self) -> None:
        """Describe, in ``meta["collective"]``, each collective that nobody described, from its op alone."""
        for node in self.collectives():
            if "collective" not in node.meta:
                axis = self.mesh.axis_of_group(group_of(node))
                name = axis.name if axis else group_of(node)
                node.meta["collective"] = Collective(kind_of(node), name, reduction_of(node))

    def copy(self) -> Program:
        """A copy whose graphs, those of all that this rank runs, can be edited without touching these.

        Tensors and fakes are shared.
        """
        return self.map(Program._copied)

    def _copied(self) -> Program:
        graph = fx.Graph()
        returned, _ = cast(tuple[Any, fx.Node], graph.graph_copy(self.graph, {}, return_output_node=True))
        graph.output(returned)
        return self.with_graph(graph, self.inputs, self.outputs)

    def with_graph(self, graph: fx.Graph, inputs: Sequence[Input], outputs: Sequence[Output]) -> Program:
        """The same program with another graph, whose inputs and outputs these are."""
        return replace(
            self,
            graph_module=LazyGraphModule(self.graph_module, graph),
            inputs=list(inputs),
            outputs=list(outputs),
            history=list(self.history),
            notes=list(self.notes),
        )


def output_values(graph: fx.Graph) -> tuple[Any, ...]:
    """The values that a graph returns, as a flat tuple."""
    returned = graph.output_node().args[0]
    return tuple(returned) if isinstance(returned, (list, tuple)) else (returned,)


def replicated(mesh: Mesh) -> Placements:
    """Replicated over every axis of ``mesh``."""
    return tuple(Replicate() for _ in mesh.axes)


def is_sharded(placement: Placements) -> bool:
    """Whether some axis splits the tensor."""
    return any(isinstance(p, Shard) for p in placement)


def is_pending(placement: Placements) -> bool:
    """Whether the tensor is a sum, or another reduction, of one summand a rank along some axis."""
    return any(isinstance(p, Partial) for p in placement)


def _shown(parts: Sequence[Part], flat: fx.Node) -> dict[str, tuple[Input, fx.Node]]:
    """The parts that the graph shows, each with the first node that does."""
    splits = (user for user in flat.users if user.target is torch.ops.aten.split_with_sizes.default)
    pieces = {piece.args[1]: piece for split in splits for piece in split.users}
    found = {}
    for k, part in enumerate(parts):
        users = pieces[k].users if k in pieces else ()
        views = [user for user in users if user.target is torch.ops.aten.view.default]
        views = [view for view in views if tuple(cast(Any, view.args[1])) == part.shape]
        if views:
            found[part.input.name] = (part.input, min(views))
    return found


def is_even(shape: Sequence[int], placement: Placements, mesh: Mesh) -> bool:
    """Whether all ranks have equally much of a tensor of this global shape, and none of them nothing."""
    if math.prod(shape) == 0:
        return False
    ranks = [1] * len(shape)
    for entry, axis in zip(placement, mesh.axes, strict=False):
        if isinstance(entry, Shard):
            ranks[entry.dim] *= axis.size
    return all(size % count == 0 for size, count in zip(shape, ranks, strict=True))


def _roles_by_name(names: list[str], roles: Mapping[str, Role] | Sequence[Role] | None) -> dict[str, Role]:
    if roles is None:
        return {}
    if isinstance(roles, Mapping):
        unknown = sorted(set(roles) - set(names))
        if unknown:
            raise ValueError(f"roles name placeholders that the graph does not have: {unknown}; it has {names}")
        return dict(roles)
    if len(roles) != len(names):
        raise ValueError(f"expected one role for each of {len(names)} placeholders, got {len(roles)}")
    return dict(zip(names, roles, strict=True))


def _input_of(node: fx.Node, role: Role) -> Input:
    _, shape, dtype = _described(node)
    return Input(role, node.name, shape, dtype)


def _described(value: Any) -> tuple[Role, tuple[int, ...], torch.dtype | None]:
    """(role, shape, dtype) of what a graph returns."""
    val = value.meta.get("val") if isinstance(value, fx.Node) else None
    if isinstance(val, torch.Tensor):
        return Role.UNKNOWN, tuple(val.shape), val.dtype
    return Role.UNKNOWN, (), None
