"""Placements of parameters by name pattern, and of all other state by its parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from passes import Input, PlacementError, Program, Role
from passes.ir.program import Placements

from ..call.refusals import refuse
from ..placements import check_dims, normalize


def parameter_placements(program: Program, params: Mapping[str, Any]) -> dict[str, Placements]:
    """The placement of each parameter that matches a pattern, by the first pattern that it matches.

    Raises ``PlacementError`` for a pattern that matches no parameter.
    """
    return {
        parameter.name: check_dims(normalize(given, program.mesh, parameter.name), len(parameter.shape), parameter.name)
        for parameter, given in _given(program, params)
    }


def named_over(program: Program, params: Mapping[str, Any], axis: str) -> set[str]:
    """The parameters whose pattern gives a placement over this axis: by its name, or for all axes."""
    return {
        parameter.name
        for parameter, given in _given(program, params)
        if not isinstance(given, Mapping) or axis in given
    }


def _given(program: Program, params: Mapping[str, Any]) -> list[tuple[Input, Any]]:
    """Each parameter that matches a pattern, with what the first of these gives it."""
    parameters = [i for i in program.inputs if i.role is Role.PARAMETER]
    found: dict[str, tuple[Input, Any]] = {}
    for pattern, given in params.items():
        for parameter in _matching(pattern, parameters):
            found.setdefault(parameter.name, (parameter, given))
    return list(found.values())


def _matching(pattern: str, parameters: list[Input]) -> list[Input]:
    matching = [i for i in parameters if fnmatchcase(i.name, pattern)]
    if not matching:
        names = ", ".join(i.name for i in parameters[:8])
        refuse(PlacementError, f"the pattern {pattern!r} in params matches none of the parameters ({names}, ...)")
    return matching


def state_placements(
    program: Program, parameters: Mapping[str, Placements], updates: Mapping[str, Placements] | None = None
) -> dict[str, Placements]:
    """Placements of all state, from those of the parameters.

    Optimizer state and saved gradients of a parameter's shape have the placement of the parameter; other inputs that
    are not named are replicated. An input that already has a placement (a DTensor, an argument) keeps it. ``updates``:
    the placements of parameters that are updated in another one than their own; their optimizer state has it, too.
    """
    _check_not_partial(parameters)
    shapes = {i.name: i.shape for i in program.inputs}
    updates = updates or {}
    placements: dict[str, Placements] = {}
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


def _check_not_partial(parameters: Mapping[str, Placements]) -> None:
    for name, placement in parameters.items():
        if any(isinstance(entry, Partial) for entry in placement):
            raise PlacementError(f"{name} cannot be Partial: a parameter is either whole (Replicate) or split (Shard)")


def check_placements(name: str, keys: str, given: Any) -> None:
    """Raise ``TypeError`` unless ``given`` is None or maps strings to placements, lists or dicts of them."""
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
