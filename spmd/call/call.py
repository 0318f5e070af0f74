"""``Call``: one call that has to be compiled, with all that the stages ask of it, each found once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from passes import Mesh, PlacementError, Program, Role

from ..annotations.chosen_units import ChosenUnits
from ..annotations.policies import MixedPrecisionPolicy, OffloadPolicy
from ..annotations.resolve import Annotations, Ignored
from ..answers.answer import Answers
from ..ranks.axis_roles import Roles, check_agreement, with_roles
from ..ranks.world import axis_names, describe, joined, world
from ..watching.watch import Spec
from .groups import Groups
from .initial_state import Idle, InitialState
from .inputs import BatchInput, place_inputs
from .state import (
    Arguments,
    HyperParameter,
    Slot,
    buffers_of,
    hyper_parameters_of,
    on_mesh,
    parameters_of,
    slots_of,
    submodules_of,
)
from .unsupported import check_modules

_OF_STATE = ("slots", "arguments", "hyper_parameters", "inputs")  # facts that follow from live state


class Layout(Protocol):
    """The part of a parallel mode that a call reads; ``modes/base.py`` describes it."""

    mesh: DeviceMesh | None
    inputs: Mapping[str, Any] | None
    input_batch_dim: int
    ignored: Ignored | None
    units: ChosenUnits | None
    experts: ChosenUnits | None
    param_init_fn: Callable[[nn.Module], Any] | None
    sync: bool
    mp_policy: MixedPrecisionPolicy | None
    reshard_after_forward: bool | int | None
    offload_policy: OffloadPolicy | None
    follows_annotations: bool
    names_axes: bool

    def axis_roles(self, names: Sequence[str]) -> Roles:
        """The roles of the axes of a mesh with these names."""


class Call:
    """The arguments of one call, the live state in them, and the mesh that it runs on.

    ``mesh`` is the plain description of ``device_mesh`` that programs carry. A property is computed when it is first
    read, and raises then what is wrong with the arguments (``CaptureError``, ``PlacementError``).
    ``uneven``: how many rows all ranks have, of the arguments of which they have unequal parts.
    """

    def __init__(self, given: Arguments, mode: Layout, uneven: Mapping[str, int] | None = None) -> None:
        self.given, self.mode, self.uneven = given, mode, dict(uneven or {})
        self.replaced: list[weakref.ref[torch.Tensor]] = []  # parameters that were split, once they are
        self.initial = InitialState()  # of optimizers, made for this call, while it compiles
        self.remove_made = self.initial.remover()  # removes the same, once it has compiled
        self.references: list[Any] = []  # ``Reference`` to state, in what the step reads besides it
        self.notes: list[str] = []  # for the report
        self.without_gradient = frozenset[str]()  # parameters whose gradient is no state of the call
        self.library_hooks: list[tuple[dict[Any, Any], Any]] = []  # that its trace has left on modules: (hooks, key)
        self.answers: Answers = ()  # that the call has shown to what the step asks of values
        self.watched: tuple[Spec, ...] = ()  # the statistics that it looks at
        self.likely: Answers = ()  # those of the program last run
        self.asks_nothing = ""  # the reason that the step may ask for none
        self.no_logs: set[Any] = set()  # paths of containers among the arguments that the step reads, too
        self._counters = frozenset[tuple[str, int, str]]()  # entries of parameter groups that the step writes

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """The mode's mesh, else that of all ranks for the model's device; with the axes that parameters live on."""
        check_modules(submodules_of(self.given.modules))
        tensors = [parameter.tensor for parameter in parameters_of(self.given.modules)]
        meshes = [tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)]
        on_device = [p.tensor for p in parameters_of(self.given.modules) if p.name not in self.offloaded]
        tensors = [tensor for tensor in on_device if not tensor.is_meta][:1]
        tensors += [leaf.value for leaf in self.given.tensors()[:1]]
        annotated = self.annotations.mesh
        mesh = self.mode.mesh or annotated or world(tensors[0].device if tensors else None)
        return joined(mesh, [*meshes, annotated] if annotated else meshes)

    @property
    def device(self) -> torch.device:
        """The device of this rank on the mesh."""
        kind = self.device_mesh.device_type
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    @cached_property
    def annotations(self) -> Annotations:
        """The annotations by ``spmd.replicate`` and ``spmd.fully_shard`` on the modules of the call."""
        modules = self.given.modules
        names = {id(each.tensor): each.name for each in [*parameters_of(modules), *buffers_of(modules)]}
        found = Annotations.of(modules, names, self.mode.ignored, self.mode.units, self.mode.experts)
        if found.units and not self.mode.follows_annotations:
            raise PlacementError(
                f"{found.units[0]} is an annotation, which {self.mode!r} does not follow: compile the step with "
                "spmd.DataParallel, or without a parallel mode"
            )
        return found

    @cached_property
    def offloaded(self) -> frozenset[str]:
        """The parameters that live in host memory, with their gradients and optimizer state."""
        names = [parameter.name for parameter in parameters_of(self.given.modules)]
        default = self.mode.offload_policy
        return frozenset(name for name in names if self.annotations.offload_policy(name, default) is not None)

    @cached_property
    def groups(self) -> Groups:
        """The process groups of ``mesh``."""
        reshard = [unit.annotation.reshard_after_forward for unit in self.annotations.units]
        mesh = with_roles(describe(self.device_mesh), self._axis_roles())
        return Groups(mesh, self.device_mesh, [*reshard, self.mode.reshard_after_forward])

    @property
    def mesh(self) -> Mesh:
        """``device_mesh`` as plain data, with the roles of its axes, and the groups that are open by now."""
        return self.groups.mesh

    def _axis_roles(self) -> Roles:
        """Roles of the axes, as the user names them, else by the mesh of the annotations, else by the mode."""
        annotated, own = self.annotations.axis_roles, self.mode.mesh
        names = axis_names(self.device_mesh if own is None else own)
        of_mode = self.mode.axis_roles(names)
        if annotated is None:
            return of_mode
        if own is not None or self.mode.names_axes:
            check_agreement(annotated, of_mode, self.mode.names_axes)
        return of_mode if self.mode.names_axes else annotated

    @cached_property
    def slots(self) -> list[Slot]:
        """Every state tensor, in the order of the program's inputs."""
        slots = on_mesh(slots_of(self.given), self.device_mesh)
        return [s for s in slots if s.input.role is not Role.GRADIENT or s.input.of not in self.without_gradient]

    @cached_property
    def arguments(self) -> Arguments:
        """The arguments, with a ``StateRef`` for each that is itself a state tensor."""
        return self.given.naming_state(self.slots)

    @cached_property
    def hyper_parameters(self) -> list[HyperParameter]:
        """The numbers of parameter groups and optimizer state that are read at each call."""
        return hyper_parameters_of(self.given.optimizers, self._counters)

    def count(self, counters: frozenset[tuple[str, int, str]]) -> None:
        """Let these entries (optimizer, group, key) be ``hyper_parameters``, too: the step writes them."""
        self._counters = counters
        self.hyper_parameters = hyper_parameters_of(self.given.optimizers, self._counters)

    @cached_property
    def inputs(self) -> list[BatchInput]:
        """The tensor arguments that are no state, each with its placement."""
        mode = self.mode
        return place_inputs(self.arguments, mode.inputs, mode.input_batch_dim, self.mesh, self.uneven)

    @contextmanager
    def initial_state(self, idle: Idle) -> Iterator[None]:
        """Make the state that optimizers make in their first step (``initial_state.py``); an error takes it back.

        None is made for ``idle`` parameters.
        """
        self.initial = InitialState.of(self.given, idle)
        self._forget()
        try:
            yield
        except BaseException:
            self.initial.remove()
            self.remove_library_hooks()
            raise
        finally:
            self.remove_made, self.initial = self.initial.remover(), InitialState()

    def remove_library_hooks(self) -> None:
        """Remove the hooks of libraries that a trace has left: the call is traced again, or does not compile."""
        for hooks, key in self.library_hooks:
            hooks.pop(key, None)
        self.library_hooks.clear()

    def end_idle_state(self, program: Program, idle: Idle) -> bool:
        """Remove what ``initial_state`` made and the step leaves alone, or all if it looked; whether there was any."""
        found = self.initial.remove_idle(program, self.slots, idle)
        if found:
            self._forget()
            self.resolve()
        return found

    def leave_out_gradients(self, parameters: frozenset[str]) -> bool:
        """Take the gradients of these parameters for no state; whether that changes what state there is."""
        before = [slot.input.name for slot in self.slots]
        self.without_gradient = parameters
        self._forget()
        self.resolve()
        return before != [slot.input.name for slot in self.slots]

    def read_again(self, given: Arguments) -> None:
        """Take the same arguments, read anew."""
        self.given = given
        self._forget()
        self.resolve()

    def resolve(self) -> None:
        """Find all facts now, while modules are the user's own: for the trace some are replaced."""
        for fact in _OF_STATE:
            getattr(self, fact)

    def _forget(self) -> None:
        for fact in _OF_STATE:
            vars(self).pop(fact, None)
