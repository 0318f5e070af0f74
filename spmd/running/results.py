"""Put what a program returns where the step would have put it: gradients, optimizer state, attributes, logs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from passes import Output, OutputKind, Program, Role
from passes.ir.program import is_pending, is_sharded

from .._torch import tree_map
from ..call.state import Arguments
from ..capture import Captured, FromOutput
from ..python_state.effects.repeated import StateMemory
from ..python_state.reads import ReadSite
from ..state.distribute import as_dtensor
from ..state.split_tensor import as_rows


class Results:
    """The results of one program; ``names`` are of its live state tensors, in order."""

    def __init__(self, program: Program, captured: Captured, names: list[str], device_mesh: DeviceMesh) -> None:
        self._captured, self._names, self._device_mesh = captured, names, device_mesh
        self._outputs = [output for output in program.outputs if output.kind is not OutputKind.UPDATE]

    @property
    def are_kept(self) -> bool:
        """Whether some of what a call makes is put somewhere."""
        captured = self._captured
        state = captured.new_state or captured.cleared_gradients or captured.requires_grad
        return bool(state or captured.writes)

    def write_state(self, returned: list[Any], arguments: Arguments, tensors: list[torch.Tensor]) -> None:
        """Put new state where eager would have put it."""
        captured = self._captured
        if not (captured.new_state or captured.cleared_gradients or captured.requires_grad):
            return
        live = dict(zip(self._names, tensors, strict=True))
        for new in captured.new_state:
            if new.unless is not None and returned[new.unless.index]:
                continue
            value = tree_map(partial(self._current, returned), new.value)
            state: dict[Any, Any] = arguments.optimizers[new.optimizer].state if new.optimizer else {}
            if new.optimizer and new.key is None:
                state[new.parameter] = value
            elif new.optimizer:
                state[live.get(new.parameter, new.parameter)][new.key] = value
            else:
                live[new.parameter].grad = value
        for name in captured.cleared_gradients:
            live[name].grad = None
        for name, value in captured.requires_grad.items():
            live[name].requires_grad_(value)

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
            return self._as_state(value.clone(), self._outputs[leaf.index])

        for write in self._captured.writes:
            write.apply(arguments, partial(current, is_state=isinstance(write.target, ReadSite)))

    def _current(self, returned: list[Any], leaf: Any) -> Any:
        """The value of a leaf of new state."""
        if not isinstance(leaf, FromOutput):
            return leaf
        return self._as_state(returned[leaf.index], self._outputs[leaf.index])

    def _as_state(self, local: Any, output: Output) -> Any:
        if not is_sharded(output.placement) and not is_pending(output.placement):
            return local
        stride = torch.empty(output.shape, device="meta").stride()
        found = as_dtensor(local, output.placement, self._device_mesh, output.shape, stride)
        return as_rows(found) if output.role is Role.RESULT else found
