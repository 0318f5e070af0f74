"""``StepCompiler``: from a call that no program fits to a program, and state that lies as it reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from passes import Fact, FormIslands, MemoryBudgetError, Mesh, Pass, Program, RankMismatchError, Report, facts_of
from passes.default_passes import table_of, with_islands, with_rates
from passes.ir.bundle import Bundle
from passes.ir.program import MicroBatches
from passes.report import PassEffect

from ._torch import DisableAutocast
from .cache.compile_cache import Lookup, look_up, rehearse_look_up, set_flags
from .cache.packed import packed, unpacked
from .cache.program_data import program_from_data, program_to_data
from .call.call import Call
from .call.check_devices import check_devices, check_offloaded
from .call.compare_arguments import compare_arguments
from .call.dynamic_dims import Dim
from .call.rng import adopt, proposed
from .capture import Captured, capture
from .capture.sizes.any_size import AnySize
from .capture.sizes.size_symbols import TracedSizes
from .capture_call import capture_call
from .compile_phases import CompilePhases
from .deferral.deferred_update import DeferredUpdate
from .deferral.pending import no_hooks_on_calls
from .dispatch import Dispatch, Turn
from .dump import Dump, StepFolders
from .guards.guards import Guards, torch_settings
from .guards.leaves import check_leaves
from .guards.read_guards import ReadGuards
from .guards.recompiles import Compilation
from .interpreter.interrupts import held_interrupts
from .interpreter.source_lines import warn_user
from .interpreter.young_collections import young_collections
from .lowering.arenas import Arenas
from .lowering.backends import compiler_of
from .lowering.codegen import Compiles
from .lowering.cuda_graphs import why_not_captured
from .lowering.islands import CompiledIslands
from .lowering.lower import Executable
from .lowering.run_stages import lower_step
from .modes.base import RUNS
from .options import Options
from .override import transform
from .partitioner.diagnostics import CUTS_THE_BATCH
from .progress import Progress
from .python_state.reads import Reads
from .ranks.consensus import Agreement, all_or_none, call_number, identity_of
from .ranks.simulated import simulated
from .ranks.warn_once import warn_once
from .ranks.watched_mesh import WatchedMesh
from .running.compiled import Compiled
from .running.deferred_program import DeferredProgram
from .running.describe import describe_for_agreement, text_of
from .shared_captures import ServingCapture
from .stages.stage_axis import check_without_stages
from .stages.stage_exchange import StageExchange
from .state import master_copies
from .state.background_reads import READS
from .state.distribute import Prepared, check_memory, commit, prepare
from .state.edits import EditedError, compare_edits, copied_state, edited_before
from .state.equal_on_ranks import make_kept_equal
from .state.initialize import check_initializable, initialize, seed_to_initialize
from .state.replace_parameters import rebind_replaced_parameters
from .state.stale_references import end_stale_references
from .state.storage_facts import storage_facts, with_storage_facts

_DEFERS = "defer_updates=True"
_ONE_BATCH = "all ranks passed one batch"  # among what was warned of


class Made(NamedTuple):
    """The products of capture, partition and passes for a call. ``entry``: of the cache, if it was read from one."""

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


class Rehearsal(NamedTuple):
    """The program of a call that is not run, and its guards.

    ``why``: the reason that no entry of the cache would be kept of it; ``not_kept``: that one would have no programs.
    ``fixed``: dims of arguments of which it needs the size, of those that were left open, each with the user's line.
    """

    made: Made
    guards: Guards
    why: str
    not_kept: str
    fixed: Mapping[Dim, str]


class StepCompiler:
    """Makes the programs of one step, and keeps what they share: memory, compiled regions, what was warned of."""

    def __init__(
        self, name: str, function: Callable[..., Any], options: Options, where: str, dispatch: Dispatch
    ) -> None:
        self._name, self._function, self._options, self._where = name, function, options, where
        self._dispatch, self.dumps = dispatch, StepFolders(name)
        self.compilations: list[Compilation] = []
        self._arenas: dict[DeviceMesh, Arenas] = {}  # ranks of two meshes need not wait for each other
        self._warned: set[str] = set()  # arguments that may be tables
        self._rows: set[str] = set()  # those that differed between ranks when a program was compiled
        self._regions = compiler_of(options.backend)

    def compile(self, turn: Turn, call: Call, number: int) -> Compiled:
        """Compile a program for the call of this number, on all ranks together; state is as programs need it then."""
        READS.wait_for_all()  # state may move, and what else refers to it counts
        with held_interrupts(), warn_once(self._name, turn.connection):
            with young_collections(), all_or_none(self._name, turn.connection) as agreement:
                rebind_replaced_parameters(call.given.optimizers.values())
                reason = self._dispatch.programs.reason_to_compile(call)
                call.without_gradient = self._dispatch.programs.cleared_first(call)
                progress = Progress(self._title(reason), shown=agreement.is_first_rank)
                stages = CompilePhases(
                    f"{self._name}/program-{self._dispatch.programs.compiled}", self._where, progress, reason
                )
                begun = call.initial_state(self._dispatch.captures.idle)
                try:
                    with no_hooks_on_calls(), begun, progress.show(), stages.explained("compiling"):
                        compiled = self._compiled(turn, call, agreement, stages)
                finally:
                    end_stale_references(call.replaced)
            if self._options.check_first:
                compiled.check_first_call(call.given, self._name)
            self._dispatch.add(compiled, reason, call)
            seconds = sum(progress.seconds.values())
            made = Compilation(compiled.program.name, reason, number, seconds, captured_on=stages.captured_on)
            self.compilations.append(made)
        return compiled

    def rehearse(self, call: Call) -> Rehearsal:
        """Make the program of a call on a simulated rank, which nothing runs: state and cache stay as they are."""
        name, options, captures = f"{self._name}/program-0", self._options, self._dispatch.captures
        stages = CompilePhases(name, self._where, Progress(self._name, shown=False))
        begun = call.initial_state(captures.idle)
        with all_or_none(self._name, None) as agreement, no_hooks_on_calls(), begun, stages.explained("checking"):
            notes, modes = self._settle(call, agreement), torch_settings()
            shared, live = captures.find(call, agreement.all_gather_text)
            why = captures.why_not_cached(call)
            lookup = rehearse_look_up(name, self._function, call, options, live, why, self._islands)
            made = self._make(call, agreement, stages, self.dumps.dump(None, name), lookup, shared, notes)
            program = options.final(made.program)
            lookup.note_programs(made.captured, made.local, program)
            guards = Guards.of(call.arguments, call.slots, made.reads, made.captured, modes)
            call.initial.remove()
            call.remove_library_hooks()
        return Rehearsal(made, guards, lookup.why, lookup.not_kept, captures.shared.fixed)

    def traces(self, call: Call, sizes: TracedSizes) -> bool:
        """Whether the step can be traced for a call whose arguments have other sizes; nothing is changed."""
        try:
            with no_hooks_on_calls(), call.initial_state(self._dispatch.captures.idle):
                call.resolve()
                capture(self._function, call, self._name, sizes=sizes)
                call.initial.remove()
                call.remove_library_hooks()
        except Exception:  # of the step's own, too: a matrix that such rows do not fit
            return False
        return True

    @contextmanager
    def running(self, pipeline: tuple[Pass, ...]) -> Iterator[None]:
        """Compile with these passes in the place of the mode's, which stay those of all other programs."""
        given, self._options = self._options, replace(self._options, passes=pipeline)
        try:
            yield
        finally:
            self._options = given

    def _title(self, reason: str) -> str:
        """The program that is compiled next, and why."""
        number = self._dispatch.programs.compiled + 1
        return f"{self._name} (program {number}: {reason})" if number > 1 else self._name

    def _compiled(self, turn: Turn, call: Call, agreement: Agreement, stages: CompilePhases) -> Compiled:
        """Make the program, or read it from an entry, and lower it. State is changed last, when all has gone well."""
        options, name, costs = self._options, stages.name, table_of(self._options.pipeline)
        dump = self.dumps.dump(options.dump_folder, name)
        with stages.explained("reading the call"):
            notes, modes = self._settle(call, agreement), torch_settings()
            shared, live = self._dispatch.captures.find(call, agreement.all_gather_text)
        with stages.stage("cache") if options.cache_option.folder else stages.explained("finding an entry"):
            why = self._dispatch.captures.why_not_cached(call)
            shares = not self._dispatch.captures.is_apart
            lookup = look_up(name, self._function, call, options, live, why, shares, self._islands, agreement)
            made = self._from_entry(lookup, call, agreement, stages, dump)
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
            lookup.note_programs(captured, local, program)
        self._dispatch.rows_of_results.note(captured, program, call.uneven)
        make_report = stages.reporting(deferred.steady if deferred else program, program.notes, costs)
        bundle = deferred.bundle if deferred else program.stages
        self._dump_lowered(dump, program, bundle, make_report)
        # Of a pipeline each rank has only rewritten its own programs: what they were made from is equal on all.
        bundle = bundle if local.stages is None else local.stages
        description = describe_for_agreement(captured, program, costs, call, bundle, made.entry)
        if local.stages is not None:
            _check_same_stage(program, agreement)
        description += options.describe(made.program)
        (base, calls, *seeds), writes = agreement.agree(description, self._seeds(call), captured.leaves_something)
        adopt([base, calls])
        with stages.explained("distributing state"):
            self._distribute(turn, call, program, captured, state, seeds)
            added = made.added | master_copies.bind(call, local)
        if not made.entry:
            lookup.store(program.notes)
        make = Compiled if deferred is None else partial(DeferredProgram, deferred=deferred)
        return make(
            program=program,
            captured=captured,
            partitioned=local,
            pipeline=made.pipeline,
            executable=executable,
            device_mesh=call.device_mesh,
            make_report=make_report,
            added=added,
            identity=identity_of(f"{self._name} in call {call_number()}", description),
            uneven=call.uneven,
            connection=agreement.connection,
            writes=writes,
            guards=Guards.of(call.arguments, call.slots, made.reads, captured, modes),
            copied=copied_state(call, local),
            any_size=made.any_size,
        )

    def _dump_lowered(
        self, dump: Dump, program: Program, bundle: Bundle | None, make_report: Callable[[], Report]
    ) -> None:
        dump.stage(99, "lowered", program)
        for each in program.earlier.values():
            self.dumps.dump(self._options.dump_folder, each.name).stage(99, "lowered", each)
        dump.report(make_report)
        if bundle is not None:
            dump.bundle(bundle)

    def _make(
        self,
        call: Call,
        agreement: Agreement,
        stages: CompilePhases,
        dump: Dump,
        lookup: Lookup,
        shared: ServingCapture,
        notes: Sequence[str],
    ) -> Made:
        """Capture, partition, transform, passes. ``notes``: for the report."""
        options, name = self._options, stages.name
        with stages.stage("capture"):
            captured, reads, any_size, by_first_rank = capture_call(
                self._function, call, name, options, self._dispatch.captures, agreement, shared, lookup
            )
            check_memory(captured.program, call, captured.carried, captured.constants)
            stages.captured_on = agreement.members[0] if by_first_rank else None
            if lookup.capture is None:  # an entry has them
                captured.program.notes += [*notes, *call.notes]
            lookup.note_capture(captured, reads, any_size or (shared.own.capture if shared.own else None))
            dump.stage(0, "capture", captured.program)
        with stages.stage("partition"), DisableAutocast():
            captured.program.room = self._dispatch.room.times
            (local, pipeline), added, state = self._fitted(call, captured, agreement)
            dump.stage(1, "partition", local)
        choosing = self._choosing(local, pipeline, agreement, stages, lookup)
        with stages.stage("passes"), DisableAutocast(), choosing as pipeline:
            run = partial(options.run, local, pipeline, stages.noting(local, dump.on_pass))
            is_one = lookup.has_one_program(local, agreement)
            program, parts = _run_by_first_rank(run, local, stages, agreement) if is_one else run()
        lookup.verify(captured, local, program)
        return Made(captured, reads, any_size, local, added, state, pipeline, program, parts)

    def _fitted(
        self, call: Call, captured: Captured, agreement: Agreement
    ) -> tuple[tuple[Program, tuple[Pass, ...]], Any, Prepared]:
        """One rank's program with the passes with which it fits; in the fewest micro-batches, where the step chooses.

        The captured program then says how many these are, as other ranks read it.
        """
        options, chooses = self._options, self._options.mode.chooses_runs
        for count in RUNS if chooses else (1,):
            captured.program.micro_batches = MicroBatches(count, {}) if chooses else None
            local, added, state = self._partition(call, captured, agreement)
            local.notes += self._dispatch.room.notes(local)
            self._warn_of_cuts(local, agreement)
            try:
                return options.fitted(local, agreement.all_gather_text, self._dispatch.programs.graphs), added, state
            except MemoryBudgetError:
                runs = 1 if local.micro_batches is None else local.micro_batches.count
                if not chooses or count == RUNS[-1] or runs < count:  # there are no more rows
                    raise
        raise AssertionError("the last number of runs returns or raises")

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

    def _from_entry(
        self, lookup: Lookup, call: Call, agreement: Agreement, stages: CompilePhases, dump: Dump
    ) -> Made | None:
        """Make programs from an entry of the cache; None if there is none. Passes run where state lies otherwise."""
        warm, pipeline = lookup.capture, self._options.pipeline
        if warm is None or warm.programs is None:
            return None
        captured, (local, program), entry = warm.captured, warm.programs, warm.number
        if self._islands is not None and (kernels := warm.kernels) is not None:
            self._islands.adopt(kernels)
            stages.islands, stages.kernels = kernels.rows, kernels.text
            pipeline = with_islands(pipeline, self._islands.choice(None))
        if Fact.STORAGE in facts_of(pipeline):
            found = storage_facts(local.inputs, call.slots, agreement.all_gather_text)
            if found != (local.stored, local.fixed):
                local = local.with_facts(stored=found[0], fixed=found[1])
                choosing = self._choosing(local, pipeline, agreement, stages, lookup)
                with DisableAutocast(), choosing as pipeline:
                    program, _ = self._options.run(local, pipeline, stages.noting(local, dump.on_pass))
                entry = ""  # ranks compare what they made
        check_memory(captured.program, call, captured.carried, captured.constants)
        agreement.check_captured(text_of(captured, call, warm.number))
        self._dispatch.captures.numbers.note_fixed(lookup.live, captured)
        set_flags(call, warm.flags)
        state = prepare(call, local.inputs)
        return Made(captured, warm.reads, None, local, {}, state, pipeline, program, None, entry)

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
            self.dumps.dump(self._options.dump_folder, each.name).stage(99, "lowered", each)
        return DeferredUpdate(apart, self._arenas_on(call.device_mesh), executable.commit, self._backend_regions)

    def _partition(self, call: Call, captured: Captured, agreement: Agreement) -> tuple[Program, Any, Prepared]:
        """One rank's program, after the transforms of overrides, with the state that they added; and its live state."""
        if not self._options.mode.has_stages:
            check_without_stages(captured.program)
        local = self._options.partition(captured.program, agreement.all_gather_text, self._dispatch.programs.graphs)
        if Fact.STORAGE in facts_of(self._options.pipeline):
            local = with_storage_facts(local, call.slots, agreement.all_gather_text)
        state = prepare(call, local.inputs)
        return *transform(local, self._options.overrides, state.locals), state

    @contextmanager
    def _choosing(
        self,
        local: Program,
        pipeline: tuple[Pass, ...],
        agreement: Agreement,
        stages: CompilePhases,
        lookup: Lookup,
    ) -> Iterator[tuple[Pass, ...]]:
        """The pipeline for a backend that takes islands where they are quicker, as all ranks of a program measure."""
        if self._islands is None:
            yield pipeline
            return
        if lookup.verifies and lookup.warm is not None and lookup.warm.kernels is not None:
            self._islands.adopt(lookup.warm.kernels, compiles=True)
        exchange, of_stage = agreement.all_gather_text, None
        if local.stages is not None:
            count = sum(isinstance(each, FormIslands) for each in pipeline)
            exchange = of_stage = StageExchange(local, count, exchange)
        choice = self._islands.choice(exchange)
        yield with_islands(pipeline, choice)
        if of_stage is not None:
            of_stage.end()
        choice.end()
        kernels = choice.kernels()
        stages.islands, stages.kernels = kernels.rows, kernels.text
        lookup.note_kernels(kernels)

    @property
    def _backend_regions(self) -> Compiles | None:
        """Compiles regions; None where these run op by op: by "aten", and on simulated ranks, which run no code."""
        return None if simulated() else self._regions

    @property
    def _islands(self) -> CompiledIslands | None:
        """Compiles islands, where the backend does so."""
        regions = self._backend_regions
        return regions if isinstance(regions, CompiledIslands) else None

    def _arenas_on(self, mesh: DeviceMesh) -> Arenas:
        return self._arenas.setdefault(mesh, Arenas(self._options.keep_freed_memory))

    def _seeds(self, call: Call) -> list[int]:
        """Seeds that this rank proposes: of random ops, with the number of the call, and one to initialize by."""
        return [*proposed(not self._dispatch.programs.compiled), *seed_to_initialize(call)]

    def _distribute(
        self, turn: Turn, call: Call, program: Program, captured: Captured, state: Prepared, seeds: list[int]
    ) -> None:
        """Initialize state, make it equal on all ranks, and split it."""
        initialize(state, *seeds)
        turn.is_distributing = True
        master_copies.put_back(call, program)
        call.replaced = state.replaced
        commit(state, program.units)
        make_kept_equal(captured.carried, call)
        turn.is_distributing = False

    def _settle(self, call: Call, agreement: Agreement) -> list[str]:
        """Find all facts of a call, with the mesh as programs see it; returns notes for the report."""
        check_leaves(call.given)
        call.groups.communicate_in(agreement.connection)
        call.resolve()
        check_devices(call.device_mesh, call.slots, call.inputs, call.offloaded)
        check_initializable(call)
        check_offloaded(call.slots, call.offloaded)
        call.groups.kept_by()  # raises where groups could not be opened, without waiting for other ranks
        self._compare_edits(call, agreement)
        tables = self._compare_arguments(call, agreement)
        call.groups.open_subgroups(agreement.connection)  # after an exchange: all ranks have come as far
        shares = Fact.SHARED_AXES in facts_of(self._options.pipeline)
        notes = call.groups.connect_local_ranks(agreement.all_gather_text) if shares else []
        if self._options.mode.defer_updates and agreement.connection is not None:
            if set(agreement.all_gather_text(_DEFERS)) != {_DEFERS}:
                raise RankMismatchError(f"expected {_DEFERS} on all ranks of {self._name} or on none")
            call.groups.pass_by_in(agreement.connection.separate_exchange())
        call.groups.mesh = with_rates(call.mesh, self._options.pipeline)
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
        if agreement.is_alone or not call.mode.sync:
            return
        state = {slot.input.name: slot.get() for slot in call.slots}
        names, edited = [*state], edited_before(call)
        made = [k for k, name in enumerate(names) if name in edited]
        ranks, gather = agreement.members, agreement.all_gather_text
        _, unequal = compare_edits(self._name, names, [""] * len(names), [*state.values()], made, ranks, gather)
        if unequal:
            raise EditedError(unequal)


def _run_by_first_rank(
    run: Callable[[], tuple[Program, Bundle | str | None]], local: Program, stages: CompilePhases, agreement: Agreement
) -> tuple[Program, Bundle | str | None]:
    """The program after the passes that the first rank runs for all, on ``local``, which is equal on all.

    Where it cannot be sent, or a pass asks which rank this is, each rank runs them.
    """
    made: tuple[Program, Bundle | str | None] | None = None
    mesh, watched = local.mesh, WatchedMesh(local.mesh)

    def work() -> bytes:
        nonlocal made
        _put_on(local, watched.mesh)
        try:
            program, parts = made = run()
        finally:
            _put_on(local, mesh)
        _put_on(program, mesh)
        if parts is None and not watched.was_asked:  # parts are sent by nothing
            with suppress(Exception):  # of passes of the user's, too
                return packed([program_to_data(program), [asdict(each) for each in stages.passes]])
        return b""

    content = agreement.by_first_rank(work)
    if made is not None or not content:
        return made or run()
    data, effects = unpacked(content)
    stages.passes += [PassEffect(**each) for each in effects]
    return program_from_data(data, mesh), None


def _put_on(program: Program, mesh: Mesh) -> None:
    for each in (program, *program.earlier.values()):
        each.mesh = mesh


def _check_same_stage(program: Program, agreement: Agreement) -> None:
    """Raise ``RankMismatchError`` where ranks with the same stages have other programs of these."""
    bundle: Bundle = program.stages
    if len(program.mesh.axes) > 1:
        own = f"{bundle.coordinate_of(program)} {bundle.digest(bundle.roles_of(program))}"
        found = set(agreement.all_gather_text(own))
        if len({each.partition(" ")[0] for each in found}) != len(found):
            raise RankMismatchError(f"expected ranks of one stage to have the same programs, got {sorted(found)}")
