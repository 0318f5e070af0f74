"""Copies of a step's arguments, of their annotations and of the mode: the user's own stay as they are."""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..annotations.contract import copy_annotations
from ..annotations.resolve import Ignored
from ..call.argument_logs import LogPath
from ..call.found import with_found
from ..call.nested_state import leaves_of, with_item
from ..call.state import ArgumentReader, Arguments, buffers_of, parameters_of
from ..modes.base import ParallelMode
from ..options import Options
from ..ranks.world import with_one_axis
from ..step import CompiledStep


@dataclass(frozen=True)
class Subject:
    """The subject of a verification: a compiled step, and the arguments of a call with the whole batch."""

    step: CompiledStep[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Subject:
        """Raises ``TypeError`` for what is no compiled step, ``ValueError`` for arguments that cannot be copied."""
        if isinstance(step, types.MethodType) and isinstance(step.__func__, CompiledStep):
            step, args = step.__func__, (step.__self__, *args)
        if not isinstance(step, CompiledStep):
            raise TypeError(f"expected a step that spmd.compile made, got {step!r}: decorate it with @spmd.compile")
        subject = cls(step, args, kwargs)
        subject._check()
        return subject

    def _check(self) -> None:
        if self.options.mode.statistics is not None:
            raise ValueError(
                'expected a step without statistics="per_micro_batch", with which it does not compute what the plain '
                "step does on the whole batch"
            )
        given = with_found(self.function, self.read(self.args, self.kwargs))
        outside = [each.name for each in given.found if each.path.leaf is None]
        if outside:
            raise ValueError(
                f"expected the step to take all that it trains as arguments, but it reaches {', '.join(outside)} by "
                "name, of which verify cannot make a copy: pass it as an argument"
            )
        for each in [*parameters_of(given.modules), *buffers_of(given.modules)]:
            if isinstance(each.tensor, DTensor):
                raise ValueError(
                    f"{each.name} is a DTensor, of which this process has a part only: verify a model that is whole, "
                    "before its first call"
                )
            if each.tensor.is_meta:
                raise ValueError(f"{each.name} is on the meta device, and has no values to compute with: initialize it")

    @property
    def function(self) -> Callable[..., Any]:
        """The step as the user wrote it."""
        return self.step.function

    @property
    def options(self) -> Options:
        """The options of the step."""
        return self.step.options

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any], logs: Collection[LogPath] = ()) -> Arguments:
        """The arguments by name, of which those at the paths ``logs`` are written to, and not read."""
        reader = ArgumentReader(inspect.signature(self.function))
        reader.logs.update(logs)
        return reader.read(args, kwargs)

    @property
    def device_type(self) -> str:
        """The type of device on which the step computes."""
        given = self.read(self.args, self.kwargs)
        tensors = [each.tensor for each in parameters_of(given.modules)] + [leaf.value for leaf in given.tensors()]
        return tensors[0].device.type if tensors else "cpu"

    def copied(self, in_double: bool) -> Copy:
        """Deep copies of the arguments, with the annotations of their modules. ``in_double``: float32 as float64."""
        memo: dict[int, Any] = {}
        args, kwargs = self._deep_copies(memo)
        given = with_found(self.function, self.read(self.args, self.kwargs))
        _copy_attributes(given.optimizers.values(), memo)
        modules = {each for module in given.modules.values() for each in module.modules()}
        ignored = self.options.mode.ignored
        modules |= set(ignored.modules if ignored is not None else ())
        copy_annotations({each: memo[id(each)] for each in modules if id(each) in memo})
        if ignored is not None:
            parameters = [memo[each] for each in ignored.parameters() if each in memo]
            ignored = Ignored(parameters, [memo[id(each)] for each in ignored.modules if id(each) in memo])
        if in_double:
            self._to_double(args, kwargs)
        return Copy(args, kwargs, ignored, in_double)

    def _deep_copies(self, memo: dict[int, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            return copy.deepcopy((self.args, self.kwargs), memo)
        except Exception as error:  # of any class among the arguments
            raise ValueError(
                "expected arguments that copy.deepcopy can copy, since verify computes on copies of them, but it "
                f"raises {type(error).__name__}: {error}"
            ) from error

    def _to_double(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Give copies float64 in the place of float32."""
        given = with_found(self.function, self.read(args, kwargs))
        state = [each.tensor for each in [*parameters_of(given.modules), *buffers_of(given.modules)]]
        for tensor in state:
            gradient, tensor.grad = tensor.grad, None
            tensor.data = _double(tensor.data)
            tensor.grad = None if gradient is None else _double(gradient)
        for optimizer in given.optimizers.values():
            for owner, entries in [*optimizer.state.items()]:
                for path, leaf in [*leaves_of(entries)]:
                    if isinstance(leaf, Tensor) and leaf.ndim:
                        optimizer.state[owner] = with_item(optimizer.state[owner], path, _double(leaf))
        for leaf in given.tensors():
            leaf.value.data = _double(leaf.value.data)


@dataclass(frozen=True)
class Copy:
    """Copies of arguments. ``ignored``: what the mode leaves alone, among them. ``in_double``: with wider dtypes."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ignored: Ignored | None
    in_double: bool = False

    def mode(self, mode: ParallelMode, mesh: DeviceMesh) -> ParallelMode:
        """``mode`` on another mesh, for these copies."""
        made = copy.copy(mode)
        made.mesh, made.ignored = with_one_axis(mesh, mode.one_axis), self.ignored
        return made


def _copy_attributes(optimizers: Iterable[Optimizer], memo: dict[int, Any]) -> None:
    """Copy what optimizers have as attributes of their own, too: torch's copies lack these.

    Functions are left out: schedulers put one there that steps the original.
    """
    for optimizer in optimizers:
        made = memo.get(id(optimizer))
        for key, value in vars(optimizer).items() if made is not None else ():
            if key not in vars(made) and not isinstance(value, (types.FunctionType, types.MethodType)):
                setattr(made, key, copy.deepcopy(value, memo))


def _double(tensor: Tensor) -> Tensor:
    wider = {torch.float32: torch.float64, torch.complex64: torch.complex128}
    return tensor.to(wider[tensor.dtype]) if tensor.dtype in wider else tensor


def has_single_precision(subject: Subject) -> bool:
    """Whether some parameter is of float32, or complex of two."""
    given = with_found(subject.function, subject.read(subject.args, subject.kwargs))
    return any(each.tensor.dtype in (torch.float32, torch.complex64) for each in parameters_of(given.modules))


def on_copies(options: Options, mode: ParallelMode, in_double: bool) -> Options:
    """The options of a step that computes on copies: no files are written, and float64 takes twice the memory."""
    memory = 2 * options.memory if options.memory is not None and in_double else options.memory
    return replace(options, mode=mode, dump=None, timeout=None, memory=memory, check_first=False)
