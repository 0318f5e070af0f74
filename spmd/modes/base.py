"""The base classes of parallel modes, which turn a global program into one rank's share."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from passes import Pass, Program

from ..annotations.chosen_units import ChosenUnits
from ..annotations.policies import MixedPrecisionPolicy, OffloadPolicy
from ..annotations.resolve import Ignored
from ..partitioner import partition
from ..partitioner.plan import Plan
from ..ranks.axis_roles import Roles, roles_by_position
from ..ranks.world import as_mesh, check_fits
from .named_placements import check_placements

RUNS = (1, 2, 4, 8, 16, 32, 64)


class ParallelMode(ABC):
    """Implement ``partition`` to make one rank's share of a global program yourself.

    - ``mesh``: the device mesh, None for ``spmd.world()``. ``inputs``: placements by argument name, or None; capture
      reads both, since they determine global shapes. ``input_batch_dim``: the dim along which tensors that ``inputs``
      does not name are split over the axes of the batch (``axis_roles``).
    - ``custom_passes``: passes for programs of this mode instead of ``passes.default()``. Those of
      ``passes=`` of ``spmd.compile``, if it is given, run instead of both.
    - ``units``: the modules whose parameters are communicated together, None for what passes form.
    - ``experts``: the parameters whose dim 0 is the expert, None for those that are found in the program.
    - ``ignored``: state that ranks do not make equal; ``sync``: False if they make none equal.
    - ``reshard_after_forward``: a number is the size of the groups of ranks that keep gathered parameters together
      until backward.
    - ``mp_policy``: the dtypes of modules without an annotation. ``offload_policy``: keeps their state in host memory.
    - ``param_init_fn``: initializes a module that is on the meta device.
    - ``defer_updates``: whether a call leaves its reductions and its update to the next one.
    - ``micro_batches``: how often a program runs in a call, each time on a part of this rank's rows.
    - ``chooses_runs``: whether that number is the least with which a step fits into its memory, one of ``RUNS``.
    - ``bits``: the parts of the global batch of a step whose bits do not depend on the number of ranks.
    - ``statistics``: "per_micro_batch" if micro-batches have statistics of their own.
    - ``has_stages``: whether ranks run other parts of the model, along an axis of that role.
    - ``one_axis``: the axes of a mesh that are one axis of ``mesh``, which is named by them.
    - ``names_axes``: whether the user has given roles to axes by name.
    - ``follows_annotations``: whether the mode reads ``program.annotations``; a step of any other mode refuses modules
      that carry annotations.
    """

    mesh: DeviceMesh | None = None
    inputs: Mapping[str, Any] | None = None
    input_batch_dim: int = 0
    custom_passes: Sequence[Pass] | None = None
    ignored: Ignored | None = None
    units: ChosenUnits | None = None
    experts: ChosenUnits | None = None
    param_init_fn: Callable[[nn.Module], Any] | None = None
    sync: bool = True
    mp_policy: MixedPrecisionPolicy | None = None
    reshard_after_forward: bool | int | None = None
    offload_policy: OffloadPolicy | None = None
    defer_updates: bool = False
    micro_batches: int = 1
    chooses_runs: bool = False
    bits: int | None = None
    statistics: str | None = None
    has_stages: bool = False
    one_axis: tuple[str, ...] = ()
    names_axes: bool = False
    follows_annotations: bool = False

    def axis_roles(self, names: Sequence[str]) -> Roles:
        """The roles of the axes of a mesh with these names: by default the first one splits the batch."""
        return roles_by_position(names)

    def for_forward(self, inputs: Mapping[str, Any]) -> Self:
        """The same for a program that updates nothing, and that takes other arguments."""
        made = copy.copy(self)
        made.inputs = inputs
        return made

    @abstractmethod
    def partition(self, program: Program) -> Program:
        """One rank's share of ``program``, which has global shapes, with the placement of every input."""


class PlannedMode(ParallelMode):
    """A mode that decides the placement of every input and leaves the rest to the partitioner."""

    def __init__(
        self,
        *,
        mesh: DeviceMesh | ProcessGroup | None = None,
        inputs: Mapping[str, Any] | None = None,
        input_batch_dim: int = 0,
        custom_passes: Sequence[Pass] | None = None,
    ) -> None:
        if not isinstance(input_batch_dim, int) or isinstance(input_batch_dim, bool):
            raise TypeError(f"expected input_batch_dim to be an int, got {input_batch_dim!r}")
        check_placements("inputs", "argument names", inputs)
        mesh = as_mesh(mesh)
        if mesh is not None:
            check_fits(mesh)
        self.mesh, self.inputs, self.input_batch_dim = mesh, inputs, input_batch_dim
        self.custom_passes = check_passes("custom_passes", custom_passes)

    @abstractmethod
    def plan(self, program: Program) -> Plan:
        """The placement of every input of ``program``. Inputs that already have a placement keep it."""

    def partition(self, program: Program) -> Program:
        """``spmd.partition(program, self.plan(program))``."""
        return partition(program, self.plan(program))


def check_passes(name: str, given: Sequence[Pass] | None) -> tuple[Pass, ...] | None:
    """Raise ``TypeError`` unless ``given`` is None or a sequence of passes."""
    if given is None:
        return None
    if not isinstance(given, Sequence) or not all(isinstance(p, Pass) for p in given):
        raise TypeError(f"expected {name} to be a sequence of passes.Pass instances, got {given!r}")
    return tuple(given)


def check_callable(name: str, given: Any) -> Any:
    """Raise ``TypeError`` unless ``given`` is callable or None; returns it."""
    if given is not None and not callable(given):
        raise TypeError(f"expected {name} to be callable or None, got {given!r}")
    return given


def check_flag(name: str, given: Any) -> bool:
    """Raise ``TypeError`` unless ``given`` is a bool; returns it."""
    if not isinstance(given, bool):
        raise TypeError(f"expected {name} to be True or False, got {given!r}")
    return given
