"""Put what a program returns where the step would have put it: gradients, optimizer state, attributes, logs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from passes import Output, OutputKind, Program, Role
from passes.ir.program import is_pending, is_sharded
from passes.memory.left_behind import in_planned_memory

from .._torch import DisableTorchFunctionSubclass, dtensor_of, dtensor_spec, tree_map
from ..call.state import Arguments
from ..capture import Captured, FromOutput
from ..lowering.gradient_memory import GradientMemory
from ..python_state.effects.repeated import StateMemory
from ..python_state.reads import ReadSite
from ..state.split_tensor import SplitRows, SplitTensor


class Results:
    """The results of one program; ``names`` are of its live state tensors, in order."""

    def __init__(
        self,
        program: Program,
        captured: Captured,
        names: list[str],
        device_mesh: DeviceMesh,
        memory: GradientMemory,
    ) -> None:
        """``memory``: of the gradients that the step leaves behind at each call."""
        self._captured, self._names, self._memory = captured, names, memory
        values = zip(program.outputs, program.output_values(), in_planned_memory(program), strict=True)
        outputs = [each for each in values if each[0].kind is not OutputKind.UPDATE]
        self._as_state = [_maker(output, device_mesh) for output, *_ in outputs]
        self._copied = [k for k, (*_, is_copied) in enumerate(outputs) if is_copied]
        self._copied_of = [outputs[k][0].of or "" for k in self._copied]
        self._layouts = [_layout(outputs[k][1].meta["val"]) for k in self._copied]

    def write_state(self, returned: list[Any], arguments: Arguments, tensors: list[torch.Tensor]) -> None:
        """Put new state where eager would have put it."""
        captured = self._captured
        if not (captured.new_state or captured.cleared_gradients or captured.requires_grad):
            return
        with DisableTorchFunctionSubclass():  # of parameters that are split
            self._write_state(returned, arguments, dict(zip(self._names, tensors, strict=True)))

    def _write_state(self, returned: list[Any], arguments: Arguments, live: dict[str, torch.Tensor]) -> None:
        captured, current = self._captured, partial(self._current, self._copies(returned, live))
        for new in captured.new_state:
            if new.unless is not None and returned[new.unless.index]:
                continue
            value = current(new.value) if isinstance(new.value, FromOutput) else tree_map(current, new.value)
            if not new.optimizer:
                live[new.parameter].grad = value
                continue
            state: dict[Any, Any] = arguments.optimizers[new.optimizer].state
            if new.key is None:
                state[new.parameter] = value
            else:
                state[live.get(new.parameter, new.parameter)][new.key] = value
        for name in captured.cleared_gradients:
            live[name].grad = None
        for name, value in captured.requires_grad.items():
            live[name].requires_grad_(value)

    def _copies(self, returned: list[Any], live: dict[str, torch.Tensor]) -> list[Any]:
        """What the program ``returned``, with copies of what it has computed in planned memory."""
        if not self._copied:
            return returned
        parameters, values = [live[name] for name in self._copied_of], [returned[k] for k in self._copied]
        copies, found = self._memory.filled(parameters, values, self._layouts), list(returned)
        for k, copy in zip(self._copied, copies, strict=True):
            found[k] = copy
        return found

    def write_python_state(
        self, returned: list[Any], shown: list[Any], arguments: Arguments, tensors: list[torch.Tensor]
    ) -> None:
        """Repeat what the step did to attributes, globals, parameter groups and logs, which get what is ``shown``."""
        if not self._captured.writes:
            return

        def current(leaf: Any, is_state: bool) -> Any:
            if isinstance(leaf, StateMemory):
                return tensors[self._names.index(leaf.name)].detach()
            values = returned if is_state else shown
            value = values[leaf.index] if isinstance(leaf, FromOutput) else leaf
            if not isinstance(leaf, FromOutput) or not isinstance(value, torch.Tensor) or not is_state:
                return value
            # Eager makes another tensor at each call, in memory of its own.
            return self._as_state[leaf.index](value.clone())

        for write in self._captured.writes:
            write.apply(arguments, partial(current, is_state=isinstance(write.target, ReadSite)))

    def _current(self, returned: list[Any], leaf: Any) -> Any:
        """The value of a leaf of new state."""
        return self._as_state[leaf.index](returned[leaf.index]) if isinstance(leaf, FromOutput) else leaf


def _maker(output: Output, device_mesh: DeviceMesh) -> Callable[[Any], Any]:
    """The function that makes state of this rank's value of an output: a DTensor where that is a part."""
    if not is_sharded(output.placement) and not is_pending(output.placement):
        return _whole
    assert output.dtype is not None, "what is split is a tensor"
    stride = torch.empty(output.shape, device="meta").stride()
    spec = dtensor_spec(device_mesh, output.placement, output.shape, stride, output.dtype)
    return partial(dtensor_of, spec=spec, kind=SplitRows if output.role is Role.RESULT else SplitTensor)


def _layout(val: torch.Tensor) -> Any:
    """All that a tensor is besides its values."""
    return val.shape, val.stride(), val.dtype, val.device


def _whole(value: Any) -> Any:
    return value
