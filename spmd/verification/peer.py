"""The other ranks: they take the captured program of the first one, partition it for their place, and run the passes.

Capturing takes most of the time of compiling, and gives the same on all ranks. A peer holds its state as plain tensors
by name; what is no tensor of its own (numbers, seeds, constants) it has from the first rank, as ranks agree on these.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from passes import Axis, Input, Mesh, OutputKind, Program, Role, SpmdError
from passes.ir.numbers import pack
from passes.ir.program import is_sharded
from passes.runtime.master_copies import sent

from .._torch import DisableAutocast
from ..override import transform
from ..placements import left_to_cut, local_shape
from ..ranks.simulated import Simulated, standing_for
from ..running.compiled import Compiled
from .compared_stages import RankPrograms, after_each, transforms
from .rank import Held, SimulatedRank
from .values import Values, by_name
from .wholes import part_of


def programs_of(rank: SimulatedRank, compiled: Compiled, mesh: Mesh, state: list[Tensor]) -> RankPrograms:
    """Partition a captured program for the rank that ``mesh`` describes, which has this ``state``; run the passes."""
    options = rank.step.options
    with DisableAutocast():
        local = options.mode.partition(replace(compiled.captured.program, mesh=mesh))
        first = compiled.partitioned
        chosen = ("stored", "fixed", "reshard", "prefetch", "gathers_once")
        local = local.with_facts(**{name: getattr(first, name) for name in chosen})
        partitioned = local
        if transforms(options):
            partitioned = local.copy()
            local, _ = transform(local, options.overrides, lambda: state)
        after, final = after_each(local, compiled.pipeline)
        return RankPrograms(partitioned, local, after, options.final(final))


def mesh_of(mesh: Mesh, coordinates: tuple[int, ...]) -> Mesh:
    """``mesh`` as the rank at these coordinates sees it."""
    axes = tuple(replace(axis, coordinate=k) for axis, k in zip(mesh.axes, coordinates, strict=True))
    by_axis = {axis.name: axis.coordinate for axis in axes}

    def moved(part: Axis) -> Axis:
        return replace(part, coordinate=by_axis[part.name.rpartition("/")[0]] % part.size)

    return Mesh(axes, tuple(map(moved, mesh.subgroups)))


class Peer:
    """Any rank but the first. ``wholes``: the state and the batch as they were before the first call, by name."""

    def __init__(self, first: SimulatedRank, number: int, wholes: Values) -> None:
        self.first, self.number, self._wholes = first, number, wholes
        sizes = [axis.size for axis in first.mesh.axes]
        self._coordinates = tuple(int(k) for k in torch.unravel_index(torch.tensor(number), sizes))
        self.mesh = mesh_of(first.mesh, self._coordinates)
        self._state: Values = {}
        self._programs: dict[int, tuple[Compiled, RankPrograms]] = {}
        self._inputs: list[Any] = []

    @property
    def programs(self) -> RankPrograms:
        """The programs of the call that was prepared last."""
        return self._programs[id(self.first.compiled)][1]

    @property
    def program(self) -> Program:
        """The final one."""
        return self.programs.final

    def prepare(self) -> list[Any]:
        """The inputs of the call that the first rank has prepared."""
        compiled, theirs = self.first.compiled, by_name(self.first.program, self.first.inputs)
        partitioned = compiled.partitioned
        declared = {each.name: each for each in partitioned.inputs if partitioned.taken_from(each) == each.name}
        self._wholes = {name: self._wholes[name] for name in self._wholes.keys() - self._state.keys()}
        for name, each in declared.items():
            if name in compiled.guards.carried.names:
                _check_replicated(each)
            elif name in self._state:
                continue
            elif each.role is Role.MASTER:
                self._state[name] = self._master(each, declared[each.of or ""])
            elif _is_own(each, theirs[name]):
                self._state[name] = self._first_value(each, _like_others(name, theirs))
        if id(compiled) not in self._programs:
            state = [self._state[each.name] for each in compiled.captured.program.inputs if each.role.is_state]
            mesh = mesh_of(compiled.captured.program.mesh, self._coordinates)
            with standing_for(Simulated(self.number)):
                self._programs[id(compiled)] = compiled, programs_of(self.first, compiled, mesh, state)
        self._inputs = list(self._gather(theirs))
        return self._inputs

    def _gather(self, theirs: Values) -> list[Any]:
        given = []
        carried = self.first.compiled.guards.carried.names
        for declared in self.program.inputs:
            if declared.parts:
                parts = sorted(declared.parts, key=lambda part: part.offset)
                given.append(torch.cat([self._state[part.input.name].reshape(-1) for part in parts]))
            elif declared.numbers:
                given.append(pack(declared, theirs))
            else:
                name = self.program.taken_from(declared)
                value = self._state[name] if name in self._state else theirs[declared.name]
                given.append(_separate(value) if name in carried else value)  # which each rank may write to
        return given

    def _master(self, declared: Input, parameter: Input) -> Tensor:
        """This rank's master copy of a parameter, which from now on is held as it is sent."""
        assert declared.wire is not None, "a master copy is of what is sent rounded"
        held = self._state[parameter.name]
        self._state[parameter.name] = sent(held, declared.wire)
        part = part_of(held, left_to_cut(parameter.placement, declared.placement), self.mesh)
        return part.clone(memory_format=torch.contiguous_format)

    def _first_value(self, declared: Input, theirs: Any) -> Any:
        """This rank's part of a value that it has not had so far."""
        whole = self._wholes.get(declared.name)
        if whole is not None:
            part = part_of(whole, declared.placement, self.mesh)
            if part.shape != theirs.shape:
                return part.clone(memory_format=torch.contiguous_format)
            return torch.empty_strided(part.shape, theirs.stride(), dtype=part.dtype, device=part.device).copy_(part)
        if theirs.numel() and bool((theirs == theirs.reshape(-1)[0]).all()):  # what an optimizer begins with
            shape, value = local_shape(declared.shape, declared.placement, self.mesh), theirs.reshape(-1)[0].item()
            # It lies as theirs does: kernels of bf16 and fp16 round by how their operands lie.
            return torch.full_like(theirs, value) if shape == tuple(theirs.shape) else theirs.new_full(shape, value)
        raise SpmdError(
            f"{declared.name} came about while the step was compiled, and has no values that all simulated ranks "
            "know: run the step once before it is verified, or initialize the state"
        )

    def finish(self, outputs: tuple[Any, ...]) -> list[Any]:
        """Keep new state; returns results and new state."""
        self._state |= {
            name: value for name, value in by_name(self.program, self._inputs).items() if name in self._state
        }
        returned = []
        for output, value in zip(self.program.outputs, outputs, strict=True):
            if output.kind is OutputKind.UPDATE:
                self._state[output.name] = _separate(value)
            else:
                returned.append(value)
                if output.kind is OutputKind.NEW and output.role is not Role.RESULT:
                    self._state[output.name] = _separate(value)
        return returned

    def state(self, firsts: dict[str, Held]) -> dict[str, Held]:
        """The state of this rank, as ``SimulatedRank.state``."""
        kept = firsts.keys() | {each.name for each in self.program.inputs if each.role is Role.MASTER}
        self._state = {name: value for name, value in self._state.items() if name in kept}
        return {
            name: (self._state.get(name, value) if isinstance(value, Tensor) else value, shape, placement)
            for name, (value, shape, placement) in firsts.items()
        }


def _is_own(declared: Input, value: Any) -> bool:
    """Whether ranks have values of their own of an input: a learning rate that is a tensor may be written."""
    if declared.role is Role.HYPER_PARAMETER:
        return isinstance(value, Tensor)
    return declared.role.is_state or declared.role in (Role.BATCH, Role.ARGUMENT, Role.KEPT)


def _like_others(name: str, theirs: Values) -> Any:
    """The first rank's value; where it keeps no part of it, that of state of the same kind, which begins equally."""
    kind = name.partition("[")[0]
    same = [theirs[name], *(value for other, value in theirs.items() if other.partition("[")[0] == kind)]
    return next((each for each in same if not isinstance(each, Tensor) or each.numel()), same[0])


def _check_replicated(declared: Input) -> None:
    """Raise ``SpmdError`` for a tensor that the step keeps in Python state, of which each rank has a part."""
    if is_sharded(declared.placement):
        raise SpmdError(
            f"{declared.name} is kept by the step from call to call, and split over the ranks: simulated ranks have "
            "only one of it. Pass it as an argument and return the new one to verify the step"
        )


def _separate(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
