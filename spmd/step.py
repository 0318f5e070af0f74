"""``spmd.compile`` and ``CompiledStep``: the path of a train step from the user's function to a program that runs."""

from __future__ import annotations

import copy
import functools
import html
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import (
    Any,
    Concatenate,
    Generic,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from passes import (
    Diff,
    Fact,
    Pass,
    Program,
    RankFailedError,
    RankMismatchError,
    Report,
    SpmdError,
    facts_of,
    print_program,
)
from passes.ir.bundle import Bundle
from passes.pipeline import table_of, with_islands, with_rates
from passes.runtime.rooms import RoomExceededError

from ._torch import DisableAutocast, DisableTorchFunctionSubclass, get_proxy_mode
from .cache.compile_cache import Lookup, look_up
from .call.call import Call
from .call.check_devices import check_devices, check_offloaded
from .call.compare_arguments import compare_arguments
from .call.refuse_saves import RefusedSaves
from .call.rng import adopt, kept_on, proposed
from .call.state import Arguments
from .call.unequal_rows import UnequalRows
from .capture import Captured
from .capture.explain_errors import shorten_traceback
from .capture.sizes.any_size import AnySize
from .capture_call import capture_call
from .compile_stages import Stages
from .compiled import Compiled, describe_for_agreement, text_of
from .deferral.deferred_update import DeferredUpdate
from .deferral.pending import calling, no_hooks_on_calls, remove_stale
from .dispatch import Dispatch, Turn
from .dump import Dump, StepFolders, files_of, stage_name, stages_to_compare, visit_stages
from .guards.guards import Guards, torch_settings
from .guards.leaves import check_leaves
from .guards.read_guards import ReadGuards
from .guards.recompiles import Compilation, Recompiles
from .interpreter.interrupts import held_interrupts
from .interpreter.source_lines import defined_at, warn_user
from .interpreter.young_collections import young_collections
from .lowering.arenas import Arenas
from .lowering.backends import Backend, CompiledRegions
from .lowering.codegen import Compiles
from .lowering.cuda_graphs import why_not_captured
from .lowering.islands import CompiledIslands
from .lowering.lower import Executable
from .lowering.run_stages import lower_step
from .modes.base import ParallelMode
from .options import ModeName, Options
from .override import Override, transform
from .partitioner.diagnostics import CUTS_THE_BATCH
from .profile import Profile
from .progress import Progress
from .python_state.reads import Reads
from .ranks.consensus import Agreement, all_or_none, call_number, identity_of, notify, standing_of, standing_of_state
from .ranks.simulated import simulated
from .ranks.standing import StateError
from .recorder import Recorder
from .shared_captures import SharedCapture
from .stages.stage_axis import check_without_stages
from .state.background_reads import READS
from .state.distribute import Prepared, check_memory, commit, prepare
from .state.edits import EditedError, compare_edits, edited_before, whole_state
from .state.equal_on_ranks import make_kept_equal
from .state.initialize import check_initializable, initialize, seed_to_initialize
from .state.recover import recover
from .state.replace_parameters import rebind_replaced_parameters
from .state.split_tensor import own_looks
from .state.stale_references import end_stale_references
from .state.storage_facts import storage_facts, with_storage_facts
from .unexpected_errors import unexpected_errors

P = ParamSpec("P")
R = TypeVar("R")
_Owner = TypeVar("_Owner")
_Rest = ParamSpec("_Rest")  # the arguments of a method behind ``self``
_DEFERS = "defer_updates=True"
_ONE_BATCH = "all ranks passed one batch"  # among what was warned of


class Made(NamedTuple):
    """What capture, partition and passes made of a call. ``entry``: of the cache, if it was read from one."""

    captured: Captured
    reads: Reads | ReadGuards
    any_size: AnySize | None
    local: Program
    added: dict[str, torch.Tensor]
    state: Prepared
    pipeline: tuple[Pass, ...]
    program: Program
    parts: Bundle | str | None
    entry: str = ""


class CompiledStep(Generic[P, R]):
    """A train step that runs compiled; it takes the arguments of the function it wraps.

    ``programs`` are the programs so far, one per signature of a call; ``program`` is the one last run. A copy compiles
    for itself, with the same options: programs and the memory that they compute in are not shared.
    """

    def __init__(self, function: Callable[P, R], options: Options) -> None:
        functools.update_wrapper(self, function)
        self._function, self._options = function, options
        self._where = f"\n    {defined_at(function)}"
        signature = inspect.signature(function)
        if "last_train_step" in signature.parameters:
            raise TypeError(f"{self._name} has an argument last_train_step, which compiled steps take themselves")
        self._dispatch = Dispatch(self._name, function, options, self._where)
        self._arenas: dict[DeviceMesh, Arenas] = {}  # ranks of two meshes need not wait for each other
        self._dumps = StepFolders(self._name)
        self._failed: Call | None = None  # the call that failed last
        self._is_edited = False  # since its ranks had written other values to its state
        self._warned: set[str] = set()  # arguments that may be tables
        self._rows: set[str] = set()  # those that differed between ranks when a program was compiled
        self._refused: RefusedSaves | None = None
        self._profile, self._calls = Profile(), 0
        self._compilations: list[Compilation] = []
        self._recorder: Recorder | None = None
        self._regions = _compiles(options.backend)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._function, self._options)

    def __repr__(self) -> str:
        """The step, where it is defined, its mode, and its programs."""
        last = self._dispatch.last
        ran = f"{len(self.programs)} in use, last {last.program.name}" if last else "none yet"
        return f"<compiled step {self._name}, {self._options.mode!r}, programs: {ran}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the same, and the report of the program last run."""
        report = self.report()._repr_html_() if self._dispatch.last else ""
        return f"<p><code>{html.escape(repr(self))}</code></p>{report}"

    @property
    def function(self) -> Callable[P, R]:
        """The step as the user wrote it."""
        return self._function

    @property
    def options(self) -> Options:
        """The arguments of ``compile``, checked."""
        return self._options

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledStep[P, R]:
        """A step of the same options: a mesh has no copies. The function of a step that a model holds is the copy's."""
        return type(self)(copy.deepcopy(self._function, memo), self._options)

    @property
    def _name(self) -> str:
        return str(getattr(self._function, "__name__", type(self._function).__name__))

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> CompiledStep[P, R]: ...

    @overload
    def __get__(
        self: CompiledStep[Concatenate[_Owner, _Rest], R], instance: _Owner, owner: type | None = None
    ) -> CompiledStep[_Rest, R]: ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A compiled method: the instance is its first argument. It has the attributes of the step: ``report()``."""
        return self if instance is None else types.MethodType(self, instance)

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs that may run again, in order; those of models and connections that are gone go with the next."""
        return tuple(program for compiled in self._dispatch.programs for program in compiled.programs)

    @property
    def program(self) -> Program | None:
        """The program last run, None before the first call."""
        return self._dispatch.last.last_program if self._dispatch.last else None

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    @overload
    def __call__(self, *args: Any, last_train_step: bool, **kwargs: Any) -> R: ...

    def __call__(  # type: ignore[misc] # P has no last_train_step: __init__ refuses such functions
        self, *args: Any, last_train_step: bool = False, **kwargs: Any
    ) -> Any:
        """Run one step. With ``last_train_step=True`` anything that was left for the next call is finished.

        A compiled step that another one calls is a part of that one.
        """
        if get_proxy_mode() is not None:
            return self._function(*args, **kwargs)
        try:
            with calling, own_looks():
                result = self._step(args, kwargs)
        except Exception as error:
            shorten_traceback(error)
            for sentence in filter(None, [each.lose_pending() for each in self._dispatch.programs]):
                error.add_note(sentence)
            raise
        if last_train_step:
            self.flush()
        return result

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        turn = Turn()
        try:
            return self._run(turn, args, kwargs)
        except BaseException as error:  # an interrupt, too
            if turn.connection is not None or isinstance(error, RankFailedError) or standing_of(None).partly:
                self._failed, self._is_edited = turn.call or self._failed, isinstance(error, EditedError)
            try:
                if turn.has_begun:
                    notify(turn.connection, self._name, error, turn.state)
            finally:
                self._refuse_saves(turn, error)
            raise

    def _run(self, turn: Turn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with DisableTorchFunctionSubclass():  # what guards look at is not a read
            self._dispatch.begin(turn, args, kwargs)
        assert turn.call is not None, "a call that has begun was read"
        compiled = self._ready(turn)
        while compiled.program.room is not None:
            try:
                with kept_on(RoomExceededError):
                    return self._run_compiled(turn, compiled)
            except RoomExceededError as error:
                outgrown, self._calls = compiled, self._calls - 1
                self.outgrow(turn, error.times)
                compiled = self._ready(turn)
                outgrown.drop()
        return self._run_compiled(turn, compiled)

    def _run_compiled(self, turn: Turn, compiled: Compiled) -> Any:
        assert turn.call is not None and turn.live is not None, "a program fits the call that it was compiled for"
        with unexpected_errors("running", compiled.program.name, self._where):
            execute, state = self._profile.begin(compiled), turn.live.tensors
            self._calls += 1
            if self._recorder is not None:
                execute = self._recorder.begin(compiled, state, self._calls, execute)
            restore = self._dispatch.restore(turn)
            result = compiled.run(turn.call.given, turn.live, restore, execute)
        if self._recorder is not None:
            self._recorder.end(state)
        self._profile.end(compiled)
        if turn.connection is not None:
            turn.connection.is_in_call = False
        self._failed = None
        if self._refused is not None and not self._refused.why:
            self._allow_saves()
        return result

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments of a call, by name. Raises ``TypeError`` as the function itself would."""
        return self._dispatch.read(args, kwargs)

    def prepare(self, given: Arguments, rows: UnequalRows | None = None) -> Turn:
        """All of a call but to run its program, on a simulated rank, which has no others to agree with.

        ``given``: this rank's part of the batch; ``rows``: where the ranks have unequal parts.
        """
        turn = Turn(rows=rows)
        self._dispatch.fit(turn, given)
        self._ready(turn)
        return turn

    def outgrow(self, turn: Turn, times: float) -> None:
        """Let a call that had ``times`` the rows of experts that there is room for run a program with more."""
        assert turn.compiled is not None, "it has run a program"
        self._dispatch.outgrow(turn, turn.compiled, times)

    def capture(self, given: Arguments) -> Program:
        """The captured program of a call, on global shapes, on a simulated rank; nothing is compiled or changed."""
        turn = Turn()
        self._dispatch.fit(turn, given)
        assert turn.call is not None
        options, dispatch = self._options, self._dispatch
        begun = turn.call.initial_state(dispatch.idle)
        with no_hooks_on_calls(), begun, all_or_none(self._name, turn.connection) as agreement:
            shared, live = dispatch.find_capture(turn.call, agreement.all_gather_text)
            found = capture_call(self._function, turn.call, self._name, options, dispatch, agreement, shared, live)
        return found.captured.program

    def _ready(self, turn: Turn) -> Compiled:
        """The program that a call runs, compiled where none fits; ``turn.live`` is what it runs on."""
        assert turn.call is not None
        if turn.compiled is None:
            compiled = self._compile_on_all_ranks(turn, turn.call)
            turn.live = compiled.guards.live(turn.call.given)
            turn.compiled = compiled
            compiled.executable.commit.start(turn.connection)
        self._dispatch.use(turn.compiled)
        return turn.compiled

    def _compile_on_all_ranks(self, turn: Turn, call: Call) -> Compiled:
        READS.wait_for_all()  # state may move, and what else refers to it counts
        with held_interrupts():
            with young_collections(), all_or_none(self._name, turn.connection) as agreement:
                rebind_replaced_parameters(call.given.optimizers.values())
                reason = self._dispatch.change(call)
                call.without_gradient = self._dispatch.cleared_first(call)
                progress = Progress(self._title(reason), shown=agreement.is_first_rank)
                stages = Stages(f"{self._name}/program-{self._dispatch.compiled}", self._where, progress, reason)
                begun = call.initial_state(self._dispatch.idle)
                with no_hooks_on_calls(), begun, progress.show(), stages.explained("compiling"):
                    compiled = self._compile(turn, call, agreement, stages)
            if self._options.check_first:
                compiled.check_first_call(call.given, self._name)
            self._dispatch.add(compiled, reason, call)
            seconds = sum(progress.seconds.values())
            self._compilations.append(Compilation(compiled.program.name, reason, self._calls + 1, seconds))
            end_stale_references(call.replaced)
        return compiled

    def _title(self, reason: str) -> str:
        """The program that is compiled next, and why."""
        number = self._dispatch.compiled + 1
        return f"{self._name} (program {number}: {reason})" if number > 1 else self._name

    def _compile(self, turn: Turn, call: Call, agreement: Agreement, stages: Stages) -> Compiled:
        """Make the program, or read it from an entry, and lower it. State is changed last, when all has gone well."""
        options, name, costs = self._options, stages.name, table_of(self._options.pipeline)
        dump = self._dumps.dump(options.dump_folder, name)
        with stages.explained("reading the call"):
            notes, modes = self._settle(call, agreement), torch_settings()
            shared, live = self._dispatch.find_capture(call, agreement.all_gather_text)
        with stages.stage("cache") if options.cache_option.folder else stages.explained("finding an entry"):
            why = self._dispatch.why_not_cached(call, shared)
            lookup = look_up(name, self._function, call, options, live, why, agreement)
            made = self._from_entry(lookup, call, agreement)
        if made is None:
            made = self._make(call, agreement, stages, dump, lookup, shared, notes)
        captured, local, state = made.captured, made.local, made.state
        stages.program = program = made.program
        with stages.stage("lower"), DisableAutocast():
            program = options.final(program)
            arenas, graphs = self._arenas_on(call.device_mesh), self._options.cuda_graphs and not simulated()
            executable = lower_step(program, arenas, self._backend_regions, graphs)
            deferred = self._deferred(made.parts, call, executable, captured, program)
            if options.cuda_graphs and (why := "an update is left pending" if deferred else why_not_captured(program)):
                program.notes.append(f"runs without CUDA graphs: {why}")
            lookup.note_programs(captured.program, local, program)
        if deferred is not None:
            dump.bundle(deferred.bundle)
        self._dispatch.rows_of_results.note(captured, program, call.uneven)
        make_report = stages.reporting(deferred.steady if deferred else program, program.notes, costs)
        dump.stage(99, "lowered", program)
        for each in _first_runs(program):
            self._dumps.dump(options.dump_folder, each.name).stage(99, "lowered", each)
        dump.report(make_report)
        bundle = deferred.bundle if deferred else program.stages
        description = describe_for_agreement(captured, program, costs, call, bundle, made.entry)
        description += options.describe_edits(made.program)
        base, calls, *seeds = agreement.agree(description, self._seeds(call))
        adopt([base, calls])
        with stages.explained("distributing state"):
            self._distribute(turn, call, program, captured, state, seeds)
        if not made.entry:
            lookup.store()
        return Compiled(
            program=program,
            captured=captured,
            partitioned=local,
            pipeline=made.pipeline,
            executable=executable,
            device_mesh=call.device_mesh,
            make_report=make_report,
            added=made.added,
            identity=identity_of(f"{self._name} in call {call_number()}", description),
            uneven=call.uneven,
            connection=agreement.connection,
            guards=Guards.of(call.arguments, call.slots, made.reads, captured, modes),
            whole=whole_state(call, local.inputs),
            any_size=made.any_size,
            deferred=deferred,
        )

    def _make(
        self,
        call: Call,
        agreement: Agreement,
        stages: Stages,
        dump: Dump,
        lookup: Lookup,
        shared: SharedCapture | None,
        notes: Sequence[str],
    ) -> Made:
        """Capture, partition, transform, passes. ``notes``: for the report."""
        options, name = self._options, stages.name
        with stages.stage("capture"):
            captured, reads, any_size = capture_call(
                self._function, call, name, options, self._dispatch, agreement, shared, lookup.live
            )
            check_memory(captured.program, call, captured.carried, captured.constants)
            captured.program.notes += [*notes, *call.notes]
            lookup.note_capture(captured, reads, any_size)
            dump.stage(0, "capture", captured.program)
        with stages.stage("partition"), DisableAutocast():
            captured.program.room = self._dispatch.room
            local, added, state = self._partition(call, captured, agreement)
            local.notes += self._dispatch.notes_on_room(local)
            self._warn_of_cuts(local, agreement)
            local, pipeline = options.fitted(local, agreement.all_gather_text, self._dispatch.graphs)
            dump.stage(1, "partition", local)
        choosing = self._choosing(pipeline, agreement, stages)
        with stages.stage("passes"), DisableAutocast(), choosing as pipeline:
            program, parts = options.run(local, pipeline, stages.noting(local, dump.on_pass))
        lookup.verify(captured.program, program)
        return Made(captured, reads, any_size, local, added, state, pipeline, program, parts)

    def _warn_of_cuts(self, local: Program, agreement: Agreement) -> None:
        """Warn, once, of a batch that the step cuts into parts: ranks may have joined these parts themselves."""
        for note in local.notes if agreement.is_first_rank else ():
            if note.startswith("aten.split") and CUTS_THE_BATCH in note and CUTS_THE_BATCH not in self._warned:
                self._warned.add(CUTS_THE_BATCH)
                warn_user(
                    f"{note}. The batch is that of all ranks, their rows one after the other: parts that each rank has "
                    "joined before the call (two views of its rows) are not those that the step cuts, as they would be "
                    "in DDP"
                )

    def _from_entry(self, lookup: Lookup, call: Call, agreement: Agreement) -> Made | None:
        """What an entry of the cache makes of a call; None if there is none, or live state lies otherwise."""
        warm, pipeline = lookup.warm, self._options.pipeline
        if warm is None or lookup.verifies:
            return None
        captured, local = warm.captured, warm.partitioned
        if Fact.STORAGE in facts_of(pipeline):
            found = storage_facts(local.inputs, call.slots, agreement.all_gather_text)
            if found != (local.stored, local.fixed):
                return None
        check_memory(captured.program, call, captured.carried, captured.constants)
        agreement.check_captured(text_of(captured, call, warm.number))
        self._dispatch.numbers.note_fixed(lookup.live, captured)
        for name, flags in warm.flags.items():
            vars(call.given.optimizers[name]).update(flags)
        state = prepare(call, local.inputs)
        return Made(captured, warm.reads, None, local, {}, state, pipeline, warm.program, None, warm.number)

    def _deferred(
        self,
        apart: Bundle | str | None,
        call: Call,
        executable: Executable,
        captured: Captured,
        whole: Program,
    ) -> DeferredUpdate | None:
        """The programs of a step that leave an update pending, lowered; a note says why no update is deferred."""
        branches = captured.guards.branches
        if isinstance(apart, Bundle) and branches:
            apart = "the step branches on the value of state, which must be up to date before a call"
        if isinstance(apart, str):
            whole.notes.append(f"defer_updates=True defers nothing in this program: {apart}")
        if not isinstance(apart, Bundle):
            return None
        for each in apart.programs.values():
            self._dumps.dump(self._options.dump_folder, each.name).stage(99, "lowered", each)
        return DeferredUpdate(apart, self._arenas_on(call.device_mesh), executable.commit, self._backend_regions)

    def _partition(self, call: Call, captured: Captured, agreement: Agreement) -> tuple[Program, Any, Prepared]:
        """One rank's program, after the transforms of overrides, with the state that they added; and its live state."""
        if not self._options.mode.has_stages:
            check_without_stages(captured.program)
        local = self._options.mode.partition(captured.program)
        if Fact.STORAGE in facts_of(self._options.pipeline):
            local = with_storage_facts(local, call.slots, agreement.all_gather_text)
        state = prepare(call, local.inputs)
        return *transform(local, self._options.overrides, state.locals), state

    @contextmanager
    def _choosing(self, pipeline: tuple[Pass, ...], agreement: Agreement, stages: Stages) -> Iterator[tuple[Pass, ...]]:
        """The pipeline for a backend that takes islands where they are quicker, as all ranks measure."""
        if not isinstance(self._backend_regions, CompiledIslands):
            yield pipeline
            return
        choice = self._backend_regions.choice(agreement.all_gather_text)
        yield with_islands(pipeline, choice)
        choice.end()
        stages.islands, stages.kernels = choice.times(), choice.text()

    @property
    def _backend_regions(self) -> Compiles | None:
        """Compiles regions; None where these run op by op: by "aten", and on simulated ranks, which run no code."""
        return None if simulated() else self._regions

    def _arenas_on(self, mesh: DeviceMesh) -> Arenas:
        return self._arenas.setdefault(mesh, Arenas(self._options.keep_freed_memory))

    def _seeds(self, call: Call) -> list[int]:
        """Seeds that this rank proposes: of random ops, with the number of the call, and one to initialize by."""
        return [*proposed(not self._dispatch.compiled), *seed_to_initialize(call)]

    def _distribute(
        self, turn: Turn, call: Call, program: Program, captured: Captured, state: Prepared, seeds: list[int]
    ) -> None:
        """Initialize state, make it equal on all ranks, and split it."""
        initialize(state, *seeds)
        turn.is_distributing = True
        call.replaced = commit(state, program.units)
        make_kept_equal(captured.carried, call)
        turn.is_distributing = False

    def _settle(self, call: Call, agreement: Agreement) -> list[str]:
        """Find all facts of a call, with the mesh as programs see it; returns notes for the report."""
        check_leaves(call.given)
        call.communicate_in(agreement.connection)
        call.resolve()
        check_devices(call.device_mesh, call.slots, call.inputs, call.offloaded)
        check_initializable(call)
        check_offloaded(call.slots, call.offloaded)
        call.check_subgroups()
        self._compare_edits(call, agreement)
        tables = self._compare_arguments(call, agreement)
        call.open_subgroups(agreement.connection)  # after an exchange: all ranks have come as far
        shares = Fact.SHARED_AXES in facts_of(self._options.pipeline)
        notes = call.connect_local_ranks(agreement.all_gather_text) if shares else []
        if self._options.mode.defer_updates and agreement.connection is not None:
            if set(agreement.all_gather_text(_DEFERS)) != {_DEFERS}:
                raise RankMismatchError(f"expected {_DEFERS} on all ranks of {self._name} or on none")
            call.pass_by_in(agreement.connection.separate_exchange())
        call.mesh = with_rates(call.mesh, self._options.pipeline)
        return [*notes, *tables]

    def _compare_arguments(self, call: Call, agreement: Agreement) -> list[str]:
        """Compare what the ranks pass; warns, once, of each argument that may be a table, and returns the sentences."""
        ranks, exchange = agreement.members, agreement.all_gather_text
        compared = compare_arguments(call.arguments, call.inputs, call.mesh, ranks, exchange, self._rows)
        agreement.differing = compared.differing
        if compared.one_batch and not self._rows and _ONE_BATCH not in self._warned and agreement.is_first_rank:
            warn_user(compared.one_batch)
        self._warned.update([_ONE_BATCH] if compared.one_batch else ())
        self._rows.update(compared.rows)
        for name in sorted(compared.tables.keys() - self._warned):
            warn_user(compared.tables[name])
        self._warned.update(compared.tables)
        return list(compared.tables.values())

    def _compare_edits(self, call: Call, agreement: Agreement) -> None:
        """Raise ``EditedError`` where some rank wrote to state since another program last ran, and it differs now."""
        if agreement.is_alone or not call.makes_equal:
            return
        state = {slot.input.name: slot.get() for slot in call.slots}
        names, edited = [*state], edited_before(call)
        made = [k for k, name in enumerate(names) if name in edited]
        ranks, gather = agreement.members, agreement.all_gather_text
        _, unequal = compare_edits(self._name, names, [*state.values()], made, ranks, gather)
        if unequal:
            raise EditedError(unequal)

    def recompiles(self) -> Recompiles:
        """Each program that was compiled, with the reason that it exists; also those that can run no more."""
        kept = {each.program.name for each in self._dispatch.programs if each.is_alive()}
        programs = [replace(each, is_kept=each.program in kept) for each in self._compilations]
        return Recompiles(self._name, tuple(programs))

    def report(self) -> Report:
        """The report of the program last run: communication, time and memory of one step, and its compilation."""
        last = self._last_program("report on")
        return replace(last.report, files=partial(self._files, last))

    def _files(self, compiled: Compiled) -> dict[str, str]:
        captured, program = compiled.captured.program, compiled.program
        return files_of(captured, compiled.partitioned, compiled.pipeline, program, compiled.report)

    def profile(self, steps: int = 5) -> None:
        """Measure each node of the program in the next ``steps`` calls; ``report()`` shows it beside the estimate.

        The calls train as ever. What is measured is this rank's: other ranks need not measure. A call takes about
        0.1 us longer for each node; on an accelerator the nodes are measured by events in its stream. What a backend
        of yours computes in one call is measured as one.
        """
        self._check_whole("measured")
        self._profile = Profile(steps)

    def record(self, folder: str | Path | None, last: int = 20) -> None:
        """Write what it takes to run the ``last`` calls again, from the next call on; None ends that.

        All ranks call it; each writes to ``folder/rank-<its number>``: arguments, numbers and seeds of each call, and
        the state before every ``last``-th one. ``spmd replay folder --rank 3 --call 57`` runs the 57th call of this
        step again and stops at the first NaN or Inf. Raises ``ValueError`` where the folder has something else in it.
        """
        self._check_whole("recorded")
        if type(last) is not int or last < 1:
            raise ValueError(f"expected the number of calls to keep, got {last!r}")
        self._recorder = None if folder is None else Recorder(Path(folder), last, self._name)

    def _check_whole(self, done: str) -> None:
        if self._options.mode.defer_updates:
            raise SpmdError(
                f"a call of {self._name} is not a whole step, and cannot be {done}: compile it without defer_updates"
            )
        if self._options.mode.micro_batches > 1:
            raise SpmdError(
                f"a call of {self._name} runs a program for each micro-batch, and cannot be {done}: compile it without "
                "micro_batches"
            )

    def dump(self, folder: str | Path) -> None:
        """Write the stages of all programs under ``folder``, as ``compile(dump=folder)`` does."""
        for each in self._dispatch.programs:
            dump = self._dumps.dump(Path(folder), each.program.name)
            visit_stages(dump.stage, each.captured.program, each.partitioned, each.pipeline, each.program)
            dump.report(partial(getattr, each, "report"))
            if each.deferred is not None:
                dump.bundle(each.deferred.bundle)
            for program in (*each.between_calls, *_first_runs(each.program)):
                self._dumps.dump(Path(folder), program.name).stage(99, "lowered", program)

    def diff(self, *stages: str) -> Diff:
        """The changes of a pass in the program last run, value by value; or the differences of two stages.

        A stage goes by its number in a dump or by its name: ``step.diff("bucket_all_reduce")``,
        ``step.diff("partition", "lowered")``. Raises ``ValueError``, with the names there are, for any other.
        """
        last = self._last_program("compare stages of")
        texts: dict[str, str] = {}

        def note(number: int, name: str, program: Program) -> None:
            texts[stage_name(number, name)] = print_program(program)

        visit_stages(note, last.captured.program, last.partitioned, last.pipeline, last.program)
        names = stages_to_compare(list(texts), stages)
        return Diff.of_texts(texts[names[0]], texts[names[1]], names)

    def _last_program(self, purpose: str) -> Compiled:
        if self._dispatch.last is None:
            raise SpmdError(f"{self._name} has not been called yet, so there is no program to {purpose}: call it first")
        return self._dispatch.last

    def recover(self) -> None:
        """Make the state of all ranks whole and equal again after a call that failed; all ranks call it together.

        Possible where all state is replicated and some rank has it whole: then all get that rank's, as before the
        failed call if there is such a rank, else as after it. Where state is split over ranks and not whole, load a
        checkpoint instead. After an error on state that ranks have written other values to, all get the first rank's.
        Raises ``SpmdError`` where it is not possible, with the reason.
        """
        with calling:
            if self._failed is not None:
                READS.wait_for_all()
                recover(self._failed, self._dispatch.ranks_of(self._failed), self._name, self._is_edited)
            self._allow_saves()
            self._failed = None

    def _refuse_saves(self, turn: Turn, error: BaseException) -> None:
        """Let state dicts raise while state is not whole, or not that of the other ranks."""
        if turn.call is None:
            return
        standing, why = standing_of_state(turn.connection), ""
        if isinstance(error, StateError):
            standing, why = error.standing, str(error)
        why = standing.partly or why
        has_failed = turn.connection is not None and turn.connection.is_closed
        if not (why or (has_failed and self._refused is None)):
            return
        self._allow_saves()
        self._refused = RefusedSaves(turn.call.given, why, standing)

    def _allow_saves(self) -> None:
        if self._refused is not None:
            self._refused.allow()
            self._refused = None

    def flush(self) -> None:
        """Finish the update that the last call left for the next one (``defer_updates``); all ranks call it together.

        What you read afterwards is up to date. Without anything pending it does nothing.
        """
        for each in list(self._dispatch.programs):
            each.finish_pending(is_asked=True)
        remove_stale()


def _first_runs(program: Program) -> list[Program]:
    """The program of all micro-batches but the last one, where it is another than that."""
    micro = program.micro_batches
    return [] if micro is None or micro.accumulating is None else [micro.accumulating]


def _compiles(backend: Backend) -> Compiles | None:
    if isinstance(backend, str):
        return CompiledIslands() if backend == "inductor" else None
    return CompiledRegions(backend)


class CompileOptions(TypedDict, total=False):
    """The keyword options of ``compile``, for type checkers."""

    passes: Sequence[Pass] | None
    backend: Backend
    dump: str | Path | None
    timeout: float | None
    keep_freed_memory: bool
    cuda_graphs: bool
    max_programs: int | None
    program: str | Path | None
    memory: int | str | None
    dynamic: Mapping[str, Mapping[int, str]] | None
    check: str | None
    cache: str | Path | None


class Decorate(Protocol):
    """The result of ``compile`` without a function: it takes one, and returns a compiled step of the same types."""

    def __call__(self, function: Callable[P, R], /) -> CompiledStep[P, R]:
        """Compile ``function``."""
        ...


@overload
def compile(
    function: Callable[P, R],
    /,
    gm_transformation: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    parallel_mode: ParallelMode | ModeName | None = None,
    *,
    module_override: Sequence[Override] | None = None,
    **options: Unpack[CompileOptions],
) -> CompiledStep[P, R]: ...


@overload
def compile(
    module_override: Sequence[Override] | None = None,
    gm_transformation: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    parallel_mode: ParallelMode | ModeName | None = None,
    **options: Unpack[CompileOptions],
) -> Decorate: ...


def compile(
    given: Any = None,
    /,
    gm_transformation: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    parallel_mode: ParallelMode | ModeName | None = None,
    *,
    module_override: Sequence[Override] | None = None,
    passes: Sequence[Pass] | None = None,
    backend: Backend = "aten",
    dump: str | Path | None = None,
    timeout: float | None = None,
    keep_freed_memory: bool = False,
    cuda_graphs: bool = False,
    max_programs: int | None = None,
    program: str | Path | None = None,
    memory: int | str | None = None,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    check: str | None = None,
    cache: str | Path | None = None,
) -> CompiledStep[..., Any] | Decorate:
    """Compile a train step into one graph that runs on every device of a mesh.

    Use it bare (``@spmd.compile``), with arguments (``@spmd.compile(parallel_mode=...)``), or on a function
    (``spmd.compile(step, parallel_mode=...)``). The compiled step computes what the plain step computes on one device
    that holds the whole batch.

    - ``given``: the function, or ``module_override`` by position.
    - ``module_override``: a list of ``Override``.
    - ``gm_transformation``: called with the final graph of every program, once; returns the graph to run.
    - ``parallel_mode``: where tensors live; None means ``DataParallel("replicate")``. By name: ``"replicate"`` or
      ``"ddp"``; ``"fully_shard"`` or ``"fsdp"``; ``"zero1"``, which is ``"replicate"`` with ``shard_optimizer=True``.
    - ``passes``: the passes to run instead of the mode's own; ``()`` runs none.
    - ``backend``: ``"aten"``; ``"inductor"``, which makes kernels of what lies between matrix products, where they are
      quicker; or for regions ``torch.compile``, ``callable(gm, example_inputs) -> callable``.
    - ``dump``: a folder for the graph of every stage; the environment variable ``SPMD_DUMP`` does the same.
    - ``timeout``: seconds that a rank waits for the others at a call, then all raise; None: as for a collective.
    - ``keep_freed_memory``: let this process keep up to 64 MB that ops free, for the next call (Linux, CPU).
    - ``cuda_graphs``: launch each half of a step (gradients, update) as one CUDA graph from its third call on; numbers
      such as learning rates are read from the device. The report says what cannot be captured.
    - ``max_programs``: keep no more than this number; the one run longest ago goes. None: all, but 64 of one capture.
    - ``program``: a step's folder in a dump. Its final programs, which you may have edited, run in place of those made,
      with the same inputs, outputs and mesh. They are code, and what they compute is for ``spmd.verify`` to check.
    - ``memory``: what a rank may hold in a step, state included (``"600MB"``); backward computes again what is over.
    - ``dynamic``: names of sizes that change, as ``{"tokens": {1: "time"}}``; None: a second size shows which do.
    - ``cache``: a folder in which compiled steps are kept for later processes, ``"on"`` for the user's cache directory,
      ``"verify"`` to compile all the same and compare; None: as ``SPMD_CACHE`` says, which is off by default.
    - ``check``: ``"first"`` compares each program's first call, on copies, with the program before its passes.

    Raises ``TypeError`` or ``ValueError`` for other arguments. Calls raise ``CaptureError``, ``PlacementError``,
    ``PartitionError``, ``PassError``, ``MemoryBudgetError`` or ``RankMismatchError``, and leave state as it was.
    """
    bare = callable(given) and not isinstance(given, (nn.Module, type, Override))
    if given is not None and not bare and module_override is not None:
        raise TypeError(f"expected a function to compile, or none, beside module_override=, got {given!r}")
    options = Options.check(
        module_override=module_override if bare or given is None else given,
        gm_transformation=gm_transformation,
        parallel_mode=parallel_mode,
        passes=passes,
        backend=backend,
        dump=dump,
        timeout=timeout,
        keep_freed_memory=keep_freed_memory,
        cuda_graphs=cuda_graphs,
        max_programs=max_programs,
        program=program,
        memory=memory,
        dynamic=dynamic,
        check=check,
        cache=cache,
    )

    def decorate(function: Callable[P, R]) -> CompiledStep[P, R]:
        if not callable(function):
            raise TypeError(f"expected a function to compile, got {function!r}")
        return CompiledStep(function, options)

    return decorate(given) if bare else decorate
