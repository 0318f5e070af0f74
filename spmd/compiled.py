"""Run a compiled program: live state and arguments in, results out, new state where it belongs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from passes import (
    Input,
    Memory,
    Output,
    OutputKind,
    Pass,
    PassError,
    Program,
    RankMismatchError,
    Report,
    Role,
    SpmdError,
    Table,
)
from passes.ir.bundle import Bundle
from passes.ir.numbers import pack
from passes.ir.program import is_pending, is_sharded
from passes.runtime.rooms import RoomExceededError

from .call.call import Call
from .call.rng import describe_seed, next_call
from .call.state import Arguments
from .capture import Captured, FromOutput
from .capture.sizes.any_size import AnySize
from .deferral import pending
from .deferral.deferred_update import DeferredUpdate
from .guards.guards import Guards, Live
from .lowering.first_call import first_difference
from .lowering.lower import Executable
from .python_state.reads import ReadSite
from .ranks.connection import Connection
from .ranks.consensus import agree_on_program, identity_of, notify
from .ranks.equal_values import Digests, contents, digest, number
from .state.distribute import as_dtensor
from .state.edits import Edits
from .state.flat_storage import FlatInputs
from .state.freed_pages import return_freed_pages

_INTENT_BITS = (1 << 60) - 1
_IS_PENDING = 1 << 59
_OF_RUNS = "of runs"  # the place of what no call brings

Restore = Callable[[list[Any]], list[Any]]  # from what a program returns to what users see


@dataclass(kw_only=True)
class Compiled:
    """One program with everything it takes to run it."""

    program: Program
    captured: Captured
    partitioned: Program
    pipeline: tuple[Pass, ...]  # what was run on it
    executable: Executable
    device_mesh: DeviceMesh
    make_report: Callable[[], Report]
    added: dict[str, torch.Tensor]  # state that a transform added, by input name
    identity: int  # equal on all ranks that run the same program
    uneven: dict[str, int]  # see ``Call``
    connection: Connection | None  # of the ranks that run it together
    guards: Guards
    whole: set[str]  # names of state that is to be the same on all ranks
    any_size: AnySize | None = None  # the trace that it was made from, if that serves other sizes of its arguments, too
    left: str = ""  # the reason that no later call runs it, on any rank
    deferred: DeferredUpdate | None = None  # the programs that run in place of this one, where its update is deferred
    edits: Edits = field(init=False)
    _flats: FlatInputs = field(init=False)
    _pool: Pool = field(init=False)
    _cleared: list[int] = field(init=False)  # positions of parameters in the live state
    _world: weakref.ref[Any] = field(init=False)  # the process group of all ranks, when it was compiled
    _digests: Digests = field(init=False, default_factory=Digests)
    _replicated: list[int] = field(init=False)  # positions among the tensor arguments
    _is_new: bool = field(init=False, default=True)  # until its first call

    def __post_init__(self) -> None:
        self.edits = Edits(self.guards.layout.names, self.whole)
        self._flats = FlatInputs(self.program.inputs, self.guards.layout.names)
        self._pool = Pool(self, self._flats.names)
        self._cleared = [k for k, name in enumerate(self.guards.layout.names) if name in self.captured.cleared_first]
        self._world = weakref.ref(dist.group.WORLD)
        self._replicated = self._find_replicated()
        self.guards.on_release = self._release

    def _find_replicated(self) -> list[int]:
        """Which tensor arguments must be equal on all ranks, and lie where a call can look at them without waiting."""
        inputs = {each.name: each for each in self.captured.program.inputs if not each.role.is_state}
        found = zip(self.guards.leaves.tensor_names(), self.guards.leaves.tensor_specs(), strict=True)
        return [
            k
            for k, (name, spec) in enumerate(found)
            if name in inputs and spec.type is torch.Tensor and spec.shape and spec.device.type == "cpu"
            if inputs[name].placement and all(entry.is_replicate() for entry in inputs[name].placement)
        ]

    @cached_property
    def report(self) -> Report:
        """Made when it is first asked for: the simulation of a step takes a twentieth of a compile."""
        return self.make_report()

    @property
    def has_pending(self) -> bool:
        """Whether the update of its last call is left to do."""
        return self.deferred is not None and self.deferred.pending is not None

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs that run: the whole one, or those that share its work between calls."""
        return self.between_calls or (self.program,)

    @property
    def between_calls(self) -> tuple[Program, ...]:
        """The programs that run in place of the whole one where updates are deferred."""
        return () if self.deferred is None else tuple(self.deferred.bundle.programs.values())

    @property
    def graphs(self) -> tuple[Program, ...]:
        """The programs that it keeps in memory: as captured, partitioned and run."""
        return self.captured.program, self.partitioned, self.program, *self.between_calls

    @property
    def last_program(self) -> Program:
        """Of these, the one last run."""
        return self.program if self.deferred is None or self.deferred.last is None else self.deferred.last

    def owners(self) -> list[Any]:
        """The modules and optimizers of the call whose update is pending."""
        return self.deferred.pending.owners if self.deferred is not None and self.deferred.pending is not None else []

    def abandon(self, why: str) -> None:
        """End a call before it has changed anything, on all ranks, and run no other."""
        self._flats.leave()
        self.executable.commit.wait_for_ranks()  # the next program computes where peers may still read
        self.left = why

    def _release(self) -> None:
        """Hold on to nothing: the model is gone, so the program never runs again."""
        self._drop_between_calls()
        self.edits.close()
        self.captured.release()
        self.executable.close()
        self._flats.release()

    def drop(self) -> None:
        """Let go of state and code: no later call runs the program, though its model may be trained by others."""
        self._drop_between_calls()
        self.captured.release()
        self.executable.close_code()
        self._flats.release()

    def _drop_between_calls(self) -> None:
        if self.deferred is not None:
            self.deferred.close()
            pending.remove(self)

    @property
    def is_of_one_size(self) -> bool:
        """Whether it was made from a trace that serves other sizes of its arguments, too."""
        return self.captured.is_of_one_size

    def is_of_this_world(self) -> bool:
        """Whether the process group is still the one that the program was compiled for: another may be larger."""
        return dist.is_initialized() and self._world() is dist.group.WORLD

    def is_alive(self) -> bool:
        """Whether a later call may run the program."""
        return not (self.guards.dead or self.left) and self.is_of_this_world() and self.is_connected()

    def is_connected(self) -> bool:
        """Whether the ranks that it communicates with are still connected: a call may have failed."""
        return self.connection is None or self.connection.is_open

    def intent(self, arguments: Arguments, live: Live, edits: int) -> int:
        """The number that ranks compare before a call: of program, numbers, ``edits``, and the seed where it draws."""
        identity = identity_of(str(self.identity), describe_seed()) if self._pool.draws else self.identity
        digests = self._digests.of(self._equal_tensors(arguments)) if self.connection is not None else []
        identity ^= (_IS_PENDING if self.has_pending else 0) ^ edits
        return (identity ^ digest([*self._numbers(arguments, live), *digests])) & _INTENT_BITS | 16

    def describe_values(self, arguments: Arguments, live: Live) -> list[str]:
        """A line for each number and tensor of a call that must be equal on all ranks."""
        names = [*self.guards.groups.names, *self.guards.leaves.tensor_names()]
        found = zip(names, self._numbers(arguments, live), strict=True)
        lines = [f"{name} = {each}" for name, value in found if (each := number(value)) is not None]
        given = self.guards.leaves.tensors(arguments)
        lines += [f"{self._pool.names[k]} = {contents(given[k])}" for k in self._replicated]
        return [*lines, *map(self._describe_constant, self.captured.constants)]

    def _equal_tensors(self, arguments: Arguments) -> list[torch.Tensor]:
        """The tensors of a call whose contents must be equal on all ranks: constants, arguments that are replicated."""
        if not self._replicated:
            return self.captured.constants
        given = self.guards.leaves.tensors(arguments)
        return [*self.captured.constants, *(given[k] for k in self._replicated)]

    def _describe_constant(self, tensor: torch.Tensor) -> str:
        name = self.guards.reads.names.get(id(tensor), "a tensor")
        return (
            f"{name}, which is no argument but found by its name, so that it must be equal on all ranks (pass rows of "
            f"the batch as arguments): {contents(tensor)}"
        )

    def _numbers(self, arguments: Arguments, live: Live) -> list[Any]:
        return [*live.numbers, *self.guards.leaves.tensors(arguments)]

    def run(
        self,
        arguments: Arguments,
        live: Live,
        restore: Restore | None = None,
        execute: Callable[[Sequence[Any]], list[Any]] | None = None,
    ) -> Any:
        """One call: gather the inputs, run, put results and new state where they belong.

        ``live`` is as ``guards`` found it; ``restore`` makes the results that the caller expects. ``execute`` runs the
        program in place of its executable.
        """
        if restore is not None and self._pool.written:
            raise RankMismatchError(
                f"ranks brought unequal numbers of rows of {self._pool.names[self._pool.written[0]]}, which the step "
                "writes into: pass equal numbers of rows, or return the new rows instead of writing them"
            )
        running = self.start(arguments, live)
        if self.deferred is None:
            return self.finish(running, (execute or self.executable)(running.inputs), restore)
        try:
            result = self.finish(running, self.deferred.of_call(arguments, live.tensors)(running.inputs), restore)
        except BaseException:
            self.deferred.is_lost = self.deferred.pending is not None or self.deferred.is_lost
            self.deferred.lose()
            pending.remove(self)
            raise
        if self.deferred.pending is not None:
            self.deferred.pending.watch(self._written_later(live))
            pending.add(self)
        return result

    def _written_later(self, live: Live) -> dict[str, torch.Tensor]:
        """This rank's state that the pending update writes to, by name."""
        assert self.deferred is not None, "an update is pending"
        state = zip(self.guards.layout.names, self.guards.layout.locals(live.tensors), strict=True)
        return {name: tensor for name, tensor in state if name in self.deferred.written}

    def check_pending(self) -> None:
        """Raise ``SpmdError`` if state was written to since the call whose update is pending."""
        changed = self.deferred.pending.changed() if self.deferred and self.deferred.pending else []
        if changed:
            raise SpmdError(
                f"{changed[0]} was written to while an update of it was pending, which came first in your code: call "
                "flush() of the step, on all ranks, before you write to parameters or optimizer state; now it updates "
                "what you have written"
            )

    def finish_pending(self, is_asked: bool = False) -> None:
        """Run the update that the last call has left; all its ranks come together to do so.

        ``is_asked``: the user knows that it is pending, and may have written to what it writes to.
        """
        with pending.calling:
            if not self.has_pending:
                return
            what = f"the pending update of {self.program.name}"
            if not self.is_of_this_world() or not self.is_connected():
                self.lose_pending()
                raise SpmdError(
                    f"{what} is lost, since the process group or a call after it has ended: state is as before that "
                    "update. Call flush() of the step before the process group is destroyed"
                )
            if not is_asked:
                self.check_pending()
            intent = identity_of(f"finish {self.identity}", "") & _INTENT_BITS | 16
            agree_on_program(self.connection, what, intent, lambda: [f"finishes {what}"], None)
            self.run_pending()
            if self.connection is not None:
                self.connection.is_in_call = False

    def run_pending(self) -> None:
        """Run the update that the last call has left; all its ranks have come to do so."""
        assert self.deferred is not None and self.deferred.pending is not None, "an update is pending"
        commit, tensors = self.executable.commit, self.deferred.pending.tensors
        commit.start(self.connection)
        try:
            state = self.guards.layout.locals(tensors)
            self.deferred.finish(self._pool.state_inputs([*state, *self._flats.enter(state)]))
            self._flats.leave()
            commit.finish()
            self.edits.note(tensors)
        except BaseException as error:
            notify(self.connection, f"the pending update of {self.program.name}", error, commit.state)
            raise
        finally:
            pending.remove(self)

    def lose_pending(self) -> str:
        """Drop what is pending, if its connection is closed; returns a sentence, empty if nothing was."""
        if self.deferred is None or self.is_connected() or not (self.has_pending or self.deferred.is_lost):
            return ""
        self.deferred.lose()
        self.deferred.is_lost = False
        pending.remove(self)
        return f"the update that the call before had left pending ({self.program.name}) is lost, or done in part only"

    def check_first_call(self, arguments: Arguments, name: str) -> None:
        """Raise on all ranks if the program computes something else on any than before its passes ran."""
        live = self.guards.live(arguments)
        assert live is not None, "a program fits the call that it was compiled for"
        found = ""
        with suppress(RoomExceededError):  # it is about to be run again, by a program that is checked then
            found = first_difference(self.partitioned, self.program, self.executable, self.values(arguments, live))
            self.executable.commit.check_rooms()
        sentence = f"{name} computes something else than before its passes ran: {found}" if found else ""
        gathered = [sentence]
        if self.connection is not None:
            gathered = self.connection.all_gather_text(sentence, f"the check of {name}")
        wrong = next(filter(None, gathered), "")
        if not wrong:
            return
        self.drop()
        if self.connection is not None:
            self.connection.is_in_call = False  # all ranks know, and none has changed anything
        advice = "spmd.verify(step, ...) names the pass, and passes=() runs none. State is as it was before the call"
        raise (PassError if sentence else RankMismatchError)(f"{sentence or wrong}. {advice}")

    def values(self, arguments: Arguments, live: Live) -> dict[str, Any]:
        """The inputs of a call by name, each by itself, as the call finds them; one seed for all calls."""
        given = [*self.guards.leaves.tensors(arguments), *self.guards.carried.tensors()]
        state = self.guards.layout.locals(live.tensors)
        return self._pool.by_name(live.numbers, state, given)

    def start(self, arguments: Arguments, live: Live) -> Running:
        """Gather the inputs of a call; ``run`` has the rest."""
        given = [*self.guards.leaves.tensors(arguments), *self.guards.carried.tensors()]
        contiguous = [tensor.contiguous() for tensor in given]
        state = self.guards.layout.locals(live.tensors)
        state = [*state, *self._flats.enter(state)]
        if self._is_new:
            self._is_new = False
            return_freed_pages()  # state lies where it stays, and the memory that the program runs in is not there yet
        for k in self._cleared:  # as the step does, so that new gradients find the memory
            live.tensors[k].grad = None
        inputs = self._pool.inputs(live.numbers, state, contiguous)
        return Running(arguments, live.tensors, given, contiguous, inputs)

    def finish(self, running: Running, returned: list[Any], restore: Restore | None = None) -> Any:
        """Put what the executable ``returned`` where it belongs, and return what the step does."""
        arguments, tensors = running.arguments, running.tensors
        self.executable.commit.check_rooms()
        self._flats.leave()
        for k in self._pool.written:
            if running.contiguous[k] is not running.given[k]:
                running.given[k].copy_(running.contiguous[k])
        self._store(returned, arguments, tensors)
        shown = returned if restore is None else restore(returned)
        self._write_python_state(returned, shown, arguments)
        self.executable.commit.finish()
        if self.connection is not None:
            (self.edits.note if self.deferred is not None else self.edits.end_call)(tensors)
        return self.captured.result(shown)

    def _store(self, returned: list[Any], arguments: Arguments, tensors: list[torch.Tensor]) -> None:
        """Put new state where eager would have put it."""
        captured = self.captured
        if not (captured.new_state or captured.cleared_gradients or captured.requires_grad):
            return
        live = dict(zip(self.guards.layout.names, tensors, strict=True))
        outputs = [output for output in self.program.outputs if output.kind is not OutputKind.UPDATE]
        for new in captured.new_state:
            if new.unless is not None and returned[new.unless.index]:
                continue
            value = new.value
            if isinstance(value, FromOutput):
                value = self._as_state(returned[value.index], outputs[value.index])
            if new.optimizer:
                arguments.optimizers[new.optimizer].state[live[new.parameter]][new.key] = value
            else:
                live[new.parameter].grad = value
        for name in captured.cleared_gradients:
            live[name].grad = None
        for name, value in captured.requires_grad.items():
            live[name].requires_grad_(value)

    def _write_python_state(self, returned: list[Any], shown: list[Any], arguments: Arguments) -> None:
        """Repeat what the step did to attributes, globals, parameter groups and logs, which get what is ``shown``."""
        if not self.captured.writes:
            return
        self.executable.commit()
        outputs = [output for output in self.program.outputs if output.kind is not OutputKind.UPDATE]

        def current(leaf: Any, is_state: bool) -> Any:
            values = returned if is_state else shown
            value = values[leaf.index] if isinstance(leaf, FromOutput) else leaf
            if not isinstance(leaf, FromOutput) or not isinstance(value, torch.Tensor) or not is_state:
                return value
            # Eager makes another tensor at each call, in memory of its own.
            return self._as_state(value.clone(), outputs[leaf.index])

        for write in self.captured.writes:
            write.apply(arguments, partial(current, is_state=isinstance(write.target, ReadSite)))

    def _as_state(self, local: Any, output: Output) -> Any:
        if not is_sharded(output.placement) and not is_pending(output.placement):
            return local
        stride = torch.empty(output.shape, device="meta").stride()
        return as_dtensor(local, output.placement, self.device_mesh, output.shape, stride)


@dataclass
class Running:
    """A call between its two halves: ``inputs`` are the program's, the rest is what its end has to write to.

    ``given``: the tensors among the arguments, and ``contiguous`` what the program reads for each.
    """

    arguments: Arguments
    tensors: list[torch.Tensor]
    given: list[torch.Tensor]
    contiguous: list[torch.Tensor]
    inputs: list[Any]


class Pool:
    """All values of a call in one list, and the position of each input of the program in it, found once."""

    def __init__(self, compiled: Compiled, flats: Sequence[str]) -> None:
        self.compiled = compiled
        names = [*compiled.guards.leaves.tensor_names(), *compiled.guards.carried.names]
        constants = [f"constant.{k}" for k in range(len(compiled.captured.constants))]
        self.draws = compiled.program.draws
        order = [
            *compiled.guards.layout.names,
            *flats,
            *compiled.guards.groups.names,
            *names,
            *compiled.added,
            *constants,
            "seed",
            _OF_RUNS,
        ]
        at = {name: k for k, name in enumerate(order)}
        packed = [(declared, node) for declared, node in compiled.program.values().values() if declared.numbers]
        self._packed = [DeviceBuffer(declared, node.meta["val"].device, at) for declared, node in packed]
        at |= {declared.name: len(order) + k for k, (declared, _) in enumerate(packed)}
        self._positions = [at[_value_of(declared, compiled.program)] for declared in compiled.program.inputs]
        outputs = compiled.captured.program.outputs
        writes = {o.name for o in outputs if o.kind is OutputKind.UPDATE and not o.role.is_state}
        self.names, self.written = names, [k for k, name in enumerate(names) if name in writes]

    def inputs(self, numbers: list[Any], state: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> list[Any]:
        """The program's inputs; ``state`` is this rank's, each tensor by itself, then the flat ones."""
        compiled = self.compiled
        values = [
            *state,
            *numbers,
            *given,
            *compiled.added.values(),
            *compiled.captured.constants,
            self._seed(),
            None,
        ]
        if self._packed:
            values += [each.filled(values) for each in self._packed]
        return [values[k] for k in self._positions]

    def by_name(
        self, numbers: list[Any], state: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        """The same by name, but for flat inputs; no draw is made."""
        compiled = self.compiled
        constants = {f"constant.{k}": each for k, each in enumerate(compiled.captured.constants)}
        named = dict(zip(compiled.guards.layout.names, state, strict=True))
        named |= dict(zip(compiled.guards.groups.names, numbers, strict=True)) | dict(
            zip(self.names, given, strict=True)
        )
        return named | compiled.added | constants | {"seed": 1}

    def state_inputs(self, state: Sequence[torch.Tensor]) -> list[Any]:
        """The program's inputs as far as they are at the same place at each call, and None for all others."""
        compiled = self.compiled
        values: list[Any] = [*state, *[None] * (len(compiled.guards.groups.names) + len(self.names))]
        values += [*compiled.added.values(), *compiled.captured.constants, None, None]
        values += [each.tensor for each in self._packed]
        return [values[k] for k in self._positions]

    def _seed(self) -> int | None:
        if not self.draws:
            return None
        torch.empty((), dtype=torch.int64).random_()  # as eager, a call with random ops moves the generator on
        return next_call()


def _value_of(declared: Input, program: Program) -> str:
    """The name of the value of a call that an input takes; runs of a micro-batch bring some of their own."""
    if declared.role in (Role.ACCUMULATOR, Role.RUN):
        return _OF_RUNS
    return program.taken_from(declared)


class DeviceBuffer:
    """The memory of the numbers that calls bring to the device, the same at every call."""

    def __init__(self, declared: Input, device: torch.device, at: Mapping[str, int]) -> None:
        """``at``: the position of each number among the values of a call."""
        self._declared, self._positions = declared, {name: at[name] for name in declared.numbers}
        self.tensor = torch.empty(declared.shape, dtype=declared.dtype, device=device)

    def filled(self, values: Sequence[Any]) -> torch.Tensor:
        """The buffer, with the numbers of a call."""
        packed = pack(self._declared, {name: values[k] for name, k in self._positions.items()})
        # From pageable memory the host would wait until the device has done all that was issued before.
        return self.tensor.copy_(packed.pin_memory() if self.tensor.is_cuda else packed, non_blocking=True)


def describe_for_agreement(
    captured: Captured, program: Program, table: Table, call: Call, bundle: Bundle | None = None, entry: str = ""
) -> str:
    """Text that must be equal on all ranks: seed, costs, the captured program, its constants and draws, collectives.

    ``entry``: of the cache, that the program was read from; what it was compiled to was compared when it was stored.
    """
    initial = [f"{slot.input.name} was made for this call" for slot in call.slots if call.initial.holds(slot)]
    initial += [f"{slot.input.name} is on the meta device" for slot in call.slots if slot.get().is_meta]
    costs = f"passes.Table, measured costs of communication: sha256 {table.digest}"
    inputs = [f"{i.name}: {i.dtype}{list(i.shape)} {i.placement}" for i in captured.program.inputs]
    inputs += [f"{hyper.name} = {number(hyper.get())}" for hyper in call.hyper_parameters]
    inputs += [f"{x.name} = {contents(x.value)}" for x in call.inputs if all(p.is_replicate() for p in x.placement)]
    inputs += [f"{i.name} in {i.memory} memory" for i in program.inputs if i.memory is not Memory.DEVICE]
    constants = [
        f"a tensor that is no argument but found by its name, so that it must be equal on all ranks (pass rows of the "
        f"batch as arguments): {contents(constant)}"
        for constant in captured.constants
    ]
    numbers = _numbers(captured, call)
    outputs = [
        f"output {o.name}: {o.dtype}{list(o.shape)}{', left pending' * o.pending}" for o in captured.program.outputs
    ]
    lines = [describe_seed(), costs, *inputs, *initial, *numbers, *constants, *outputs]
    if entry:
        return "\n".join([*lines, f"from the entry {entry} of the cache"])
    captured_nodes = captured.program.graph.nodes
    draws = [f"{node.name} is draw {node.meta['draw']}" for node in captured_nodes if "draw" in node.meta]
    traffic = [f"{node.target} {node.meta['collective']}" for node in program.collectives()]
    traffic += [f"the bundle {bundle.name}: {bundle.digest()}"] if bundle is not None else []
    code = [captured.code, *draws, *traffic]
    if program.assignment is not None:  # a solver of the user's may choose other placements on other ranks
        code.append(f"the assignment of nodes: sha256 {program.assignment.digest}")
    return "\n".join([*lines, *code])


def text_of(captured: Captured, call: Call, entry: str = "") -> str:
    """The captured program and the numbers that it reads: what Python values among the arguments make of it."""
    return "\n".join([*_numbers(captured, call), entry or captured.code])


def _numbers(captured: Captured, call: Call) -> list[str]:
    numbers: list[Any] = [*captured.carried.numbers, *captured.carried.arguments(call.given)]
    return [f"{number.name} = {number.get()}" for number in numbers]
