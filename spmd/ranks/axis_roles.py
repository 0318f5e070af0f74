"""Roles of the axes of a mesh: which split the batch, and which split parameters.

A mode gives roles to names. Without ``axes=`` they follow from the order of the axes, and from the names of a hybrid
mesh; from then on whatever asks what an axis is for asks for a role.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from passes import AxisRole, Mesh, PlacementError
from passes.errors import did_you_mean

Axes = Mapping[str, str | Iterable[str]]
Roles = Mapping[str, tuple[AxisRole, ...]]
"""The roles of axes, by name; an axis that is not named has none."""

HYBRID = ("replicate", "shard")  # first axes that both split the batch; the second alone splits parameters


def roles_by_position(names: Sequence[str], batch: int = 1) -> Roles:
    """The first ``batch`` axes split the batch, and the last of these parameters; all others split the model."""
    roles = dict.fromkeys(names, (AxisRole.TENSOR,)) | dict.fromkeys(names[:batch], (AxisRole.BATCH,))
    return roles | dict.fromkeys(names[batch - 1 : batch], (AxisRole.BATCH, AxisRole.SHARD))


def check_axes(given: Any, known: Sequence[AxisRole]) -> Roles | None:
    """The roles that ``axes=`` gives, of those that are ``known``, in their order; None for None.

    "shard" is by default the role of the axes of "batch" and "sequence". Raises ``TypeError`` or ``ValueError`` for
    what is no mapping from roles to names of axes.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise TypeError(f"expected axes to map roles to names of mesh axes, as {{'batch': 'dp'}} does, got {given!r}")
    named = {_role(key, known): _names(key, value) for key, value in given.items()}
    if AxisRole.SHARD not in named:
        named[AxisRole.SHARD] = (*named.get(AxisRole.BATCH, ()), *named.get(AxisRole.SEQUENCE, ()))
    names = dict.fromkeys(name for each in named.values() for name in each)
    return {name: tuple(role for role in known if name in named.get(role, ())) for name in names}


def _role(given: Any, known: Sequence[AxisRole]) -> AxisRole:
    if given not in known:
        listed = ", ".join(f'"{role}"' for role in known)
        raise ValueError(f"expected axes to give the roles {listed}, got {given!r}{did_you_mean(given, known)}")
    return known[known.index(given)]


def _names(role: str, given: Any) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f'expected axes["{role}"] to be the name of a mesh axis, or several, got {given!r}')
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f'axes["{role}"] names the axis {twice!r} twice: name it once')
    return names


def unknown_axes(roles: Roles, names: Sequence[str]) -> str:
    """A sentence on axes that have roles and are not among ``names``, those of a mesh; empty if there are none."""
    unknown = [repr(name) for name in roles if name not in names]
    return f"axes names {', '.join(unknown)}, but the axes of the mesh are {list(names)}" if unknown else ""


def check_agreement(annotated: Roles, of_mode: Roles, is_given: bool) -> None:
    """Raise ``PlacementError`` where annotations split the batch otherwise than the mode says of its own mesh.

    ``is_given``: the mode has ``axes=``. Without it, annotations may split the batch over more axes than the first.
    """
    asked = (AxisRole.BATCH, AxisRole.SHARD) if is_given else (AxisRole.BATCH,)
    for role in asked:
        theirs, own = axes_having(role, annotated), axes_having(role, of_mode)
        if theirs != own if is_given else not own <= theirs:
            raise PlacementError(
                f'annotations are over {", ".join(annotated)}, so that {_listed(theirs)} has the role "{role}", but '
                f"the mode gives it to {_listed(own)}: let both say the same, the mode with axes={{'{role}': ...}}"
            )


def axes_having(role: AxisRole, roles: Roles) -> set[str]:
    """The names of the axes that have this role."""
    return {name for name, has in roles.items() if role in has}


def _listed(names: Iterable[str]) -> str:
    return " and ".join(sorted(names)) or "no axis"


def with_roles(mesh: Mesh, roles: Roles) -> Mesh:
    """``mesh``, each axis with its roles."""
    return replace(mesh, axes=tuple(replace(axis, roles=roles.get(axis.name, ())) for axis in mesh.axes))
