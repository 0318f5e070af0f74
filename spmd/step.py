"""``CompiledStep``: a train step as users have it, to call, and to ask what it does."""

from __future__ import annotations

import copy
import functools
import html
import inspect
import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from passes import Diff, Program, Report, SpmdError, print_program

from ._torch import get_proxy_mode
from .capture.explain_errors import shorten_traceback
from .deferral.pending import calling, remove_stale
from .dispatch import Dispatch
from .dump import files_of, stage_name, stages_to_compare, visit_stages
from .guards.recompiles import Recompiles
from .interpreter.source_lines import defined_at
from .options import Options
from .profile import Profile
from .recorder import Recorder
from .running.compiled import Compiled
from .running.deferred_program import DeferredProgram
from .state.split_tensor import own_looks
from .step_compiler import StepCompiler
from .step_runner import StepRunner
from .watching.watch import Watch, watch_of

P = ParamSpec("P")
R = TypeVar("R")
_Owner = TypeVar("_Owner")
_Rest = ParamSpec("_Rest")  # the arguments of a method behind ``self``


class CompiledStep(Generic[P, R]):
    """A train step that runs compiled; it takes the arguments of the function it wraps.

    ``programs`` are the programs so far, one per signature of a call; ``program`` is the one last run. A copy compiles
    for itself, with the same options: programs and the memory that they compute in are not shared.
    """

    def __init__(self, function: Callable[P, R], options: Options) -> None:
        functools.update_wrapper(self, function)
        self._function, self._options = function, options
        where = f"\n    {defined_at(function)}"
        signature = inspect.signature(function)
        if "last_train_step" in signature.parameters:
            raise TypeError(f"{self._name} has an argument last_train_step, which compiled steps take themselves")
        self._dispatch = Dispatch(self._name, function, options, where)
        self._compiler = StepCompiler(self._name, function, options, where, self._dispatch)
        self.runner = StepRunner(self._name, function, options, where, self._dispatch, self._compiler)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._function, self._options)

    def __repr__(self) -> str:
        """The step, where it is defined, its mode, and its programs."""
        last = self._dispatch.programs.last
        ran = f"{len(self.programs)} in use, last {last.program.name}" if last else "none yet"
        return f"<compiled step {self._name}, {self._options.mode!r}, programs: {ran}>"

    def _repr_html_(self) -> str:
        """The text that a notebook shows: the same, and the report of the program last run."""
        report = self.report()._repr_html_() if self._dispatch.programs.last else ""
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
        return tuple(program for compiled in self._dispatch.programs.all for program in compiled.programs)

    @property
    def program(self) -> Program | None:
        """The program last run, None before the first call."""
        return self._dispatch.programs.last.last_program if self._dispatch.programs.last else None

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
                result = self.runner.run(args, kwargs)
        except Exception as error:
            shorten_traceback(error)
            for sentence in filter(None, [each.lose_pending() for each in self._dispatch.programs.deferred()]):
                error.add_note(sentence)
            raise
        if last_train_step:
            self.flush()
        return result

    def recompiles(self) -> Recompiles:
        """Each program that was compiled, with the reason that it exists; also those that can run no more."""
        kept = {each.program.name for each in self._dispatch.programs.all if each.is_alive()}
        programs = [replace(each, is_kept=each.program in kept) for each in self._compiler.compilations]
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
        self.runner.profile = Profile(steps)

    def record(self, folder: str | Path | None, last: int = 20) -> None:
        """Write what it takes to run the ``last`` calls again, from the next call on; None ends that.

        All ranks call it; each writes to ``folder/rank-<its number>``: arguments, numbers and seeds of each call, and
        the state before every ``last``-th one. ``spmd replay folder --rank 3 --call 57`` runs the 57th call of this
        step again and stops at the first NaN or Inf. Raises ``ValueError`` where the folder has something else in it.
        """
        self._check_whole("recorded")
        if type(last) is not int or last < 1:
            raise ValueError(f"expected the number of calls to keep, got {last!r}")
        self.runner.recorder = None if folder is None else Recorder(Path(folder), last, self._name)

    def watch(
        self,
        pattern: str,
        *statistics: str,
        every: int = 1,
        as_one: bool = False,
        to: str | Path | Callable[[int, dict[str, dict[str, float]]], object] | Any = None,
    ) -> Watch:
        """Look at statistics of values in every ``every``-th call, from the next one on; returns what has the results.

        ``pattern``: a name or a pattern of names (``fnmatch``) of parameters; with ``.grad`` behind it of gradients, as
        the optimizer gets them, with ``.update`` of what it adds, with a key of its state (``.exp_avg``) of that; or of
        modules, with ``.output`` behind it. The argument that holds the model may be left out: ``"blocks.*.grad"``.
        ``statistics``: ``"norm"``, ``"max"`` (the largest absolute value), ``"zeros"`` (how many), ``"nan"`` (how many
        are NaN or Inf), ``"overflow"`` (NaN or +Inf), of whole values in any mode; ``"norm"`` if none is named.
        ``as_one``: of all of them as one, under the name ``"all"``.

        They are computed in the step, which waits for none: ``values`` of what is returned has them, and ``to`` gets
        them when the next call begins, on the first rank: a function of a call's number and values, a
        ``SummaryWriter``, or a file of JSON lines. Calls that look at nothing run another program. All ranks call it.
        Raises ``TypeError`` or ``ValueError`` for other arguments; a name that the step does not have raises
        ``CaptureError`` in the next call.
        """
        return self.runner.watches.add(watch_of(pattern, statistics or ("norm",), every, as_one, to))

    def _check_whole(self, done: str) -> None:
        if self._options.mode.defer_updates:
            raise SpmdError(
                f"a call of {self._name} is not a whole step, and cannot be {done}: compile it without defer_updates"
            )
        if self._options.mode.micro_batches > 1 and not self._options.mode.has_stages:
            raise SpmdError(
                f"a call of {self._name} runs a program for each micro-batch, and cannot be {done}: compile it without "
                "micro_batches"
            )

    def dump(self, folder: str | Path) -> None:
        """Write the stages of all programs under ``folder``, as ``compile(dump=folder)`` does."""
        for each in self._dispatch.programs.all:
            dump = self._compiler.dumps.dump(Path(folder), each.program.name)
            visit_stages(dump.stage, each.captured.program, each.partitioned, each.pipeline, each.program)
            dump.report(partial(getattr, each, "report"))
            between_calls: tuple[Program, ...] = ()
            if isinstance(each, DeferredProgram):
                dump.bundle(each.deferred.bundle)
                between_calls = each.programs
            for program in (*between_calls, *each.program.earlier.values()):
                self._compiler.dumps.dump(Path(folder), program.name).stage(99, "lowered", program)

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
        if self._dispatch.programs.last is None:
            raise SpmdError(f"{self._name} has not been called yet, so there is no program to {purpose}: call it first")
        return self._dispatch.programs.last

    def recover(self) -> None:
        """Make the state of all ranks whole and equal again after a call that failed; all ranks call it together.

        Possible where all state is replicated and some rank has it whole: then all get that rank's, as before the
        failed call if there is such a rank, else as after it. Where state is split over ranks and not whole, load a
        checkpoint instead. After an error on state that ranks have written other values to, all get the first rank's.
        Raises ``SpmdError`` where it is not possible, with the reason.
        """
        with calling:
            self.runner.failed.recover()

    def flush(self) -> None:
        """Finish the update that the last call left for the next one (``defer_updates``); all ranks call it together.

        What you read afterwards is up to date. Without anything pending it does nothing.
        """
        for each in self._dispatch.programs.deferred():
            each.finish_pending(is_asked=True)
        remove_stale()
