"""Resolve annotations: which unit each parameter and buffer of a call's modules belongs to.

Units stand in the order in which modules are registered, outer ones before those that they hold.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from passes import PlacementError

from .._torch import own_buffers, own_children, own_parameters
from ..ranks.axis_roles import Roles, roles_by_position
from ..ranks.world import axis_names
from .chosen_units import ChosenUnits
from .contract import Annotation, ContractError, parameter_names, state
from .policies import MixedPrecisionPolicy, OffloadPolicy


@dataclass(frozen=True, eq=False)
class Unit:
    """The modules of one annotation, by their paths. ``is_root``: no annotation surrounds the first."""

    annotation: Annotation
    paths: tuple[str, ...]
    is_root: bool

    @property
    def reshards(self) -> bool | int:
        """Whether its parameters are gathered again for backward, or how many ranks keep them together."""
        given = self.annotation.reshard_after_forward
        return not self.is_root if given is None else given

    @property
    def mp_policy(self) -> MixedPrecisionPolicy | None:
        """The dtypes that it computes and communicates in."""
        return self.annotation.mp_policy

    @property
    def offload_policy(self) -> OffloadPolicy | None:
        """The policy that keeps its state in host memory, if there is one."""
        return self.annotation.offload_policy

    def __str__(self) -> str:
        return f"{self.annotation.api} on {self.paths[0]}"


@dataclass(frozen=True)
class Mark:
    """The request for one parameter or buffer: its unit, None where it is only ignored, and the dim to split."""

    unit: Unit | None
    ignored: bool = False
    shard: Shard | None = None


@dataclass(frozen=True)
class Annotations:
    """The annotations of the modules of one call. ``marks``: by the name of a parameter or buffer.

    ``chosen``: parameters without an annotation that form units, as the mode asks; ``experts``: the parameters that it
    names as experts; None where it leaves that open.
    """

    units: tuple[Unit, ...] = ()
    marks: Mapping[str, Mark] = field(default_factory=dict)
    mesh: DeviceMesh | None = None
    chosen: tuple[tuple[str, ...], ...] | None = None
    experts: frozenset[str] | None = None

    @classmethod
    def of(
        cls,
        modules: Mapping[str, nn.Module],
        names: Mapping[int, str],
        ignored: Ignored | None = None,
        chosen: ChosenUnits | None = None,
        experts: ChosenUnits | None = None,
    ) -> Annotations:
        """The annotations now. ``names``: of all parameters and buffers, by id; the rest: by the parallel mode.

        Raises ``ContractError`` if a module changed since it was annotated, ``PlacementError`` if meshes differ.
        """
        units = tuple(_units(modules))
        inside = {module for each in modules.values() for module in each.modules()}
        for unit in units:
            _check_unchanged(unit, inside)
        claims, marks = set[int](), dict[str, Mark]()
        left_out = ignored.parameters() if ignored is not None else set[int]()
        for unit in sorted(units, key=lambda unit: unit.annotation.number):
            for module in unit.annotation.modules:
                of_unit = unit.annotation.ignored.get(module, frozenset())
                for name, tensor in _claimed(module, "", claims) if module in inside else ():
                    is_ignored = name in of_unit or id(tensor) in left_out
                    marks.setdefault(names[id(tensor)], Mark(unit, is_ignored, _shard(unit, name, tensor)))
        for module in ignored.modules if ignored is not None else ():
            left_out.update(id(tensor) for _, tensor in _claimed(module, "", claims))
        for each in left_out & names.keys():
            marks.setdefault(names[each], Mark(None, ignored=True))
        groups = chosen.groups(modules, names) if chosen is not None else None
        named = experts.parameters(modules, names) if experts is not None else None
        if experts is not None:
            experts.check_stacked(modules)
        return cls(units, marks, _mesh(units), groups, named)

    @property
    def ignored(self) -> frozenset[str]:
        """The parameters and buffers that are left as they are on each rank."""
        return frozenset(name for name, mark in self.marks.items() if mark.ignored)

    @property
    def axis_roles(self) -> Roles | None:
        """The roles of the axes of the mesh, which all split the batch; None if no annotation has a mesh."""
        return None if self.mesh is None else roles_by_position(axis_names(self.mesh), self.mesh.ndim)

    def facts(self) -> list[Any]:
        """Describe what modules ask for, without the modules themselves, their mesh, and what the mode asks for."""
        units = [
            [each.annotation.api, each.paths, each.is_root, each.reshards, each.mp_policy, each.offload_policy]
            for each in self.units
        ]
        marks = [
            [name, mark.unit and mark.unit.paths, mark.ignored, repr(mark.shard)] for name, mark in self.marks.items()
        ]
        return [units, marks]

    def offload_policy(self, name: str, default: OffloadPolicy | None) -> OffloadPolicy | None:
        """The policy of a parameter; ``default`` if no annotation claims it, None if it is ignored."""
        mark = self.marks.get(name)
        if mark is None or mark.ignored:
            return None if mark is not None else default
        return mark.unit.offload_policy if mark.unit is not None else default

    def members(self, unit: Unit) -> tuple[str, ...]:
        """The parameters and buffers of a unit that are not ignored."""
        return tuple(name for name, mark in self.marks.items() if mark.unit is unit and not mark.ignored)


class Ignored:
    """Parameters, and modules with all that they hold, that a mode leaves alone; held by weak references."""

    def __init__(self, parameters: Sequence[nn.Parameter], modules: Sequence[nn.Module]) -> None:
        self._parameters = [weakref.ref(each) for each in parameters]
        self._modules = [weakref.ref(each) for each in modules]

    def parameters(self) -> set[int]:
        """The ids of the parameters that still exist."""
        return {id(each) for each in (reference() for reference in self._parameters) if each is not None}

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that still exist."""
        return [each for each in (reference() for reference in self._modules) if each is not None]


def _units(modules: Mapping[str, nn.Module]) -> list[Unit]:
    """The units of all annotated modules, each where its first module stands."""
    found: dict[Annotation, Unit] = {}
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, path: str, outermost: bool) -> None:
        if module in seen:
            return
        seen.add(module)
        annotation, before = state(module), len(found)
        if annotation is not None:
            known = found.get(annotation, Unit(annotation, (), is_root=False))
            found[annotation] = replace(known, paths=(*known.paths, path))
        for key, child in own_children(module).items():
            if child is not None:
                visit(child, f"{path}.{key}", outermost and annotation is None)
        # A block that is annotated alone is no root: it is gathered again like its siblings.
        if outermost and annotation is not None and (path in modules or len(found) > before + 1):
            found[annotation] = replace(found[annotation], is_root=True)

    for path, module in modules.items():
        visit(module, path, True)
    return list(found.values())


def _check_unchanged(unit: Unit, inside: Collection[nn.Module]) -> None:
    for module, before in unit.annotation.names.items():
        if module not in inside:
            continue
        now = parameter_names(module)
        if now != before:
            old, new = next((pair for pair in zip(before, now, strict=False) if pair[0] != pair[1]), ("", ""))
            what = f"{old} stood where {new} is now" if old else f"it had {len(before)} parameters, and has {len(now)}"
            raise ContractError(
                f"{unit} is of a module that has changed since: {what}. Change modules first, and annotate them then"
            )


def _claimed(module: nn.Module, prefix: str, claims: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the subtree that no annotation inside of it takes, with their names in ``module``."""
    if id(module) in claims:
        return
    claims.add(id(module))
    for key, tensor in [*own_parameters(module).items(), *own_buffers(module).items()]:
        if tensor is not None:
            yield f"{prefix}{key}", tensor
    for key, child in own_children(module).items():
        if child is not None and state(child) is None:
            yield from _claimed(child, f"{prefix}{key}.", claims)


def _shard(unit: Unit, name: str, tensor: torch.Tensor) -> Shard | None:
    ask = unit.annotation.shard_placement_fn
    given = ask(tensor) if ask is not None and isinstance(tensor, nn.Parameter) else None
    if given is None:
        return None
    if not isinstance(given, Shard) or not -tensor.ndim <= given.dim < tensor.ndim:
        raise PlacementError(
            f"shard_placement_fn of {unit} gave {given!r} for {name}, which has {tensor.ndim} dims: it must return a "
            "Shard of one of them, or None"
        )
    return Shard(given.dim % tensor.ndim)


def _mesh(units: Sequence[Unit]) -> DeviceMesh | None:
    placed = [unit for unit in units if unit.annotation.mesh is not None]
    for unit in placed[1:]:
        if unit.annotation.mesh != placed[0].annotation.mesh:
            raise PlacementError(
                f"{placed[0]} has the mesh {placed[0].annotation.mesh}, but {unit} has {unit.annotation.mesh}: all "
                "annotations of a step have one mesh"
            )
    return placed[0].annotation.mesh if placed else None
