"""The options of ``spmd.compile``: checked where they are given, so that an error names the user's own line."""

from __future__ import annotations

import os
import reprlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

import passes
from passes import MemoryBudgetError, PartitionError, Pass, Program
from passes.default_passes import with_micro_batches
from passes.defer import run_and_defer
from passes.fit_memory import AllGather, bytes_of_stages, check_state_fits, decide_gathers, describe_fit, fit, refusal
from passes.ir.bundle import Bundle
from passes.runner import OnStage

from .edited_programs import EditedPrograms
from .interpreter.interrupts import interruptible
from .lowering.backends import Backend, check_backend
from .modes.auto import Auto, partition_together
from .modes.base import ParallelMode, check_callable, check_flag, check_passes
from .modes.data_parallel import DataParallel
from .modes.option_groups import check_memory, check_one_of
from .modes.shares import STYLES
from .override import Override, transform_graph_module
from .ranks.simulated import simulated
from .unexpected_errors import errors_of


def cache_setting() -> str:
    """The value of the environment variable ``SPMD_CACHE``; "on" where there is none."""
    return os.environ.get("SPMD_CACHE", "on")


@dataclass(frozen=True)
class CacheOption:
    """The folder in which compiled steps are kept for later processes, if any; ``verifies``: compile, and compare.

    ``is_default``: nobody asked for it, so that what keeps it from its work is a note in the report, and no warning.
    """

    folder: Path | None
    verifies: bool = False
    is_default: bool = False

    @classmethod
    def of(cls, given: str) -> CacheOption:
        """``"off"``, ``"on"``, ``"verify"``, a folder, or ``"verify:<folder>"``; "on" is the user's cache directory."""
        if given in ("", "off"):
            return cls(None)
        kind, colon, folder = given.partition(":")
        verifies = given == "verify" or (kind == "verify" and bool(colon))
        named = folder if verifies else "" if given == "on" else given
        return cls(Path(named) if named else _user_folder(), verifies)


def _user_folder() -> Path:
    """A folder in the user's cache directory; of a user without a home, as in containers, among temporary files."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spmd"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"spmd-{os.geteuid()}"


@dataclass(frozen=True)
class Options:
    """The arguments of ``compile``, checked."""

    overrides: tuple[Override, ...]
    gm_transformation: Callable[[fx.GraphModule], fx.GraphModule] | None
    mode: ParallelMode
    passes: tuple[Pass, ...] | None
    backend: Backend
    dump: Path | None
    timeout: float | None
    keep_freed_memory: bool = False
    cuda_graphs: bool = False
    max_programs: int | None = None
    program: EditedPrograms | None = None
    memory: int | None = None  # bytes per rank
    dynamic: Mapping[str, Mapping[int, str]] = field(default_factory=dict)  # names of sizes, by argument and dim
    check_first: bool = False  # compare the first call of each program with the program that no pass has changed
    check_nan: bool = False  # look for NaN and Inf in each call
    cache: str | None = None

    @classmethod
    def check(
        cls,
        module_override: Any,
        gm_transformation: Any,
        parallel_mode: Any,
        passes: Any,
        backend: Any,
        dump: Any,
        timeout: Any,
        keep_freed_memory: Any = False,
        cuda_graphs: Any = False,
        max_programs: Any = None,
        program: Any = None,
        memory: Any = None,
        dynamic: Any = None,
        check: Any = None,
        cache: Any = None,
    ) -> Options:
        """The arguments of ``compile`` as options. Raises ``TypeError`` or ``ValueError`` for what cannot be one."""
        _check_deferring(parallel_mode, gm_transformation=gm_transformation, program=program, memory=memory)
        check = _check_check(check)
        _check_micro_batches(parallel_mode, program=program, check="first" if check == "first" else None)
        _check_bits(parallel_mode, backend)
        if isinstance(parallel_mode, Auto) and parallel_mode.adapt and passes is not None:
            raise ValueError("expected no passes= with spmd.Auto(adapt=True), which takes a schedule by measured times")
        _check_choice(parallel_mode, memory)
        edits = next((each for each in _check_overrides(module_override) if _edits_graph(each)), None)
        other = None if backend in ("aten", "inductor") else backend
        one = {"gm_transformation": gm_transformation, "transform": edits, "backend": other}
        _check_stages(parallel_mode, **one, cuda_graphs=cuda_graphs or None)
        return cls(
            overrides=_check_overrides(module_override),
            gm_transformation=check_callable("gm_transformation", gm_transformation),
            mode=check_mode(parallel_mode),
            passes=check_passes("passes", passes),
            backend=check_backend(backend),
            dump=_check_folder("dump", dump),
            timeout=_check_timeout(timeout),
            keep_freed_memory=check_flag("keep_freed_memory", keep_freed_memory),
            cuda_graphs=check_flag("cuda_graphs", cuda_graphs),
            max_programs=_check_max_programs(max_programs),
            program=_check_program(program, dump or os.environ.get("SPMD_DUMP")),
            memory=check_memory(memory),
            dynamic=_check_dynamic(dynamic),
            check_first=check == "first",
            check_nan=check == "nan",
            cache=_check_cache(cache),
        )

    @property
    def begins_once(self) -> str:
        """The reason that a call cannot begin anew with another program; empty where it can."""
        mode = self.mode
        reasons = {
            "with defer_updates=True, whose update is that of the call before": mode.defer_updates,
            'with bits="same", whose virtual parts have a value each': mode.bits is not None,
            "in stages, of which each rank computes one": mode.has_stages,
            "with cuda_graphs=True": self.cuda_graphs,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    @property
    def pipeline(self) -> tuple[Pass, ...]:
        """The passes to run: the user's, else the mode's, else the default ones; which form regions for a backend."""
        given = self.mode.custom_passes if self.passes is None else self.passes
        chosen = passes.default() if given is None else tuple(given)
        if self.cuda_graphs:
            chosen = passes.with_numbers_on_device(chosen, on_host=_OF_KERNELS)
        if self.mode.micro_batches > 1:
            chosen = with_micro_batches(chosen)
        if self.mode.has_stages:  # programs that share state would store it in other orders
            chosen = tuple(each for each in chosen if not isinstance(each, passes.OneStorage))
        if self.backend == "inductor":
            return passes.with_islands(chosen)
        return chosen if self.backend == "aten" else passes.with_regions(chosen)

    @interruptible
    def partition(self, captured: Program, all_gather: AllGather, kept: Sequence[Program]) -> Program:
        """One rank's share; of a pipeline, in the fastest of its schedules that fits into ``memory``. Collective then.

        ``kept``: as for ``fitted``. Raises ``MemoryBudgetError`` if none fits, or state alone does not.
        """
        local, needed = self._share(captured, all_gather), list[tuple[int, str, int]]()
        if self.memory is not None:
            check_state_fits(local, self.memory, all_gather, kept)
        while self.memory is not None and local.stages is not None:
            needed.append(bytes_of_stages(local, self.pipeline, all_gather, kept))
            if needed[-1][0] <= self.memory:
                local.notes.append(describe_fit(local.schedules[0], needed[-1][0], self.memory))
                break
            if len(local.schedules) == 1:
                raise MemoryBudgetError(refusal(self.memory, *min(needed)))
            local = self._share(replace(captured, schedules=local.schedules[1:]), all_gather)
        return local

    def _share(self, captured: Program, all_gather: AllGather) -> Program:
        mode = self.mode
        with errors_of(PartitionError, f"the mode {type(mode).__name__}", may_be_ours=True):
            return (
                partition_together(mode, captured, all_gather) if isinstance(mode, Auto) else mode.partition(captured)
            )

    @interruptible
    def fitted(
        self, partitioned: Program, all_gather: AllGather, kept: Sequence[Program]
    ) -> tuple[Program, tuple[Pass, ...]]:
        """The partitioned program and the passes to run on it: where there is a budget, those that fit; collective.

        How often runs gather is decided, too, where the mode leaves it open. ``kept``: the programs that the step has
        besides.
        """
        partitioned = decide_gathers(partitioned, self.pipeline, all_gather)
        if self.memory is None or partitioned.stages is not None:
            return partitioned, self.pipeline
        fitted = fit(partitioned, self.pipeline, self.memory, all_gather, kept)
        fitted.program.notes.append(fitted.note)
        return fitted.program, fitted.pipeline

    @interruptible
    def run(
        self, partitioned: Program, pipeline: tuple[Pass, ...], on_stage: OnStage
    ) -> tuple[Program, Bundle | str | None]:
        """The final program, and those that run in its place where updates are deferred; if none are, why."""
        if self.mode.defer_updates:
            return run_and_defer(partitioned, pipeline, on_stage)
        return passes.run(partitioned, pipeline, on_stage), None

    def final(self, made: Program) -> Program:
        """The program to run: ``made`` by the passes, changed by ``gm_transformation`` or the text of ``program``."""
        program = transform_graph_module(made, self.gm_transformation)
        return program if self.program is None else self.program.of(program)

    def describe(self, made: Program) -> str:
        """Describe what must be equal on all ranks: whether calls are measured, and the edits of a program."""
        measures = "\nspmd.Auto(adapt=True)" if isinstance(self.mode, Auto) and self.mode.adapt else ""
        return measures if self.program is None else f"{measures}\n{self.program.describe(made)}"

    @property
    def cache_option(self) -> CacheOption:
        """The user's choice, else that of the environment variable ``SPMD_CACHE``, else the user's cache directory."""
        if self.cache is not None:
            return CacheOption.of(self.cache)
        return replace(CacheOption.of(cache_setting()), is_default="SPMD_CACHE" not in os.environ)

    @property
    def dump_folder(self) -> Path | None:
        """The folder of dumps: the user's, else that of the environment variable ``SPMD_DUMP``.

        Simulated ranks write none.
        """
        folder = self.dump or (None if simulated() else os.environ.get("SPMD_DUMP"))
        return Path(folder) if folder else None


def _check_deferring(mode: Any, **options: Any) -> None:
    """Raise ``ValueError`` for options that know of one program a call, where updates are deferred."""
    given = [name for name, value in options.items() if value is not None]
    if given and isinstance(mode, ParallelMode) and mode.defer_updates:
        raise ValueError(f"expected no {given[0]} with defer_updates=True, which divides a step into several programs")


def _check_choice(mode: Any, memory: Any) -> None:
    """Raise ``ValueError`` for a number of micro-batches that nothing decides, or that decides numbers."""
    if not (isinstance(mode, ParallelMode) and mode.chooses_runs):
        return
    if memory is None:
        raise ValueError('expected memory= with micro_batches="auto", which takes as few as fit into it')
    if mode.statistics is not None or mode.has_stages:
        raise ValueError(
            "expected a number of micro_batches with statistics= or stages: what a step computes, or how, depends on it"
        )


def _check_micro_batches(mode: Any, **options: Any) -> None:
    """Raise ``ValueError`` for options that know of one run of a program a call, where micro-batches have several."""
    given = [name for name, value in options.items() if value is not None]
    if given and isinstance(mode, ParallelMode) and mode.micro_batches > 1:
        raise ValueError(f"expected no {given[0]} with micro_batches, of which each runs a program in a call")


def _check_bits(mode: Any, backend: Any) -> None:
    """Raise ``ValueError`` for a backend whose kernels follow from what it measures, where bits are to be the same."""
    if isinstance(mode, ParallelMode) and mode.bits is not None and backend != "aten":
        raise ValueError(
            f'expected backend="aten" with bits="same", whose kernels are the same in each run, got {backend!r}'
        )


def _check_stages(mode: Any, **options: Any) -> None:
    """Raise ``ValueError`` for options that know of one program, where each stage of a pipeline has several."""
    given = [name for name, value in options.items() if value is not None]
    if given and isinstance(mode, ParallelMode) and mode.has_stages:
        raise ValueError(f"expected no {given[0]} with stages, of which each runs programs of its own")


def _edits_graph(override: Any) -> bool:
    return isinstance(override, Override) and type(override).transform is not Override.transform


def _check_overrides(given: Any) -> tuple[Override, ...]:
    if given is None:
        return ()
    if isinstance(given, (nn.Module, torch.optim.Optimizer)):
        raise TypeError(
            f"spmd.compile compiles a function that trains, got a {type(given).__name__}: write the step as a function "
            "that calls the model, the backward pass and the optimizer, and pass that"
        )
    if not isinstance(given, Sequence) or not all(isinstance(each, Override) for each in given):
        kind = f"a list with a {_kind_of_other(given)}" if isinstance(given, (list, tuple)) else reprlib.repr(given)
        raise TypeError(
            f"expected module_override to be a list of spmd.Override instances, or the function to compile, got {kind}"
        )
    return tuple(given)


def _kind_of_other(overrides: Sequence[Any]) -> str:
    return next(type(each).__name__ for each in overrides if not isinstance(each, Override))


# What kernels of optimizers take from the host only, by names in ``param_groups``.
_OF_KERNELS = ("*.betas.*", "*.eps", "*.weight_decay", "*.momentum", "*.dampening", "*.lr_decay")


def check_mode(given: Any) -> ParallelMode:
    """The parallel mode: one by name, and ``DataParallel("replicate")`` for None.

    Raises ``ValueError`` for another name, and ``TypeError`` for anything else.
    """
    if given is None:
        return DataParallel("replicate")
    if isinstance(given, str):
        check_one_of("parallel_mode", given, tuple(STYLES), ", or a spmd.ParallelMode")
        return DataParallel(given)  # type: ignore[arg-type] # one of them
    if not isinstance(given, ParallelMode):
        raise TypeError(
            f'expected parallel_mode to be a spmd.ParallelMode, such as DataParallel("replicate"), got {given!r}'
        )
    return given


def _check_folder(name: str, given: Any) -> Path | None:
    if given is not None and not isinstance(given, (str, os.PathLike)):
        raise TypeError(f"expected {name} to be a folder's path or None, got {given!r}")
    return Path(given) if given is not None else None


def _check_program(given: Any, dump: Any) -> EditedPrograms | None:
    """Read now: a dump, or the user's next edit, may change the files before the step is called."""
    folder = _check_folder("program", given)
    if folder is not None and dump is not None and Path(dump).resolve() in folder.resolve().parents:
        raise ValueError(
            f"expected dump to be another folder than that of program={str(folder)!r}, which it would replace"
        )
    return EditedPrograms.read(folder)


def _check_max_programs(given: Any) -> int | None:
    if given is not None and (isinstance(given, bool) or not isinstance(given, int)):
        raise TypeError(f"expected max_programs to be a number of programs or None, got {given!r}")
    if given is not None and given < 1:
        raise ValueError(f"expected max_programs to be 1 or more, got {given}")
    return given


def _check_dynamic(given: Any) -> Mapping[str, Mapping[int, str]]:
    if given is None:
        return {}
    are_maps = isinstance(given, Mapping) and all(isinstance(dims, Mapping) for dims in given.values())
    names = [(name, *pair) for name, dims in given.items() for pair in dims.items()] if are_maps else []
    if not are_maps or not all(all(map(isinstance, each, (str, int, str))) for each in names):
        raise TypeError(
            f"expected dynamic to name sizes by argument and dim, as {{'tokens': {{1: 'time'}}}} does, got {given!r}"
        )
    return {name: dict(dims) for name, dims in given.items()}


def _check_check(given: Any) -> str | None:
    given = os.environ.get("SPMD_CHECK") or None if given is None else given
    if given not in (None, "first", "nan"):
        raise ValueError(f'expected check (or SPMD_CHECK) to be "first", "nan" or None, got {given!r}')
    return None if given is None else str(given)


def _check_cache(given: Any) -> str | None:
    if given is not None and not isinstance(given, (str, os.PathLike)):
        raise TypeError(f'expected cache to be "off", "on", "verify", a folder\'s path or None, got {given!r}')
    return None if given is None else os.fspath(given)


def _check_timeout(given: Any) -> float | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"expected timeout to be a number of seconds or None, got {given!r}")
    if not given > 0:
        raise ValueError(f"expected timeout to be more than 0 seconds, got {given!r}")
    return float(given)
