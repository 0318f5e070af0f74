"""``CompileCache``: look for the entry of a call, on all ranks together; store what a compilation made.

An entry has what capture, plan, partition and passes made of a call, on one rank, and what the trace read; or what
capture made, where the programs behind it cannot be data. Ranks take entries that were stored in one compilation, or
compile. What the first rank captured is sent as data to the others, where all would capture the same: they bind it as
they would an entry.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from passes import Program, SpmdError, print_program

from ..call.call import Call
from ..call.state import submodules_of
from ..capture.captured import Captured
from ..capture.sizes.any_size import AnySize
from ..capture.sizes.same_program import captured_the_same
from ..interpreter.foreign_code import is_foreign_module, is_library_file
from ..interpreter.source_lines import warn_user
from ..lowering.islands import CompiledIslands, Kernels
from ..options import CacheOption, Options
from ..python_state.effects.carried import Carried
from ..python_state.reads import Reads
from ..ranks.consensus import Agreement
from ..ranks.simulated import simulated
from .call_key import facts_of_call, facts_of_mesh, names_of
from .captured_data import captured_from_data, captured_to_data, constant_to_data
from .described import Describer, digest_of
from .folder import Folder, RefusedFolderError
from .kernel_data import kernels_from_files, kernels_to_files, surroundings_of_kernels
from .library_code import is_of_library
from .not_cached import NotCachedError
from .packed import as_bytes, packed, unpacked
from .program_data import printed, program_from_data, program_to_data
from .read_data import StoredReads, bind_reads, reads_to_data, sites_of
from .surroundings import functions, same_functions, surroundings

_BY_DEFAULT = 64  # ranks of a job, each of which writes an entry: more are too many for a home that hosts share
_TRIED = 32  # entries of one key that a call is compared with
_LEAST_TIMEOUT = 60.0  # seconds that ranks must be ready to wait, for one of them to capture for all
_OF_CALLS = ("leaves", "inputs", "answers")  # facts that a trace for any size has none of, or other ones than a call
_READ = (NotCachedError, RefusedFolderError, OSError, LookupError, ValueError, TypeError, AttributeError, RuntimeError)
_UNDESCRIBED = (NotCachedError, RuntimeError)  # torch has no contents for some tensors, and Python an end of recursion


@dataclass
class Warm:
    """An entry, bound to the objects of a call.

    ``programs``: after partition and after passes, if it has them; else ``not_kept`` says why.
    """

    captured: Captured
    reads: StoredReads
    flags: Mapping[str, Mapping[str, bool]]  # that the trace left on optimizers
    number: str  # of the compilation that stored it, equal on all ranks
    programs: tuple[Program, Program] | None = None
    not_kept: str = ""
    kernels: Kernels | None = None  # of its islands


@dataclass
class Lookup:
    """A look-up: what identifies a call, and the entry that was found.

    ``why``: the reason that its capture cannot be data, and ``not_kept`` that the programs behind it are not stored.
    ``islands``: of the step, where it has a backend that compiles them.
    """

    call: Call
    function: Callable[..., Any]
    live: Carried
    islands: CompiledIslands | None = None
    folder: Folder | None = None
    key: str = ""
    number: str = ""
    why: str = ""
    not_kept: str = ""
    shared_key: str = ""  # equal on all ranks that would capture the same; empty if this one captures for itself
    is_shared: bool = False  # whether the first rank captures for all
    warm: Warm | None = None
    is_on: bool = False
    verifies: bool = False
    warns: bool = True  # of a folder that cannot be used, which is else a note in the report
    unusable: str = ""  # the note on a folder that is not used
    missed: str = ""  # why the entry that was used last does not fit
    names: Mapping[int, str] = field(default_factory=dict)
    functions: Mapping[str, Any] = field(default_factory=dict)
    found: dict[str, Warm] = field(default_factory=dict)
    _context: str = ""  # the key without facts of one call
    _flags: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    _slots: list[str] = field(default_factory=list)
    _data: dict[str, Any] = field(default_factory=dict)
    _kernels: dict[str, bytes] = field(default_factory=dict)
    _text: str = ""

    def agree(self, agreement: Agreement) -> None:
        """Settle on an entry that all ranks have, or on none; all call it together, whatever their own options are."""
        own_found = {number: warm.programs is not None for number, warm in self.found.items()}
        own = json.dumps([uuid.uuid4().hex[:16], own_found, self.verifies, self.shared_key])
        gathered = [_entries(text) for text in agreement.all_gather_text(own)]
        if None in gathered:
            return  # some rank has come to another exchange, and the next one says so
        self.number = gathered[0][0]
        self.verifies = any(verifies for _, _, verifies, _ in gathered)  # one rank cannot compile alone
        first = gathered[0][1]  # of each entry, whether it has programs: on all ranks, or on none
        common = [each for each in first if all(found.get(each) is first[each] for _, found, _, _ in gathered)]
        if common:
            self.warm = self.found[common[0]]
        keys = {key for *_, key in gathered}
        self.is_shared = not common and not self.verifies and len(keys) == 1 and keys != {""}

    @property
    def capture(self) -> Warm | None:
        """The entry that serves in the place of a trace."""
        return None if self.verifies else self.warm

    @property
    def _is_kept(self) -> bool:
        return self.folder is not None and not self.why

    def note_capture(self, captured: Captured, reads: Any, any_size: AnySize | None) -> None:
        """Take what the trace read as data, while nothing has changed since.

        ``any_size``: that the program was made from, by a trace of this call or of one before.
        """
        if self._data or self.capture is not None or not (self.is_shared or self.folder is not None):
            return
        if not self.why and (self.is_shared or self._is_kept):
            try:
                self._take(captured, reads, any_size)
            except Exception as error:  # as in ``_describe``
                self.why = str(error) or type(error).__name__
        if self.why and any_size is not None:
            any_size.trace.setdefault("why", self.why)

    def _take(self, captured: Captured, reads: Any, any_size: AnySize | None) -> None:
        if [slot.input.name for slot in self.call.slots] != self._slots:
            raise NotCachedError("the step leaves some of the optimizer's state alone, or begins without it")
        trace = self._trace(captured, reads) if isinstance(reads, Reads) else any_size.trace if any_size else {}
        if "context" not in trace:  # guards of this process do not look at all that a key has
            raise NotCachedError(trace.get("why") or "the trace that serves its sizes was not kept")
        if self.call.library_hooks:
            raise NotCachedError("the first forward of its modules puts hooks on them, which no entry does")
        if trace["context"] != self._context:
            raise NotCachedError("torch's switches changed since the trace that serves its sizes")
        if any_size is not None:
            any_size.trace.update(trace)
        data = {name: trace[name] for name in ("reads", "functions", "flags")}
        data |= {
            "capture": captured_to_data(captured, trace["constants"], trace["places"]),
            "values": self._values(captured),
        }
        self._data = {**data, "captured": program_to_data(captured.program)}

    def _trace(self, captured: Captured, reads: Reads) -> dict[str, Any]:
        """The part of an entry that is the same for all sizes."""
        data, _ = reads_to_data(reads, self.function, self.call.given.leaves, self.names, captured.carried.numbers)
        flags, constants = _changed_flags(self._flags, _flags_of(self.call)), captured.constants
        constants_as_data = [constant_to_data(each, reads) for each in constants]
        found = {"reads": data, "functions": self.functions, "flags": flags, "constants": constants_as_data}
        places = {site.address: number for number, site in enumerate(sites_of(reads))}
        return {**found, "places": places, "context": self._context}

    def _values(self, captured: Captured) -> list[Any]:
        live = {*captured.carried.leaves, *captured.carried.unread}
        return [[leaf.name, _value(leaf, live, self.names)] for leaf in self.call.given.leaves]

    def send(self, captured: Program) -> bytes:
        """The capture as bytes for the other ranks; none where it cannot be data.

        Nor where the program computes with ints of a call, which rules ask for: data has them as they are now; nor with
        floats that only a call knows (Adafactor reads a tensor's), which data has not.
        """
        return b"" if self.why or _has_numbers_of_a_call(captured) else packed(self._data)

    def receive(self, content: bytes, name: str) -> tuple[Captured, StoredReads]:
        """The capture that another rank sent, bound to the objects of this one; ``name``: of the program.

        Raises ``NotCachedError``, or another error, if it is not of such a call.
        """
        self._data = unpacked(content)
        captured, reads = _bind_capture(self, self._data)
        captured.program.name = name
        set_flags(self.call, self._data["flags"])
        return captured, reads

    def forget(self) -> None:
        """Keep nothing of a capture of another rank, which is not that of this one after all."""
        self._data = {}

    def has_one_program(self, local: Program, agreement: Agreement) -> bool:
        """Whether all ranks have this partitioned program, down to each number, so that one may run passes for all.

        All of them measure islands.
        """
        if not self.is_shared:
            return False
        own = ""
        if not self.not_kept and self.islands is None and local.stages is None:
            with suppress(Exception):  # of modes of the user's, too
                own = digest_of(program_to_data(local))
        found = set(agreement.all_gather_text(own))
        return len(found) == 1 and found != {""}

    def note_kernels(self, kernels: Kernels) -> None:
        """Take the kernels of the program's islands as files."""
        if self._data and self._is_kept and not self.not_kept:
            try:
                self._kernels = kernels_to_files(kernels)
            except NotCachedError as error:
                self.not_kept = str(error)

    def note_programs(self, captured: Captured, partitioned: Program, program: Program) -> None:
        """Take the programs as data, and note in the report what there will be no entry of, and why."""
        if self._data and self._is_kept:
            self._data["captured"] |= {"notes": captured.program.notes, "room": captured.program.room}
            self._take_programs(partitioned, program)
            self._data["not_kept"] = self.not_kept
            if self.not_kept and _has_numbers_of_a_call(captured.program):
                self.why = self.not_kept
        if self.capture is not None:
            self.not_kept = self.not_kept or self.capture.not_kept
        if self.missed and self.warm is None:
            program.notes.append(f"compiled anew, though there is an entry for such a call: {self.missed}")
        if self.unusable:
            program.notes.append(self.unusable)
        elif self.is_on and self.why:
            program.notes.append(f"not kept for later processes: {self.why}")
        elif self.is_on and self.not_kept:
            program.notes.append(f"what follows the trace is not kept for later processes: {self.not_kept}")

    def _take_programs(self, partitioned: Program, program: Program) -> None:
        if self.not_kept:
            return
        try:
            self._data |= {"partitioned": program_to_data(partitioned), "final": program_to_data(program)}
            self._text = print_program(program)
        except _UNDESCRIBED as error:
            self.not_kept = str(error)
            self._kernels = {}

    def open(self, setting: CacheOption) -> None:
        """Take the folder of the cache, if it can be used."""
        assert setting.folder is not None
        self.verifies, self.warns = setting.verifies, not setting.is_default
        if setting.is_default and dist.is_initialized() and dist.get_world_size() > _BY_DEFAULT:
            self.unusable = f"steps of more than {_BY_DEFAULT} ranks are kept for later processes if cache= says where"
            return
        try:
            self.folder = Folder.open(setting.folder)
        except (OSError, RefusedFolderError) as error:
            problem = f"compiled steps are not kept for later processes: {error}"
            if self.warns:
                warn_user(problem)
            else:
                self.unusable = problem

    def store(self, notes: list[str]) -> None:
        """Write an entry, unless there is one, or a reason not to.

        What the file system refuses is warned of, or, where nobody asked for a cache, added to the report's ``notes``.
        """
        if self.folder is None or not self._is_kept or not self._data or self.warm is not None:
            return
        files = {f"{name}.json": as_bytes(data) for name, data in self._data.items()}
        files |= {**self._kernels, "program.py": self._text.encode()}  # the last is for people; nothing reads it
        try:
            self.folder.write(f"{self.key}-{self.number}-{_rank()}", files)
        except OSError as error:
            problem = f"a compiled step cannot be kept for later processes: {error}. Training goes on"
            if self.warns:
                warn_user(problem)
            else:
                notes.append(problem)

    def verify(self, captured: Captured, local: Program, program: Program) -> None:
        """Raise ``SpmdError``, with the line, if the entry that was found is not what was compiled now.

        What was made from a trace of any size may have other names of nodes, so that its captured ops decide. Passes
        would run anew on an entry for state that lay otherwise.
        """
        if self.warm is None or not self.verifies:
            return
        own, stored = self.warm.captured, self.warm.programs
        pairs = [(own.program, captured.program)]
        if stored is not None and (stored[0].stored, stored[0].fixed) == (local.stored, local.fixed):
            pairs.append((stored[1], program))
        for was, now in pairs:
            found = _first_difference(printed(was), printed(now))
            if found and own.is_of_one_size is not captured.is_of_one_size and captured_the_same(own, captured):
                return
            if found:
                raise SpmdError(
                    f"the program of {now.name} in the cache is not what the step compiles to, {found}\nRemove it with "
                    "spmd cache clear, and report how the step was changed"
                )


def _first_difference(stored: str, made: str) -> str:
    """The first line in which two texts differ, but for comments; empty if there is none."""
    for number, (was, now) in enumerate(zip(stored.splitlines(), made.splitlines(), strict=False), start=1):
        if was != now and not was.startswith("#"):
            return f"in line {number}:\n    stored: {was.strip()}\n    now:    {now.strip()}"
    return ""


def look_up(
    name: str,
    function: Callable[..., Any],
    call: Call,
    options: Options,
    live: Carried,
    excluded: str,
    shares: bool,
    islands: CompiledIslands | None,
    agreement: Agreement,
) -> Lookup:
    """Look for the entry of a call. All ranks call it together.

    ``excluded``: a reason that it can have none. ``shares``: whether one rank may capture for all. ``islands``: of the
    step, where it has a backend that compiles them.
    """
    why = excluded or _not_data(call, options, live)
    lookup = Lookup(call, function, live, islands, why=why, not_kept=_not_kept(call, options))
    setting, connection = options.cache_option, agreement.connection
    shares = (
        shares and connection is not None and connection.timeout >= _LEAST_TIMEOUT and not _has_library_modules(call)
    )
    lookup.is_on = setting.folder is not None and simulated() is None
    if setting.folder is not None and lookup.is_on and not excluded:
        lookup.open(setting)
    if not lookup.why and (lookup.folder is not None or shares):
        _describe(lookup, name, options, shares)
    if lookup.folder is not None and not lookup.why:
        _find(lookup, lookup.folder, name)
    lookup.agree(agreement)
    if lookup.warm is not None and lookup.folder is not None:
        lookup.folder.touch(lookup.folder.path / f"{lookup.key}-{lookup.warm.number}-{_rank()}")
    return lookup


def rehearse_look_up(
    name: str,
    function: Callable[..., Any],
    call: Call,
    options: Options,
    live: Carried,
    excluded: str,
    islands: CompiledIslands | None,
) -> Lookup:
    """A look-up that finds nothing and stores nothing, for what it would not keep of a call, and why."""
    why = excluded or _not_data(call, options, live)
    folder = Folder(Path(os.devnull))  # nothing is written there
    lookup = Lookup(call, function, live, islands, folder, why=why, not_kept=_not_kept(call, options), is_on=True)
    if not lookup.why:
        _describe(lookup, name, options, shares=False)
    return lookup


def _has_library_modules(call: Call) -> bool:
    """Whether modules are of an installed library but torch, and of none whose code entries take.

    Most of these read what no data holds, which the first rank would find out by a trace, while the others wait.
    """
    classes = {type(module) for _, module in submodules_of(call.given.modules)}
    others = [each.__module__ for each in classes if not is_foreign_module(each.__module__)]
    own = {sys.modules.get(name) for name in others if not is_of_library(name)}
    return any(is_library_file(str(getattr(module, "__file__", ""))) for module in own)


def _describe(lookup: Lookup, name: str, options: Options, shares: bool) -> None:
    """Note the keys of a call: that of its entry on this rank, and that which ranks compare."""
    call = lookup.call
    try:
        lookup.names = names_of(call)
        lookup.functions = functions()
        lookup._flags = _flags_of(call)
        lookup._slots = [slot.input.name for slot in call.slots]
        describer = Describer(lookup.names)
        step, _, _ = name.rpartition("/")  # the program's number says in which order calls came
        facts = facts_of_call(step, lookup.function, call, options, lookup.live.leaves, describer)
        around, of_kernels = surroundings(), surroundings_of_kernels() if lookup.islands is not None else None
    except Exception as error:  # of objects of the user's, too: the step compiles all the same
        lookup.why = str(error) or type(error).__name__
        return
    lookup.key = digest_of([facts, around, of_kernels, lookup.not_kept])
    lookup._context = digest_of([{k: v for k, v in facts.items() if k not in _OF_CALLS}, around])
    if shares:
        lookup.shared_key = digest_of([{**facts, "mesh": facts_of_mesh(call)}, around])


def _find(lookup: Lookup, folder: Folder, name: str) -> None:
    """Bind the entries that this rank has for the call."""
    own = [each for each in folder.entries(f"{lookup.key}-") if each.name.endswith(f"-{_rank()}")]
    for entry in own[:_TRIED]:
        try:
            warm = _bind(lookup, folder, entry)
            for program in (warm.captured.program, *(warm.programs or ())):
                program.name = name
            lookup.found[warm.number] = warm
        except _READ as error:
            lookup.missed = lookup.missed or f"{error}" or type(error).__name__


def _not_data(call: Call, options: Options, live: Carried) -> str:
    """Why the capture of a call is no data: code of the user's that it depends on, or what data does not hold yet."""
    reasons = {
        "it has overrides": options.overrides,
        "it has a GradScaler": call.given.scalers,
        "numbers of its state changed": live.numbers or live.sites or live.counters,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _not_kept(call: Call, options: Options) -> str:
    """Why programs are not kept whose capture is data: options with code of the user's, or what entries do not hold."""
    reasons = {
        "it has a gm_transformation": options.gm_transformation,
        "it has a backend of the user's": callable(options.backend),
        "its programs are edited": options.program,
        "it has a budget of memory": options.memory,
        "it defers updates": options.mode.defer_updates,
        "it is captured as CUDA graphs": options.cuda_graphs,
        "it is a pipeline": options.mode.has_stages,
        "it is dumped": options.dump_folder,
        "ranks have unequal numbers of rows": call.uneven,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _bind(lookup: Lookup, folder: Folder, entry: Path) -> Warm:
    """Bind an entry to the objects of a call. Raises one of ``_READ`` if it is damaged, or not of such a call."""
    files = folder.read(entry)
    data = {name.removesuffix(".json"): json.loads(each) for name, each in files.items() if name.endswith(".json")}
    captured, reads = _bind_capture(lookup, data)
    warm = Warm(captured, reads, data["flags"], entry.name.split("-")[1], not_kept=data["not_kept"])
    if "final" in data and not lookup.not_kept:
        partitioned, program = (program_from_data(data[name], lookup.call.mesh) for name in ("partitioned", "final"))
        warm.programs = partitioned, program
        if lookup.islands is not None:
            warm.kernels = kernels_from_files(data["kernels"], files, lookup.islands)
    return warm


def _bind_capture(lookup: Lookup, data: Mapping[str, Any]) -> tuple[Captured, StoredReads]:
    """Bind what was captured, and the reads of its trace. Raises one of ``_READ`` if it is not of such a call."""
    call = lookup.call
    if module := same_functions(data["functions"], lookup.functions):
        raise NotCachedError(f"{module} has other functions than it had")
    reads, _ = bind_reads(data["reads"], lookup.function, call.given.leaves, lookup.names)
    program = program_from_data(data["captured"], call.mesh)
    program.annotations = call.annotations
    captured = captured_from_data(data["capture"], program, reads)
    if json.loads(json.dumps(lookup._values(captured))) != data["values"]:
        raise NotCachedError("a number or text among the arguments is another one")
    numbers = [
        *(each.get() for each in call.hyper_parameters),
        *(each.get() for each in captured.carried.numbers),
        *(each.get() for each in captured.carried.arguments(call.given)),
    ]
    if captured.carried.counters or not captured.guards.hold(numbers):
        raise NotCachedError("numbers lead to another branch")
    return captured, reads


def _has_numbers_of_a_call(captured: Program) -> bool:
    """Whether a captured program has ints of a call, which rules ask for, or floats that only a call knows."""
    vals = [node.meta.get("val") for node in captured.graph.nodes]
    return any(
        isinstance(val, (torch.SymInt, torch.SymBool)) or (isinstance(val, torch.SymFloat) and val.node.hint is None)
        for val in vals
    )


def set_flags(call: Call, flags: Mapping[str, Mapping[str, bool]]) -> None:
    """Leave the flags on optimizers that a trace leaves."""
    for name, changed in flags.items():
        vars(call.given.optimizers[name]).update(changed)


def _flags_of(call: Call) -> dict[str, dict[str, bool]]:
    """Torch's own flags on optimizers, such as that ``step`` was called, by which schedulers know that they may."""
    own = {name: vars(optimizer) for name, optimizer in call.given.optimizers.items()}
    return {
        name: {key: value for key, value in held.items() if key.startswith("_") and type(value) is bool}
        for name, held in own.items()
    }


def _changed_flags(
    before: Mapping[str, Mapping[str, bool]], after: Mapping[str, Mapping[str, bool]]
) -> dict[str, dict[str, bool]]:
    return {
        name: {key: value for key, value in flags.items() if before.get(name, {}).get(key) is not value}
        for name, flags in after.items()
    }


def _value(leaf: Any, live: set[str], names: Mapping[int, str]) -> Any:
    """The value of a plain argument that is a constant of the program; the type of one that each call reads."""
    plain = (bool, int, float, complex, str, bytes, type(None))
    if leaf.name in live or not isinstance(leaf.value, plain):
        return [type(leaf.value).__qualname__]
    return Describer(names).of(leaf.value)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _entries(text: str) -> Any:
    """Read what a rank published of its entries; None for other text."""
    with suppress(ValueError):
        return json.loads(text)
    return None
