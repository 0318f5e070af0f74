"""``spmd.compile`` and what it returns: the path of a train step, a line a stage, and the cache of its programs."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import passes as passes_package
from passes import Mesh, Pass, PassError, Program, RankMismatchError, Realise, Report, SpmdError

from ._torch import DisableAutocast, get_proxy_mode
from .call.inputs import place_inputs
from .call.rng import adopt, proposed, told
from .call.state import ArgumentReader, Arguments, hyper_parameters_of, parameters_of, slots_of
from .capture import Captured, capture
from .capture.python_reads import Reads
from .compiled import Compiled
from .dump import Dump, dump_stages
from .guards.guards import Guards, Leaves, check_leaves, torch_modes
from .modes.base import ParallelMode, check_passes
from .modes.data_parallel import DataParallel
from .override import Override, replaced, transform
from .ranks.consensus import COMPILE, FAILED, Agreement, MeshRanks, all_or_none, identity_of
from .ranks.local_ranks import connect_local_ranks
from .ranks.world import describe, joined, world
from .runtime.arenas import Memory
from .runtime.distribute_state import check_memory, commit, follow_split, on_mesh, prepare
from .runtime.flat_storage import surveyed
from .runtime.lower import Backend, lower

_MANY = 8  # programs of one step, before it warns


@dataclass(frozen=True)
class Options:
    """What the user passed to ``compile``, checked."""

    overrides: tuple[Override, ...]
    gm_transformation: Callable[[fx.GraphModule], fx.GraphModule] | None
    mode: ParallelMode
    passes: tuple[Pass, ...] | None
    backend: Backend
    dump: Path | None
    timeout: float

    @property
    def pipeline(self) -> tuple[Pass, ...]:
        """The passes to run: the user's, else the mode's, else the default ones."""
        if self.passes is not None:
            return self.passes
        if self.mode.custom_passes is not None:
            return tuple(self.mode.custom_passes)
        return passes_package.default()


class CompiledStep:
    """A train step that runs compiled; it takes the arguments of the function it wraps.

    ``programs`` are the programs so far, one per signature of a call; ``program`` is the one last run. A copy compiles
    for itself, with the same options: programs and the memory that they compute in are not shared.
    """

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        functools.update_wrapper(self, function)
        self._function, self._options = function, options
        signature = inspect.signature(function)
        if "last_train_step" in signature.parameters:
            raise TypeError(f"{self._name} has an argument last_train_step, which compiled steps take themselves")
        self._reader = ArgumentReader(signature)
        self._compiled: list[Compiled] = []
        self._changes: list[str] = []  # why each program but the first was compiled
        self._last: Compiled | None = None
        self._memory = Memory()
        self._turn = threading.RLock()  # one thread after the other: all programs compute in the same memory

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._function, self._options)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledStep:
        """A step of the same options: a mesh has no copies. The function of a step that a model holds is the copy's."""
        return type(self)(copy.deepcopy(self._function, memo), self._options)

    @property
    def _name(self) -> str:
        return str(getattr(self._function, "__name__", type(self._function).__name__))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A compiled method: the instance is its first argument."""
        return self if instance is None else functools.partial(self, instance)

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs compiled so far, in order."""
        return tuple(compiled.program for compiled in self._compiled)

    @property
    def program(self) -> Program | None:
        """The program last run, None before the first call."""
        return self._last.program if self._last else None

    def __call__(self, *args: Any, last_train_step: bool = False, **kwargs: Any) -> Any:
        """Run one step. With ``last_train_step=True`` anything that was left for the next call is finished.

        A compiled step that another one calls is a part of that one.
        """
        if get_proxy_mode() is not None:
            return self._function(*args, **kwargs)
        with self._turn:
            result = self._step(args, kwargs)
        if last_train_step:
            self.flush()
        return result

    def _step(self, args: Any, kwargs: Any) -> Any:
        arguments, compiled, tensors = self._arrive(args, kwargs)
        if compiled is None:
            compiled = self._compile_together(arguments)
            tensors = compiled.guards.layout.read(arguments)
        assert tensors is not None, "a program fits the call that it was compiled for"
        self._last = compiled
        return compiled.run(arguments, tensors)

    def _arrive(self, args: Any, kwargs: Any) -> tuple[Arguments, Compiled | None, list[torch.Tensor] | None]:
        """The call, and the program that fits it if there is one, once all ranks have said that they do the same."""
        try:
            arguments = self._reader.read(args, kwargs)
            compiled, tensors = self._fitting(arguments)
            ranks = compiled.ranks if compiled else MeshRanks.of(self._mesh_for(arguments), self._options.timeout)
        except Exception as error:
            self._tell_of(error)
            raise
        intent = compiled.intent() if compiled else COMPILE
        ranks.agree_on_program(self._name, intent, lambda: self._told(arguments, compiled))
        return arguments, compiled, tensors

    def _fitting(self, arguments: Arguments) -> tuple[Compiled | None, list[torch.Tensor] | None]:
        """The program to run, and the live state it runs on; the one last run is asked first."""
        last = [self._last] if self._last else []
        for compiled in [*last, *(c for c in self._compiled if c is not self._last)]:
            tensors = compiled.guards.admit(arguments) if compiled.is_connected() else None
            if tensors is not None:
                return compiled, tensors
        return None, None

    def _told(self, arguments: Arguments, compiled: Compiled | None) -> list[str]:
        """The call in lines, for ranks that differ to find the first difference."""
        lines = Leaves.of(arguments).told()
        if compiled is not None:
            return [*lines, f"runs program {self._compiled.index(compiled)}", told()]
        return [*lines, f"has to compile, since this changed: {self._change(arguments) or 'nothing was compiled yet'}"]

    def _change(self, arguments: Arguments) -> str:
        """By what a call differs from the one before."""
        if self._last and not self._last.is_connected():
            return "a call failed as it began, and ranks of one host have to connect anew"
        return self._last.guards.difference(arguments, slots_of(arguments)) if self._last else ""

    def _tell_of(self, error: Exception) -> None:
        """A call that went wrong before any rank could know: let those go that wait for this one."""
        mesh = self._options.mode.mesh or (self._last.device_mesh if self._last else None)
        with suppress(RankMismatchError):
            said = f"failed: {type(error).__name__}: {error}"
            MeshRanks.of(mesh, self._options.timeout).agree_on_program(self._name, FAILED, lambda: [said])

    def _compile_together(self, arguments: Arguments) -> Compiled:
        follow_split(arguments.optimizers)
        with all_or_none(self._name, MeshRanks.of(self._mesh_for(arguments), self._options.timeout)) as agreement:
            change = self._change(arguments)
            compiled = self._compile(arguments, agreement)
        self._compiled.append(compiled)
        self._changes.append(change)
        if len(self._compiled) == _MANY:
            warnings.warn(
                f"{self._name} has compiled {_MANY} programs. What changed before the last ones: "
                f"{'; '.join(self._changes[-3:])}. If it changes at every call, pass it as a tensor, or leave it out",
                stacklevel=4,
            )
        return compiled

    def report(self) -> Report:
        """What the program last run communicates in one step, and how long it took to compile."""
        return self._ran().report

    def dump(self, folder: str | Path) -> None:
        """Write the stages of all programs under ``folder``, as ``compile(dump=folder)`` does."""
        for index, each in enumerate(self._compiled):
            target = Path(folder) / self._name / f"program-{index}"
            dump_stages(
                target, each.captured.program, each.partitioned, self._options.pipeline, each.program, each.report
            )

    def flush(self) -> None:
        """Finish what the last call left for the next one. No pass leaves anything so far."""

    def _ran(self) -> Compiled:
        if self._last is None:
            raise SpmdError(f"{self._name} has not been called yet, so there is no program to report on: call it first")
        return self._last

    def _compile(self, arguments: Arguments, agreement: Agreement) -> Compiled:
        """Capture, plan, partition, transform, passes, lower. State is touched at the end, when all has gone well."""
        options, mode = self._options, self._options.mode
        check_leaves(arguments)
        slots = slots_of(arguments)
        arguments = arguments.naming_state(slots)
        device_mesh = self._mesh_for(arguments)
        slots = on_mesh(slots, device_mesh)
        mesh, reads, modes = self._described(device_mesh, agreement), Reads(), torch_modes()
        clock = _Clock()
        dump = self._dump()
        with clock.stage("capture"):
            inputs = place_inputs(arguments, mode.inputs, mode.input_batch_dim, mesh)
            with replaced(arguments.modules, options.overrides):
                name = f"{self._name}/program-{len(self._compiled)}"
                hyper_parameters = hyper_parameters_of(arguments.optimizers)
                captured = capture(self._function, arguments, slots, hyper_parameters, inputs, mesh, name, reads)
            check_memory(captured.program, slots, arguments)
            if dump:
                dump.stage(0, "capture", captured.program)
        with clock.stage("partition"), DisableAutocast():
            program = surveyed(mode.partition(captured.program), slots, options.pipeline, agreement.all_gather_text)
            prepared = prepare(slots, program.inputs, mesh, device_mesh)
            flat_state = list(prepared.locals)
            program, flat_state = transform(program, options.overrides, flat_state)
            partitioned = program
            if dump:
                dump.stage(1, "partition", program)
        with clock.stage("passes"), DisableAutocast():
            program = passes_package.run(program, options.pipeline, on_stage=dump.on_pass if dump else None)
        with clock.stage("lower"), DisableAutocast():
            program = _transformed(program, options.gm_transformation)
            executable = lower(program, options.backend, self._memory)
        report = Report.of(program, clock.seconds, program.notes)
        if dump:
            dump.stage(99, "lowered", program)
            dump.report(report)
        described = _described(captured, program)
        adopt(agreement.agree(described, proposed(first=not self._compiled)))
        commit(prepared, arguments, mesh, device_mesh)
        known = {id(local) for local in prepared.locals}
        fixed = {
            declared.name: tensor
            for declared, tensor in zip(partitioned.inputs, flat_state, strict=False)
            if id(tensor) not in known
        }
        return Compiled(
            program,
            captured,
            partitioned,
            executable,
            device_mesh,
            report,
            fixed,
            identity_of(name, described),
            agreement.ranks,
            Guards.of(arguments, slots_of(arguments), reads, captured.guards, modes),
        )

    def _described(self, device_mesh: DeviceMesh, agreement: Agreement) -> Mesh:
        """The mesh as programs carry it. Local ranks are connected if a pass asks for it."""
        mesh, timeout = describe(device_mesh), self._options.timeout
        if not any(isinstance(each, Realise) for each in self._options.pipeline):
            return mesh
        return connect_local_ranks(mesh, device_mesh, agreement.all_gather_text, timeout)

    def _mesh_for(self, arguments: Arguments) -> DeviceMesh:
        """The mode's mesh, else that of all ranks for the model's device; with the axes that parameters live on."""
        tensors = [parameter.tensor for parameter in parameters_of(arguments.modules)]
        meshes = [tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)]
        tensors = tensors[:1] + [leaf.value for leaf in arguments.tensors()[:1]]
        return joined(self._options.mode.mesh or world(tensors[0].device if tensors else None), meshes)

    def _dump(self) -> Dump | None:
        folder = self._options.dump or os.environ.get("SPMD_DUMP")
        return Dump(Path(folder) / self._name / f"program-{len(self._compiled)}") if folder else None


def compile(
    module_override: Any = None,
    gm_transformation: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    parallel_mode: ParallelMode | None = None,
    *,
    passes: Sequence[Pass] | None = None,
    backend: Backend = "aten",
    dump: str | Path | None = None,
    timeout: float = 10.0,
) -> Any:
    """Compile a train step into one graph that runs on every device of a mesh.

    Use it bare (``@spmd.compile``), with arguments (``@spmd.compile(parallel_mode=...)``), or on a function
    (``spmd.compile(step, parallel_mode=...)``). The compiled step computes what the plain step computes on one device
    that holds the whole batch.

    - ``module_override``: a list of ``Override``.
    - ``gm_transformation``: called with the final graph of every program, once; returns the graph to run.
    - ``parallel_mode``: where tensors live; None means ``DataParallel("replicate")``.
    - ``passes``: the passes to run in the place of the mode's own; ``()`` runs none.
    - ``backend``: ``"aten"``, or ``callable(gm, example_inputs) -> callable``.
    - ``dump``: a folder for the graph of every stage; the environment variable ``SPMD_DUMP`` does the same.
    - ``timeout``: seconds by which ranks may be apart when they come to compile; then all raise.

    Raises ``TypeError`` for arguments of another kind. Calls raise ``CaptureError``, ``PlacementError``,
    ``PartitionError``, ``PassError`` or ``RankMismatchError`` while they compile, and leave model and optimizer as
    they were.
    """
    bare = inspect.isfunction(module_override) or inspect.ismethod(module_override)
    options = Options(
        _check_overrides(None if bare else module_override),
        _check_callable("gm_transformation", gm_transformation),
        _check_mode(parallel_mode),
        check_passes("passes", passes),
        _check_backend(backend),
        _check_folder(dump),
        _check_timeout(timeout),
    )

    def decorate(function: Callable[..., Any]) -> CompiledStep:
        if not callable(function):
            raise TypeError(f"expected a function to compile, got {function!r}")
        return CompiledStep(function, options)

    return decorate(module_override) if bare else decorate


def _check_overrides(given: Any) -> tuple[Override, ...]:
    if given is None:
        return ()
    if not isinstance(given, Sequence) or not all(isinstance(each, Override) for each in given):
        raise TypeError(f"expected module_override to be a list of spmd.Override instances, got {given!r}")
    return tuple(given)


def _check_callable(name: str, given: Any) -> Any:
    if given is not None and not callable(given):
        raise TypeError(f"expected {name} to be callable or None, got {given!r}")
    return given


def _check_folder(given: Any) -> Path | None:
    if given is not None and not isinstance(given, (str, os.PathLike)):
        raise TypeError(f"expected dump to be a folder's path or None, got {given!r}")
    return Path(given) if given is not None else None


def _check_timeout(given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"expected timeout to be a number of seconds, got {given!r}")
    if not given > 0:
        raise ValueError(f"expected timeout to be more than 0 seconds, got {given!r}")
    return float(given)


def _check_mode(given: Any) -> ParallelMode:
    if given is None:
        return DataParallel("replicate")
    if not isinstance(given, ParallelMode):
        raise TypeError(
            f'expected parallel_mode to be a spmd.ParallelMode, such as DataParallel("replicate"), got {given!r}'
        )
    return given


def _check_backend(given: Any) -> Any:
    if given != "aten" and not callable(given):
        raise TypeError(f'expected backend to be "aten" or a callable, got {given!r}')
    return given


def _described(captured: Captured, program: Program) -> str:
    """What must be equal on all ranks: the user's seed, the captured program and its constants, its collectives."""
    inputs = [f"{i.name}: {i.dtype}{list(i.shape)} {i.placement}" for i in captured.program.inputs]
    constants = [str(constant.tolist()) for constant in captured.constants]
    traffic = [f"{node.target} {node.meta['collective']}" for node in program.collectives()]
    return "\n".join([told(), *inputs, *constants, captured.program.graph_module.code, *traffic])


def _transformed(program: Program, transformation: Callable[[fx.GraphModule], fx.GraphModule] | None) -> Program:
    if transformation is None:
        return program
    module = transformation(program.graph_module)
    if not isinstance(module, fx.GraphModule):
        raise PassError(f"expected gm_transformation to return a GraphModule, got {module!r}")
    return replace(program, graph_module=module, history=[*program.history, "98 gm_transformation"])


@dataclass
class _Clock:
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
