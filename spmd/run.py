"""Run a compiled program: live state and arguments in, results out, new state where it belongs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from passes import Output, OutputKind, Program, Report, Role
from passes.program import is_sharded

from .capture import Captured, FromOutput
from .live import as_dtensor
from .lower import Executable
from .randomness import next_call
from .state import Arguments, Slot, hyper_parameters_of


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
    owners: list[weakref.ref[Any]]  # the modules and optimizers it was compiled for: the ids of dead ones are reused

    def is_for(self, arguments: Arguments, hyper_parameters: Sequence[Any]) -> bool:
        """Whether a call with this program's key, and these values of hyper-parameters, may run it."""
        owners = [*arguments.modules.values(), *arguments.optimizers.values()]
        alive = all(ref() is owner for ref, owner in zip(self.owners, owners, strict=True))
        return alive and self.captured.guards.hold(hyper_parameters)

    @property
    def written_arguments(self) -> list[str]:
        """The arguments that the step writes into."""
        outputs = self.captured.program.outputs
        return [o.name for o in outputs if o.kind is OutputKind.UPDATE and not o.role.is_state]

    def run(self, arguments: Arguments, slots: Sequence[Slot]) -> Any:
        """One call: gather the inputs, run, put results and new state where they belong."""
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
            values["seed"] = next_call()
        return [values[declared.name] for declared in self.program.inputs]

    def _store(self, returned: list[Any], arguments: Arguments, slots: dict[str, Slot]) -> None:
        """Put new state where eager would have put it."""
        outputs = [output for output in self.program.outputs if output.kind is not OutputKind.UPDATE]
        for new in self.captured.new_state:
            value = new.value
            if isinstance(value, FromOutput):
                value = self._as_state(returned[value.index], outputs[value.index])
            parameter = slots[new.parameter].get()
            if new.optimizer:
                arguments.optimizers[new.optimizer].state[parameter][new.key] = value
            else:
                parameter.grad = value
        for name in self.captured.gone_gradients:
            slots[name].get().grad = None

    def _as_state(self, local: Any, output: Output) -> Any:
        if not is_sharded(output.placement):
            return local
        stride = torch.empty(output.shape, device="meta").stride()
        return as_dtensor(local, output.placement, self.device_mesh, output.shape, stride)
