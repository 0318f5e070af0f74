"""Generate Python from a program's graph that does at each call only what depends on the call.

The value of a node is *fixed* if it is the same tensor object at every call, as long as state keeps its address: an
input that is state, a view of a fixed tensor, and the result of an op that writes into a fixed tensor. Fixed views are
made once, when the graph is bound to state. The rest runs at every call, as the inner ones of three generated
functions::

    def bind(weight):
        t = torch.t(weight)
        def gradients(x):
            mm = torch.mm(x, t)
            ...
            return [gradient]
        def update(handed):
            [gradient] = handed
            handed.clear()
            add_ = weight.add_(gradient)
            ...
        return gradients, update

``update`` begins with the first write to an input. What lives on from the first half is handed over in a list, which
``update`` empties, so that values end where they did. Between the halves, and in neither of them, ``Bound`` waits for
the other ranks and for background reads of state: each half can be captured whole. The code is bound anew when a state
tensor is another object, or has another address.

On a GPU the code issues what ``passes/schedule/streams.py`` lists, once that was proven free of races.
"""

from __future__ import annotations

import linecache
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, count, takewhile
from operator import is_
from typing import Any, Protocol, cast

import torch
from torch import fx

from passes import Input, PassError, Program, Role
from passes.analysis.aliases import escaping, is_view, storages
from passes.analysis.out_variants import is_constant
from passes.ir.collectives import WAIT, is_collective, is_wait
from passes.ir.effects import mutates, written
from passes.ir.ops import Trait, has
from passes.ir.program import is_sharded
from passes.ir.region import Region, region_of
from passes.ir.region import regions as find_regions
from passes.ir.schemas import nodes_in, schema
from passes.memory.left_behind import in_planned_memory
from passes.runtime.arena import ALIGNMENT, is_unaligned, reserve, view_at, whole
from passes.runtime.host_memory import wait_copy
from passes.runtime.message_collectives import OUT_VARIANTS
from passes.runtime.shared_memory_collectives import PERSISTENT
from passes.runtime.streams import DeviceStreams
from passes.schedule.happens_before import check_streams
from passes.schedule.node_costs import device_of
from passes.schedule.streams import assign_streams, runs_on_streams
from passes.schedule.touched_memory import TouchedMemory

from ..state.background_reads import READS
from ..state.bound_programs import track
from .arenas import Arenas
from .bindings import direct
from .clock import Clock
from .cuda_graphs import Halves, Replay, run_halves
from .island_call import CompiledIsland
from .island_launch import LaunchedIsland
from .stream_lines import StreamLines, allocation, writer

aten = torch.ops.aten

_number = count()
_pointer = torch.Tensor.data_ptr


class Compiles(Protocol):
    """Compiles regions, equal ones once: ``CompiledRegions`` and ``CompiledIslands``."""

    def compiled(self, region: Region) -> Callable[..., Any]:
        """The compiled form of a region."""


class Bound:
    """Runs a graph on the program's inputs. Bound to state at the first call; ``release`` lets go of all of it.

    What the program reserves is ``arenas``'s, and stays reserved between calls.
    """

    def __init__(
        self,
        program: Program,
        arenas: Arenas | None = None,
        commit: Callable[[], None] | None = None,
        clock: Clock | None = None,
        regions: Compiles | None = None,
        device: DeviceStreams | None = None,
        replay: Replay | None = None,
    ) -> None:
        """``commit`` is called between the halves, before the first write; ``clock`` ticks after each node.

        ``regions``: what a backend made of the program's regions, which it makes now. ``device``: has the streams, for
        a program that runs on several. ``replay`` runs the halves, as CUDA graphs. Raises ``PassError`` if the program
        has a race.
        """
        self.replay = replay
        self.regions = regions
        self.arenas = arenas or Arenas()
        self.arenas.users.add(self)
        stays = [is_fixed(node, declared) for node, declared in zip(program.placeholders, program.inputs, strict=True)]
        self._fixed = [k for k, each in enumerate(stays) if each]
        self._given = [k for k, each in enumerate(stays) if not each]
        self._aligned = [program.inputs[k] if program.same_bits else None for k in self._fixed]
        self.clock, text = clock, _Writer(program, self._fixed, self._given, self.arenas, clock)
        if regions is not None:
            text.regions = {region: regions.compiled(region) for region in find_regions(program.graph).values()}
        self.device = None
        if runs_on_streams(program):
            self.device = device or DeviceStreams(device_of(program))
            text.run_on(self.device)
        self._bind, source = text.function()
        self._timed, self._written, self._commit = text.timed, text.written, commit
        self._forget_source = weakref.finalize(self, linecache.cache.pop, source, None)
        self._forget_source.atexit = False
        self.release()
        track(self)

    def close(self) -> None:
        """Let go of the code, too: no later call can run it."""
        self.release()
        self._bind = _closed
        self._forget_source()

    def release(self) -> None:
        """Hold on to no state; the next call binds anew."""
        self._state: list[torch.Tensor] = []
        self._addresses: list[int] | None = None
        self._halves: Halves | None = None
        if self.replay is not None:
            self.replay.release()

    def state(self) -> list[torch.Tensor]:
        """The state that it is bound to."""
        return self._state

    def halves(self, *inputs: Any) -> Halves:
        """The two functions, bound to the state among ``inputs``."""
        state = [inputs[k] for k in self._fixed]
        addresses = list(map(_pointer, state))
        halves = self._halves  # another thread, whose step is compiled, may let go of it meanwhile
        if halves is None or addresses != self._addresses or not all(map(is_, state, self._state)):
            self.release()
            for declared, tensor in zip(self._aligned, state, strict=True):
                _check_aligned(declared, tensor)
            halves = self._bind(*state)
            self._halves, self._state, self._addresses = halves, state, addresses
        return halves

    def given(self, *inputs: Any) -> list[Any]:
        """The inputs that the first half takes, which may be others at each call."""
        return [inputs[k] for k in self._given]

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph, and return its outputs."""
        halves, given = self.halves(*inputs), self.given(*inputs)
        if self.clock is not None:
            self.clock.restart()
        try:
            if self.replay is not None and self.clock is None:
                return self.replay(halves, given, self._state, lambda: self.before_update(*inputs))
            return run_halves(halves, given, lambda: self.before_update(*inputs))
        except BaseException:
            if self.device is not None:
                self.device.join()
            raise

    def before_update(self, *inputs: Any) -> None:
        """Wait until state may be written: for all ranks, and for a save that reads it in the background."""
        if self._commit is not None:
            self._commit()
        if READS.is_active:
            READS.wait(*(inputs[k] for k in self._written))

    def timed(self, program: Program, commit: Callable[[], None] | None, device_type: str) -> Bound:
        """The same, which also measures each node, a region as one."""
        return Bound(program, self.arenas, commit, Clock(device_type), self.regions)

    def taken(self) -> Callable[[], dict[str, float]]:
        """What gives how long each node of the last call took, by its name; of those that run at each call."""
        return self.clock.taken(self._timed) if self.clock is not None else dict

    def seconds(self) -> dict[str, float]:
        """How long each node of the last call took."""
        return self.taken()()


def _check_aligned(declared: Input | None, tensor: torch.Tensor) -> None:
    """Raise ``ValueError`` for state that begins where matrix products round otherwise than on other ranks."""
    if declared is None or declared.role not in (Role.PARAMETER, Role.BUFFER) or is_sharded(declared.placement):
        return
    if is_unaligned(tensor):
        raise ValueError(
            f'expected {declared.name} to begin at a multiple of {ALIGNMENT} bytes with bits="same", but it is a part '
            "of other memory: give it memory of its own before the first step, p.data = p.data.clone()"
        )


def _closed(*state: torch.Tensor) -> Halves:
    raise AssertionError("a program whose model is gone was called")


def is_fixed(node: fx.Node, declared: Input) -> bool:
    """Whether an input is a tensor that outlives a call, and is the same at each call.

    A gradient is another tensor after each call that made one where there was none: a program that is bound to it would
    be bound anew at each update. On a GPU it counts as one that stays, for graphs that are captured with it.
    """
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or (declared.role is Role.GRADIENT and val.device.type == "cpu"):
        return False
    return declared.role.stays or bool(declared.numbers)


def is_taken(node: fx.Node, declared: Input) -> bool:
    """Whether an input is a tensor that the call before has left, and that goes as soon as it has been read.

    It is handed over in a list, from which the code takes it: the caller holds on to arguments until the end.
    """
    return declared.role.is_of_channel and isinstance(node.meta.get("val"), torch.Tensor)


class _Writer:
    """Writes the three functions, node by node. ``written``: the positions of the inputs that ``update`` writes to."""

    def __init__(
        self,
        program: Program,
        fixed: Sequence[int],
        given: Sequence[int],
        arenas: Arenas,
        clock: Clock | None,
    ) -> None:
        self.program, self.arenas = program, arenas
        self.tick, self.timed = clock.tick if clock else None, list[str]()  # the names of nodes, in order
        self.constants = _constants(program.graph)
        self.scope: dict[str, Any] = {}  # values that the text refers to by name: functions, dtypes, modules
        self.named: dict[int, str] = {}
        placeholders = program.placeholders
        self.names = {node: f"{node.name}_" for node in program.graph.nodes}  # no keyword, and no name of ours
        self.prepared: dict[Any, str] = {}  # collectives that are made once and started at each call
        self.arguments = [placeholders[k] for k in fixed], [placeholders[k] for k in given]
        self.fixed = set(self.arguments[0])
        inputs = zip(placeholders, program.inputs, strict=True)
        self.taken = [node for node, declared in inputs if is_taken(node, declared)]
        self.done_once: list[str] = []
        self.each_call: list[str] = []  # the lines of the half that is being written
        self.gradients: list[str] | None = None  # those of the first half, once the second has begun
        self.written: list[int] = []
        self.lines: StreamLines | None = None
        self.regions: dict[Region, Callable[..., Any]] = {}

    def run_on(self, device: DeviceStreams) -> None:
        """Write code that runs on the streams of ``device``."""
        memory = TouchedMemory(self.program.graph)
        streams = assign_streams(self.program, memory)
        check_streams(self.program, streams, memory)
        self.lines = StreamLines(memory, streams, device, self._name)
        self.done_once += self.lines.prepare()

    def function(self) -> tuple[Callable[..., Halves], str]:
        """``bind(*fixed inputs)``, which returns the halves; and the name of its file in ``linecache``."""
        dying = _last_uses(self.program.graph, self.lines.freed if self.lines is not None else set())
        writes = writes_to_inputs(self.program)
        first: Any = next(iter(writes), None)
        to = set(chain.from_iterable(writes.values()))
        self.written = [k for k, node in enumerate(self.program.placeholders) if node in to]
        self._detach()
        self.each_call += [f"{self.names[node]} = {self.names[node]}.pop()" for node in self.taken]
        for node in self.program.graph.nodes:
            if node is first:
                self._begin_update(first)
            if self.gradients is not None and has(node.target, Trait.BEGINS_ANEW):
                raise PassError(
                    f"{node.name} looks whether the program fits the call behind {first.name}, which writes to an "
                    "input: expected it in front of all writes, since a call that another program runs begins anew"
                )
            before = len(self.each_call)
            if self.lines is not None:
                self.each_call += self.lines.before(node, self.names, self.fixed)
            if node.op not in ("placeholder", "output"):
                self._write(node)
            if self.lines is not None:
                self.each_call += self.lines.after(node)
            dead = [self.names[each] for each in dying.get(node, ()) if each not in self.fixed]
            if dead and node.op != "output":
                self.each_call.append(f"del {', '.join(dead)}")
            if self.tick is not None and len(self.each_call) > before:
                self.each_call.append(f"{self._name(self.tick)}()")
                self.timed.append(node.name)
        self._return()
        return _compiled(self._text(), self.scope)

    def _begin_update(self, first: fx.Node) -> None:
        """Hand over what has a name at the end of the first half; write the second one from here on."""
        dead = {name for line in self.each_call if line.startswith("del ") for name in line[4:].split(", ")}
        nodes = takewhile(lambda node: node is not first, self.program.graph.nodes)
        named = ["compute"] if self.lines is not None and self.lines.has_begun else []
        named += [self.names[node] for node in nodes if node not in self.fixed]
        handed = f"[{', '.join(name for name in named if name not in dead)}]"
        self.gradients = [*self.each_call, f"return {handed}"]
        self.each_call = [f"{handed} = handed", "handed.clear()"]

    def _detach(self) -> None:
        """Compute with detached state, so that autograd sees none of it; the state itself is returned.

        A view of a parameter that lives on raises once it is looked at (``is_leaf``, say), since that was written to.
        """
        self.given_names = {node: self.names[node] for node in self.arguments[0]}
        for node, name in self.given_names.items():
            self.names[node] = f"{name}data"
            self.done_once.append(f"{name}data = {self._name(torch.Tensor.detach)}({name})")

    def _write(self, node: fx.Node) -> None:
        line = f"{self.names[node]} = {self._call(node)}{_comment(node)}"
        if self._is_fixed(node):
            self.fixed.add(node)
            self.done_once.append(line)
            return
        if self.lines is not None and (_waits(node) or self.lines.on(node)):
            self._write_on_stream(node, self.lines.on(node))
            return
        if (island := self._compiled_island(node)) is not None:
            self._write_island(node, island)
            return
        if node.target in PERSISTENT and self._all_fixed(node.all_input_nodes):
            self._prepare(node)
            return
        target = _returned_argument(node)
        if target is not None and self._all_fixed(nodes_in(target)):  # runs each time, but its result is known before
            self.fixed.add(node)
            self.done_once.append(f"{self.names[node]} = {self._value(target)}")
            line = f"{self.prepared[target]}.wait()" if target in self.prepared else self._call(node)
            line += _comment(node)
        self.each_call.append(line)

    def _write_on_stream(self, node: fx.Node, on: str) -> None:
        """Issue a transfer on its stream; a wait stands for its operand, since stream operations do the waiting."""
        name, target = self.names[node], _returned_argument(node)
        if target is not None and self._all_fixed(nodes_in(target)):
            self.fixed.add(node)
            self.done_once.append(f"{name} = {self._value(target)}")
        elif target is not None:
            self.each_call.append(f"{name} = {self._value(target)}")
        if _waits(node):
            return
        arguments, make = self._arguments(node), allocation(node)
        if make is not None:
            self.each_call.append(f"{name} = {self._name(make)}({arguments})")
            arguments += f", out={name}"
        done = f"; {self._name(WAIT)}({name})" if is_collective(node) else ""
        self.each_call.append(f"{on}{self._name(writer(node))}({arguments}){done}{_comment(node)}")

    def _prepare(self, node: fx.Node) -> None:
        """Make a collective once, and start it at each call: its operand and its result are always the same."""
        work = self.prepared[node] = f"{node.name}_work"
        self.done_once.append(f"{work} = {self._name(PERSISTENT[node.target])}({self._arguments(node)})")
        self.done_once.append(f"{self.names[node]} = {self._value(node.kwargs['out'])}")
        self.each_call.append(f"{work}.start()")
        self.fixed.add(node)

    def _compiled_island(self, node: fx.Node) -> CompiledIsland | LaunchedIsland | None:
        region = region_of(node)
        made = self.regions.get(region) if region is not None else None
        return made if isinstance(made, (CompiledIsland, LaunchedIsland)) else None

    def _write_island(self, node: fx.Node, island: CompiledIsland | LaunchedIsland) -> None:
        """Bind an island to all that never moves once, and call it with the rest."""
        work, bind = f"{node.name}_work", self._name(island.bind)
        operands = cast(list[fx.Node], list(node.args))  # some twice, where values turned out to be equal
        vals = self._name([each.meta["val"] for each in cast(Region, node.target).placeholders])
        fixed = [each if each in self.fixed else None for each in operands]
        self.done_once.append(f"{work} = {bind}({self._value(fixed)}, {vals})")
        given = [each for each in operands if each not in self.fixed]
        self.each_call.append(f"{work}({', '.join(map(self._value, given))}){_comment(node)}")
        outs = tuple(written(node))
        lines = self.done_once if self._all_fixed(outs) else self.each_call
        lines.append(f"{self.names[node]} = {self._value(outs)}")
        if self._all_fixed(outs):
            self.fixed.add(node)

    def _is_fixed(self, node: fx.Node) -> bool:
        if node in self.constants or node.target is reserve:
            return True
        views = node.target in (view_at, whole) or (is_view(node) and not _waits(node) and not mutates(node))
        return views and self._all_fixed(node.all_input_nodes)

    def _all_fixed(self, nodes: Iterable[fx.Node]) -> bool:
        return all(node in self.fixed for node in nodes)

    def _return(self) -> None:
        """Return a new object for each view at each call: the user may keep it, or write to it.

        But for those of an arena, which the caller copies.
        """
        returned, program = self.program.output_node.args[0], self.program
        copied = {v for v, copied in zip(program.output_values(), in_planned_memory(program), strict=True) if copied}
        is_view = {node: node in self.fixed and node.op != "placeholder" for node in nodes_in(returned)}
        views = [node for node, found in is_view.items() if found and node not in copied]
        for node in dict.fromkeys(views):
            self.each_call.append(f"{self.names[node]}_own = {self._name(aten.alias.default)}({self.names[node]})")
        own = {node: f"{self.names[node]}_own" for node in views}
        self.names |= own | self.given_names
        self.each_call.append(f"return {self._value(returned)}")

    def _call(self, node: fx.Node) -> str:
        if node.target is reserve:
            return f"{self._name(self.arenas)}.reserve({self._arguments(node)})"
        if node.op == "get_attr":
            return f"{self._name(operator.attrgetter(str(node.target)))}({self._name(self.program.graph_module)})"
        if node.op == "call_module":
            return f"{self._name(self.program.graph_module.get_submodule(str(node.target)))}({self._arguments(node)})"
        if node.op == "call_method":
            return f"{self._value(node.args[0])}.{node.target}({self._arguments(node, skip=1)})"
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            return f"{self._value(node.args[0])}[{self._value(node.args[1])}]"
        return f"{self._name(self._function(node))}({self._arguments(node)})"

    def _function(self, node: fx.Node) -> Callable[..., Any]:
        """The function that computes a node; a functional collective of torch through ours, which says who is lost."""
        if (region := region_of(node)) is not None:
            return self.regions.get(region, region)
        out_variant = OUT_VARIANTS.get(node.target)
        return direct(node) if out_variant is None else partial(_into_new, out_variant, node.meta["val"])

    def _arguments(self, node: fx.Node, skip: int = 0) -> str:
        positional = [self._value(value) for value in node.args[skip:]]
        return ", ".join([*positional, *(f"{name}={self._value(value)}" for name, value in node.kwargs.items())])

    def _value(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.names[value]
        if type(value) is tuple:
            return "(" + "".join(f"{self._value(each)}, " for each in value) + ")"
        if isinstance(value, list):
            return "[" + ", ".join(map(self._value, value)) + "]"
        if isinstance(value, slice):
            return f"slice({', '.join(map(self._value, (value.start, value.stop, value.step)))})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {self._value(each)}" for key, each in value.items()) + "}"
        if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
            return repr(value)
        return self._name(value)

    def _name(self, value: Any) -> str:
        """The name in the text for a value that has no literal."""
        if id(value) not in self.named:
            name = getattr(value, "__name__", type(value).__name__).replace(".", "_")
            name = name if name.isidentifier() else "value"
            self.named[id(value)] = f"{name}_{len(self.scope)}"
            self.scope[self.named[id(value)]] = value
        return self.named[id(value)]

    def _text(self) -> str:
        bound, given = [", ".join(self.names[node] for node in each) for each in self.arguments]
        first = self.each_call if self.gradients is None else self.gradients
        inner = [f"def gradients({given}):", *(f"    {line}" for line in first)]
        if self.gradients is not None:
            inner += ["def update(handed):", *(f"    {line}" for line in self.each_call)]
        inner.append(f"return gradients, {'update' if self.gradients is not None else None}")
        lines = [_SHORT_BLOCK, *self.done_once, *inner]
        return "\n".join([f"def bind({bound}):", *(f"    {line}" for line in lines), ""])


# Ends the first basic block, in front of which CPython's compiler puts an instruction for each name that the halves
# read, and moves the block each time: with the lines of ``bind`` in it, 20 layers with experts took 1.7 s and not 0.5.
_SHORT_BLOCK = "for _ in (): pass"


def _comment(node: fx.Node) -> str:
    """The user's line, for the traceback of an op that fails on the data of a call."""
    return f"  # {node.meta['source']}" if node.meta.get("source") else ""


def _into_new(out_variant: Callable[..., Any], like: torch.Tensor, *args: Any) -> Any:
    return out_variant(*args, out=torch.empty(like.shape, dtype=like.dtype, device=like.device))


def writes_to_inputs(program: Program) -> dict[fx.Node, list[fx.Node]]:
    """The nodes that write to inputs, in order, and the inputs that each writes to; what runs hand on is no state."""
    found = storages(program.graph)
    inputs: dict[fx.Node, list[fx.Node]] = {}  # by storage
    for node, declared in zip(program.placeholders, program.inputs, strict=True):
        for storage in () if declared.role.is_carried else found[node]:
            inputs.setdefault(storage, []).append(node)
    writes: dict[fx.Node, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if mutates(node):
            targets = written(node) or node.all_input_nodes
            touched = [each for target in targets for storage in found[target] for each in inputs.get(storage, ())]
            if touched:
                writes[node] = list(dict.fromkeys(touched))
    return writes


def _constants(graph: fx.Graph) -> set[fx.Node]:
    """The small tensors that are the same at every call: made from nothing, never written to, and not handed out."""
    found = storages(graph)
    touched = escaping(graph, found)
    for node in graph.nodes:
        if mutates(node):
            touched.update(*(found[each] for each in node.all_input_nodes))
    return {node for node in graph.nodes if is_constant(node) and node not in touched}


def _returned_argument(node: fx.Node) -> Any:
    """The argument that a node returns after writing into it or waiting for it; a tuple of several; None if neither."""
    if _waits(node):
        return node.args[0]
    targets = written(node)
    if not targets or not is_view(node) or len(schema(node.target).results) != len(targets):
        return None
    return targets[0] if len(targets) == 1 and region_of(node) is None else tuple(targets)


def _waits(node: fx.Node) -> bool:
    """Whether a node returns its argument, once that has arrived."""
    return is_wait(node) or node.target is wait_copy


def _last_uses(graph: fx.Graph, other: Iterable[fx.Node] = ()) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the nodes that it is the last to read; a node without readers is its own last use.

    Without ``other`` ones, which end elsewhere.
    """
    dying: dict[fx.Node, list[fx.Node]] = {}
    seen = set(other)
    for node in reversed(graph.nodes):
        for each in (node, *node.all_input_nodes):
            if each not in seen and each.op != "output":
                seen.add(each)
                dying.setdefault(node, []).append(each)
    return dying


def _compiled(text: str, scope: dict[str, Any]) -> tuple[Callable[..., Halves], str]:
    file = f"<spmd program {next(_number)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # for tracebacks
    exec(compile(text, file, "exec"), scope)
    bind: Callable[..., Halves] = scope["bind"]
    return bind, file
