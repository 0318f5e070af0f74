"""``spmd.compile`` and what it returns: the path of a train step, a line a stage, and the cache of its programs."""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

import passes as passes_package
from passes import Pass, PassError, PlacementError, Program, Report, Role, SpmdError

from .agree import agree, agree_on_seed
from .capture import Captured, FromOutput, capture
from .data_parallel import DataParallel
from .dump import Dump, dump_stages
from .inputs import place_inputs
from .live import as_dtensor, commit, prepare
from .lower import Backend, Executable, lower
from .modes import ParallelMode, check_passes
from .override import Override, replaced, transform
from .signature import signature
from .state import Arguments, HyperParameter, Slot, hyper_parameters_of, read_arguments, slots_of
from .world import describe, world


@dataclass(frozen=True)
class Options:
    """What the user passed to ``compile``, checked."""

    overrides: tuple[Override, ...]
    gm_transformation: Callable[[fx.GraphModule], fx.GraphModule] | None
    mode: ParallelMode
    passes: tuple[Pass, ...] | None
    backend: Backend
    dump: Path | None

    @property
    def pipeline(self) -> tuple[Pass, ...]:
        """The passes to run: the user's, else the mode's, else the default ones."""
        if self.passes is not None:
            return self.passes
        if self.mode.custom_passes is not None:
            return tuple(self.mode.custom_passes)
        return passes_package.default()


@dataclass
class Compiled:
    """One program with everything it takes to run it."""

    program: Program
    captured: Captured
    partitioned: Program
    executable: Executable
    device_mesh: DeviceMesh
    report: Report
    fixed: dict[str, torch.Tensor]  # state that a transform added
    base_seed: int
    owners: list[Any]  # the modules and optimizers of the signature, kept so that their ids stay theirs
    calls: int = 0

    @property
    def written_arguments(self) -> list[str]:
        """The arguments that the step writes into."""
        outputs = self.captured.program.outputs
        return [o.name for o in outputs if o.kind == "update" and not o.role.is_state]

    def run(self, arguments: Arguments, slots: Sequence[Slot]) -> Any:
        """One call: gather the inputs, run, put results and new state where they belong."""
        self.calls += 1
        given = {leaf.name: leaf.value for leaf in arguments.tensors()}
        contiguous = {name: tensor.contiguous() for name, tensor in given.items()}
        returned = self.executable(self._inputs(arguments, slots, contiguous))
        for name in self.written_arguments:
            if contiguous[name] is not given[name]:
                given[name].copy_(contiguous[name])
        self._store(returned, arguments, {slot.input.name: slot for slot in slots})
        return self.captured.result(returned)

    def _inputs(self, arguments: Arguments, slots: Sequence[Slot], tensors: dict[str, Any]) -> list[Any]:
        values: dict[str, Any] = {slot.input.name: slot.local() for slot in slots}
        values.update(self.fixed)
        values.update(tensors)
        values.update((hyper.name, hyper.get()) for hyper in hyper_parameters_of(arguments.optimizers))
        values.update((f"constant.{k}", c) for k, c in enumerate(self.captured.constants))
        if any(declared.role is Role.SEED for declared in self.program.inputs):
            torch.empty((), dtype=torch.int64).random_()  # as eager, a call with random ops moves the generator on
            values["seed"] = self.base_seed + self.calls
        return [values[declared.name] for declared in self.program.inputs]

    def _store(self, returned: list[Any], arguments: Arguments, slots: dict[str, Slot]) -> None:
        placements = {output.name: output for output in self.program.outputs}
        names = [output.name for output in self.program.outputs if output.kind != "update"]
        for new in self.captured.new_state:
            parameter = slots[new.parameter].get()
            value = new.value
            if isinstance(value, FromOutput):
                output = placements[names[value.index]]
                value = returned[value.index]
                if passes_package.program.is_sharded(output.placement):
                    stride = torch.empty(output.shape, device="meta").stride()
                    value = as_dtensor(value, output.placement, self.device_mesh, output.shape, stride)
            if new.optimizer:
                arguments.optimizers[new.optimizer].state[parameter][new.key] = value
            else:
                parameter.grad = value
        for name in self.captured.gone_gradients:
            slots[name].get().grad = None


class CompiledStep:
    """A train step that runs compiled; it takes the arguments of the function it wraps.

    ``programs`` are the programs so far, one per signature of a call; ``program`` is the one last run.
    """

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        functools.update_wrapper(self, function)
        self._function, self._options = function, options
        self._signature = inspect.signature(function)
        if "last_train_step" in self._signature.parameters:
            raise TypeError(f"{self._name} has an argument last_train_step, which compiled steps take themselves")
        self._compiled: dict[Any, list[Compiled]] = {}
        self._order: list[Compiled] = []
        self._last: Compiled | None = None

    @property
    def _name(self) -> str:
        return str(getattr(self._function, "__name__", type(self._function).__name__))

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs compiled so far, in order."""
        return tuple(compiled.program for compiled in self._order)

    @property
    def program(self) -> Program | None:
        """The program last run, None before the first call."""
        return self._last.program if self._last else None

    def __call__(self, *args: Any, last_train_step: bool = False, **kwargs: Any) -> Any:
        """Run one step. With ``last_train_step=True`` anything that was left for the next call is finished."""
        arguments = read_arguments(self._signature, args, kwargs)
        slots = slots_of(arguments)
        hyper_parameters = hyper_parameters_of(arguments.optimizers)
        key = signature(arguments, slots)
        values = [hyper.get() for hyper in hyper_parameters]
        compiled = next((c for c in self._compiled.get(key, []) if c.captured.guards.hold(values)), None)
        if compiled is None:
            compiled = self._compile(arguments, slots, hyper_parameters)
            self._compiled.setdefault(key, []).append(compiled)
            self._order.append(compiled)
            slots = slots_of(arguments)
        self._last = compiled
        result = compiled.run(arguments, slots)
        if last_train_step:
            self.flush()
        return result

    def report(self) -> Report:
        """What the program last run communicates in one step, and how long it took to compile."""
        return self._ran().report

    def dump(self, folder: str | Path) -> None:
        """Write the stages of all programs under ``folder``, as ``compile(dump=folder)`` does."""
        for index, each in enumerate(self._order):
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

    def _compile(self, arguments: Arguments, slots: list[Slot], hyper_parameters: list[HyperParameter]) -> Compiled:
        """Capture, plan, partition, transform, passes, lower. State is touched at the end, when all has gone well."""
        options, mode = self._options, self._options.mode
        device_mesh = self._mesh(arguments, slots)
        mesh = describe(device_mesh)
        clock = _Clock()
        dump = self._dump()
        with clock.stage("capture"):
            inputs = place_inputs(arguments, mode.inputs, mode.input_batch_dim, mesh)
            with replaced(arguments.modules, options.overrides):
                name = f"{self._name}/program-{len(self._order)}"
                captured = capture(self._function, arguments, slots, hyper_parameters, inputs, mesh, name)
            agree(f"the captured program of {self._name}", captured.program.graph_module.code)
            _place_arguments(captured.program, {x.name: x.placement for x in inputs})
            if dump:
                dump.stage(0, "capture", captured.program)
        with clock.stage("partition"):
            program = mode.partition(captured.program)
            prepared = prepare(slots, program.inputs, mesh)
            flat_state = list(prepared.locals)
            program, flat_state = transform(program, options.overrides, flat_state)
            partitioned = program
            if dump:
                dump.stage(1, "partition", program)
        with clock.stage("passes"):
            program = passes_package.run(program, options.pipeline, on_stage=dump.on_pass if dump else None)
        with clock.stage("lower"):
            program = _transformed(program, options.gm_transformation)
            executable = lower(program, options.backend)
            base_seed = agree_on_seed() if any(i.role is Role.SEED for i in program.inputs) else 0
        report = Report.of(program, clock.seconds, program.notes)
        if dump:
            dump.stage(99, "lowered", program)
            dump.report(report)
        commit(prepared, arguments, mesh, device_mesh)
        known = {id(local) for local in prepared.locals}
        fixed = {
            declared.name: tensor
            for declared, tensor in zip(program.inputs, flat_state, strict=False)
            if id(tensor) not in known
        }
        owners = [*arguments.modules.values(), *arguments.optimizers.values()]
        return Compiled(program, captured, partitioned, executable, device_mesh, report, fixed, base_seed, owners)

    def _mesh(self, arguments: Arguments, slots: Sequence[Slot]) -> DeviceMesh:
        if self._options.mode.mesh is not None:
            return self._options.mode.mesh
        tensors = [slot.get() for slot in slots] or [leaf.value for leaf in arguments.tensors()]
        mesh = world(tensors[0].device if tensors else None)
        for slot in slots:
            live = slot.get()
            if isinstance(live, torch.distributed.tensor.DTensor) and live.device_mesh != mesh:
                raise PlacementError(
                    f"{slot.input.name} is a DTensor on {live.device_mesh}, but the step runs on {mesh}: "
                    "give the mode the same mesh"
                )
        return mesh

    def _dump(self) -> Dump | None:
        folder = self._options.dump or os.environ.get("SPMD_DUMP")
        return Dump(Path(folder) / self._name / f"program-{len(self._order)}") if folder else None


def compile(
    module_override: Any = None,
    gm_transformation: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    parallel_mode: ParallelMode | None = None,
    *,
    passes: Sequence[Pass] | None = None,
    backend: Backend = "aten",
    dump: str | Path | None = None,
) -> Any:
    """Compile a train step into one graph that runs on every device of a mesh.

    Use it bare (``@spmd.compile``) or with arguments (``@spmd.compile(parallel_mode=...)``). The compiled step computes
    what the plain step computes on one device that holds the whole batch.

    - ``module_override``: a list of ``Override``.
    - ``gm_transformation``: called with the final graph of every program, once; returns the graph to run.
    - ``parallel_mode``: where tensors live; None means ``DataParallel("replicate")``.
    - ``passes``: the passes to run in the place of the mode's own; ``()`` runs none.
    - ``backend``: ``"aten"``, or ``callable(gm, example_inputs) -> callable``.
    - ``dump``: a folder for the graph of every stage; the environment variable ``SPMD_DUMP`` does the same.

    Raises ``TypeError`` for arguments of another kind. Calls raise ``CaptureError``, ``PlacementError``,
    ``PartitionError``, ``PassError`` or ``RankMismatchError``; nothing is changed then.
    """
    if inspect.isfunction(module_override) or inspect.ismethod(module_override):
        return compile()(module_override)
    options = Options(
        _check_overrides(module_override),
        _check_callable("gm_transformation", gm_transformation),
        _check_mode(parallel_mode),
        check_passes("passes", passes),
        _check_backend(backend),
        Path(dump) if dump is not None else None,
    )

    def decorate(function: Callable[..., Any]) -> CompiledStep:
        if not callable(function):
            raise TypeError(f"expected a function to compile, got {function!r}")
        return CompiledStep(function, options)

    return decorate


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


def _place_arguments(program: Program, placements: dict[str, Any]) -> None:
    """Note on a captured program where its arguments come from: modes read it, and may not change it."""
    from dataclasses import replace

    program.inputs = [
        replace(declared, placement=placements[declared.name]) if declared.name in placements else declared
        for declared in program.inputs
    ]


def _transformed(program: Program, transformation: Callable[[fx.GraphModule], fx.GraphModule] | None) -> Program:
    if transformation is None:
        return program
    module = transformation(program.graph_module)
    if not isinstance(module, fx.GraphModule):
        raise PassError(f"expected gm_transformation to return a GraphModule, got {module!r}")
    program.graph_module = module
    program.history.append("98 gm_transformation")
    return program


@dataclass
class _Clock:
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


_ = dist
