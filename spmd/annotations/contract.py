"""``spmd.contract``: which annotation a module carries, in a weak side table that leaves modules as they are."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from passes import SpmdError

from .policies import MixedPrecisionPolicy, OffloadPolicy

__all__ = ["Annotation", "ContractError", "applied", "state"]

Api = Literal["replicate", "fully_shard"]


class ContractError(SpmdError):
    """Annotations of one module that exclude each other, or a module that is not as it was when it was annotated."""


@dataclass(frozen=True, eq=False)
class Annotation:
    """One application of ``replicate`` or ``fully_shard``, shared by the modules of that call, which form one unit.

    ``number`` counts applications. ``names``: of each module's parameters when it was applied, in order; ``ignored``:
    of those among them that it leaves alone.
    """

    api: Api
    mesh: DeviceMesh | None = None
    mp_policy: MixedPrecisionPolicy | None = None
    reshard_after_forward: bool | int | None = None
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None
    names: Mapping[nn.Module, tuple[str, ...]] = field(default_factory=weakref.WeakKeyDictionary)
    ignored: Mapping[nn.Module, frozenset[str]] = field(default_factory=weakref.WeakKeyDictionary)
    number: int = 0
    offload_policy: OffloadPolicy | None = None

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The annotated modules that still exist."""
        return tuple(self.names)


_annotations: weakref.WeakKeyDictionary[nn.Module, Annotation] = weakref.WeakKeyDictionary()
_applications = 0


def state(module: nn.Module) -> Annotation | None:
    """The annotation that ``module`` itself carries, shared by all modules of one application; None if there is none.

    Raises ``TypeError`` for what is no module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {module!r}")
    return _annotations.get(module)


def applied(module: nn.Module) -> Api | None:
    """The annotation of ``module`` itself, ``"replicate"`` or ``"fully_shard"``; None if nothing was."""
    found = state(module)
    return found.api if found is not None else None


def note(modules: Sequence[nn.Module], annotation: Annotation) -> None:
    """Let ``modules`` carry ``annotation``. Raises ``ContractError``, and changes nothing, if one carries another."""
    for module in modules:
        before = state(module)
        if before is not None:
            raise ContractError(_conflict(annotation.api, before.api, module))
    global _applications
    _applications += 1
    numbered = replace(annotation, number=_applications)
    for module in modules:
        _annotations[module] = numbered


def copy_annotations(copies: Mapping[nn.Module, nn.Module]) -> None:
    """Let the copy of each module carry what the module carries: units stay units."""
    found: dict[Annotation, Annotation] = {}
    for module, made in copies.items():
        annotation = _annotations.get(module)
        if annotation is None:
            continue
        if annotation not in found:
            of_copies = replace(annotation, names=weakref.WeakKeyDictionary(), ignored=weakref.WeakKeyDictionary())
            found[annotation] = of_copies
            for each in annotation.modules:  # in their order
                if each in copies:
                    _set(of_copies.names, copies[each], annotation.names[each])
                    if each in annotation.ignored:
                        _set(of_copies.ignored, copies[each], annotation.ignored[each])
        _annotations[made] = found[annotation]


def _set(table: Any, module: nn.Module, value: Any) -> None:
    table[module] = value


def applications() -> int:
    """The number of annotations so far in this process."""
    return _applications


def _conflict(new: Api, old: Api, module: nn.Module) -> str:
    kind = type(module).__name__
    if new == old:
        return f"{new} was applied to this {kind} before: apply it once to each module"
    return (
        f"{new} cannot be applied to this {kind}, since {old} manages it: choose one of them for a module. A submodule "
        f"can have the other: its annotation takes it out of that of the {kind}"
    )


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """The names of all parameters below ``module``, tied ones under each of their names, in order."""
    return tuple(name for name, _ in module.named_parameters(remove_duplicate=False))
