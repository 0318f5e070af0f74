"""What a parallel mode is: from a global program to one rank's share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from passes import Pass, PlacementError, Program, Role
from passes.ir.program import Placements

from ..partitioner import partition
from ..partitioner.plan import Plan
from ..placements import check_dims, normalize
from ..ranks.world import check_fits


class ParallelMode(ABC):
    """Implement ``partition`` to bring a way of your own to make one rank's share of a global program.

    ``mesh``: the device mesh, None for ``spmd.world()``. ``inputs``: placements by argument name, None where nothing is
    named; capture reads both, since they give the global shapes. ``input_batch_dim``: the dim along which tensors that
    ``inputs`` does not name are split over the first axis of the mesh. ``custom_passes``: what programs of this mode
    get instead of ``passes.default()``.
    """

    mesh: DeviceMesh | None = None
    inputs: Mapping[str, Any] | None = None
    input_batch_dim: int = 0
    custom_passes: Sequence[Pass] | None = None

    @abstractmethod
    def partition(self, program: Program) -> Program:
        """One rank's share of ``program``, which is on global shapes, with the placement of every input said."""


class PlannedMode(ParallelMode):
    """A mode that decides where every input lives, and leaves the rest to the one partitioner."""

    def __init__(
        self,
        *,
        mesh: DeviceMesh | None = None,
        inputs: Mapping[str, Any] | None = None,
        input_batch_dim: int = 0,
        custom_passes: Sequence[Pass] | None = None,
    ) -> None:
        if mesh is not None and not isinstance(mesh, DeviceMesh):
            raise TypeError(f"expected mesh to be a torch DeviceMesh or None, got {mesh!r}")
        if not isinstance(input_batch_dim, int) or isinstance(input_batch_dim, bool):
            raise TypeError(f"expected input_batch_dim to be an int, got {input_batch_dim!r}")
        check_placements("inputs", "argument names", inputs)
        if mesh is not None:
            check_fits(mesh)
        self.mesh, self.inputs, self.input_batch_dim = mesh, inputs, input_batch_dim
        self.custom_passes = check_passes("custom_passes", custom_passes)

    @abstractmethod
    def plan(self, program: Program) -> Plan:
        """Where every input of ``program`` lives. Inputs that have a placement already keep it."""

    def partition(self, program: Program) -> Program:
        """``spmd.partition(program, self.plan(program))``."""
        return partition(program, self.plan(program))


def state_placements(
    program: Program, parameters: Mapping[str, Placements], updates: Mapping[str, Placements] | None = None
) -> dict[str, Placements]:
    """Placements of all state, from those of the parameters.

    Optimizer state and kept gradients of a parameter's shape live where the parameter lives; all else that is not named
    is replicated. What has a placement already (a DTensor, an argument) keeps it. ``updates``: for parameters that are
    updated elsewhere, where; their optimizer state lives there.
    """
    shapes = {i.name: i.shape for i in program.inputs}
    updates = updates or {}
    placements: dict[str, Placements] = {}
    for name, placement in parameters.items():
        if any(isinstance(entry, Partial) for entry in placement):
            raise PlacementError(f"{name} cannot be Partial: a parameter is kept whole (Replicate) or split (Shard)")
    for declared in program.inputs:
        name, of = declared.name, declared.of
        if declared.placement:
            placements[name] = declared.placement
        elif name in parameters:
            placements[name] = parameters[name]
        elif of is not None and declared.shape == shapes[of]:
            updated = updates.get(of) if declared.role is Role.OPTIMIZER_STATE else None
            placements[name] = updated or placements.get(of) or parameters.get(of) or ()
    return {name: placement for name, placement in placements.items() if placement}


def placed_by_name(program: Program, params: Mapping[str, Any]) -> dict[str, Placements]:
    """The placement of each parameter that a pattern fits; the first pattern that fits counts.

    Raises ``PlacementError`` for a pattern that fits no parameter.
    """
    declared = [i for i in program.inputs if i.role is Role.PARAMETER]
    placed: dict[str, Placements] = {}
    for pattern, placement in params.items():
        fits = [i for i in declared if fnmatchcase(i.name, pattern)]
        if not fits:
            names = ", ".join(i.name for i in declared[:8])
            raise PlacementError(f"the pattern {pattern!r} in params fits none of the parameters ({names}, ...)")
        for parameter in fits:
            if parameter.name not in placed:
                place = normalize(placement, program.mesh, parameter.name)
                placed[parameter.name] = check_dims(place, len(parameter.shape), parameter.name)
    return placed


def check_placements(name: str, keys: str, given: Any) -> None:
    """Raise ``TypeError`` unless ``given`` is None or maps strings to what can be a placement."""
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise TypeError(f"expected {name} to map {keys} to placements, got {given!r}")
    for key, placement in given.items():
        entries = placement.values() if isinstance(placement, Mapping) else placement
        listed = entries if isinstance(entries, Iterable) and not isinstance(entries, str) else [entries]
        if not isinstance(key, str) or not all(isinstance(entry, Placement) for entry in listed):
            raise TypeError(
                f"expected {name} to map {keys} to placements (Shard, Replicate, Partial, a list of them or a dict by "
                f"mesh axis), got {key!r}: {placement!r}"
            )


def check_passes(name: str, given: Sequence[Pass] | None) -> tuple[Pass, ...] | None:
    """Raise ``TypeError`` unless ``given`` is None or a sequence of passes."""
    if given is None:
        return None
    if not isinstance(given, Sequence) or not all(isinstance(p, Pass) for p in given):
        raise TypeError(f"expected {name} to be a sequence of passes.Pass instances, got {given!r}")
    return tuple(given)
