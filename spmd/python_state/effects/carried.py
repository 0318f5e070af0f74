"""``Carried``: Python state that a program takes as inputs, since the step reads it and writes it.

In come sites that the trace found (``writes.py``); the step is traced again then, with symbols in the place of their
numbers and fakes in the place of their tensors. A tensor is whole on every rank, or a DTensor, placed as it is: rows of
the batch that the step keeps, or what it or the user has made of split state. A tensor that the step only reads is
carried, too, if it is a DTensor. Parameters among them are none: they are state already.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from passes import Input, Role
from passes.ir.program import is_sharded

from ..._torch import tree_flatten, tree_unflatten
from ...call.state import Arguments, HyperParameter
from ...ranks.world import extend_placement
from ..reads import ReadSite, Reference
from .lost_graph import has_lost_graph


class KeptRows:
    """Base of the DTensors that are rows of the batch; all others at carried sites are no rows."""

    __slots__ = ()


def is_carried(leaf: Any) -> bool:
    """Whether a leaf at a carried site becomes an input: not a parameter, nor what has a graph, which would be lost."""
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter) and not leaf.requires_grad


def is_kept_split(leaf: Any) -> bool:
    """Whether a leaf is a DTensor that a step can take as an input."""
    return isinstance(leaf, DTensor) and is_carried(leaf)


@dataclass(frozen=True, eq=False)
class CarriedTensor:
    """A tensor at a site, or in a container there: the ``index``-th leaf."""

    name: str
    site: ReadSite
    index: int

    def get(self) -> torch.Tensor:
        """The live tensor."""
        tensor: torch.Tensor = tree_flatten(self.site.get())[0][self.index]
        return tensor


@dataclass(frozen=True, eq=False)
class Carried:
    """Sites with numbers, and sites with tensors or containers of them. ``counters`` are entries of parameter groups.

    A counter is (path of the optimizer, index of the group, key). ``leaves`` are numbers among the arguments, by name,
    and ``unread`` the numbers and texts among them that the step does not read.
    """

    numbers: tuple[ReadSite, ...] = ()
    sites: tuple[ReadSite, ...] = ()
    counters: frozenset[tuple[str, int, str]] = frozenset()
    leaves: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.numbers or self.sites or self.counters or self.leaves or self.unread)

    def __or__(self, other: Carried) -> Carried:
        known = self.addresses
        return Carried(
            (*self.numbers, *(site for site in other.numbers if site.address not in known)),
            (*self.sites, *(site for site in other.sites if site.address not in known)),
            self.counters | other.counters,
            tuple(dict.fromkeys((*self.leaves, *other.leaves))),
            tuple(dict.fromkeys((*self.unread, *other.unread))),
        )

    def now(self) -> Carried:
        """The part of it that is there now: sites of numbers, and sites that hold tensors, also where numbers were."""
        numbers = [site for site in self.numbers if type(site.get()) in (int, float)]
        held = [(site, tree_flatten(site.get())[0]) for site in (*self.sites, *self.numbers)]
        sites = [site for site, leaves in held if any(map(is_carried, leaves))]
        lost = {site.address for site, leaves in held if any(map(has_lost_graph, leaves))}
        return replace(self, numbers=tuple(numbers), sites=tuple(site for site in sites if site.address not in lost))

    def with_names_unlike(self, taken: set[str]) -> Carried:
        """The same, with a number after each name that another input has."""
        taken = set(taken)

        def renamed(site: ReadSite) -> ReadSite:
            names = (site.name if k == 1 else f"{site.name} ({k})" for k in count(1))
            name = next(name for name in names if name not in taken)
            taken.add(name)
            return replace(site, name=name)

        return replace(self, numbers=tuple(map(renamed, self.numbers)), sites=tuple(map(renamed, self.sites)))

    def without(self, unread: Collection[str]) -> Carried:
        """The same, where these leaves are none that the program reads."""
        leaves = tuple(name for name in self.leaves if name not in unread)
        return replace(self, leaves=leaves, unread=(*self.unread, *sorted(unread)))

    @property
    def addresses(self) -> set[tuple[int, str]]:
        """The addresses of all sites."""
        return {site.address for site in (*self.numbers, *self.sites)}

    def containers(self) -> list[Any]:
        """The dicts and lists that have some of the sites now."""
        sites = (*self.numbers, *self.sites)
        found = [site.holder.get() for site in sites if isinstance(site.holder, Reference)]
        return [each for each in found if isinstance(each, (dict, list))]

    def arguments(self, given: Arguments) -> list[HyperParameter]:
        """The numbers among the arguments of a call."""
        values = {leaf.name: leaf.value for leaf in given.leaves}
        return [HyperParameter(name, values, name) for name in self.leaves]

    def tensors(self) -> list[CarriedTensor]:
        """All tensors, in order."""
        return [
            CarriedTensor(leaf_name(site.name, k, len(leaves)), site, k)
            for site in self.sites
            for leaves in [tree_flatten(site.get())[0]]
            for k, leaf in enumerate(leaves)
            if is_carried(leaf)
        ]

    def inputs(self, mesh: DeviceMesh) -> list[Input]:
        """The inputs that the tensors become: rows are those of a batch, whole ones as other arguments."""
        found = []
        for each in self.tensors():
            live = each.get()
            placement: tuple[Any, ...] = ()
            if isinstance(live, DTensor):
                placement = extend_placement(tuple(live.placements), live.device_mesh, mesh)
            split = Role.BATCH if isinstance(live, KeptRows) else Role.KEPT
            role = split if is_sharded(placement) else Role.ARGUMENT
            found.append(Input(role, each.name, tuple(live.shape), live.dtype, placement))
        return found

    @contextmanager
    def swapped(self, numbers: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Put symbols and fakes in the place of what is there, for the length of the context."""
        before = [(site, site.get()) for site in (*self.numbers, *self.sites)]
        fakes = iter(tensors)
        try:
            for site, number in zip(self.numbers, numbers, strict=True):
                site.put(number)
            for site in self.sites:
                leaves, spec = tree_flatten(site.get())
                fake = [next(fakes) if is_carried(leaf) else leaf for leaf in leaves]
                site.put(tree_unflatten(fake, spec))
            yield
        finally:
            for site, value in before:
                site.put(value)


def leaf_name(name: str, index: int, total: int) -> str:
    """The name of a leaf at a site of this name."""
    return name if total == 1 else f"{name}.{index}"
