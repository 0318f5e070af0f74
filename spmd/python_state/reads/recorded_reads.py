"""``RecordedReads``: what a trace has read, and what it has changed."""

from __future__ import annotations

import types
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ..._torch import tree_flatten
from ..traced import holds_fakes
from .changes import Change
from .compared_objects import ComparedObjects
from .contents import Contents
from .journals import Journals
from .new_objects import NewObjects
from .read_sites import ReadSite, Reference
from .refusing import Refusals
from .snapshots import ContainerSnapshot, FieldsSnapshot, containers_in


@dataclass(eq=False)
class RecordedReads:
    """The read sites of one trace, each once, with the value that it had before the step.

    ``changes`` says what the step changed besides modules and optimizers, and ``changed_containers`` whose entries.
    """

    replaces: ClassVar[bool] = True  # whether something else takes the place of values while they are read
    names: dict[int, str] = field(default_factory=dict)  # of modules and other arguments, by id
    sites: dict[tuple[int, str], ReadSite] = field(default_factory=dict)
    first: dict[tuple[int, str], Any] = field(default_factory=dict)  # by site, the value before the step
    containers: dict[int, ContainerSnapshot] = field(default_factory=dict)
    fields: dict[int, FieldsSnapshot] = field(default_factory=dict)
    code: list[types.CodeType] = field(default_factory=list)  # the user's, that ran
    namespaces: list[dict[str, Any]] = field(default_factory=list)  # the globals of each of ``code``
    constants: set[int] = field(default_factory=set)  # ids of tensors at sites, which the program takes for constants
    taken: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # see ``take``
    changes: list[Change] = field(default_factory=list)
    changed_containers: list[tuple[ContainerSnapshot, str]] = field(default_factory=list)  # with the key of the site
    stand_ins: dict[int, torch.Tensor] = field(default_factory=dict)  # fakes, by the id of live state
    references: list[Reference] = field(default_factory=list)  # to state, that the step read
    journals: Journals = field(default_factory=Journals)  # of containers that the step writes to and does not read
    held: set[int] = field(default_factory=set)  # ids of containers that lie at no site
    refused: list[str] = field(default_factory=list)  # names of what refers to state and cannot have fakes in it
    refusals: Refusals = field(default_factory=Refusals)  # in the place of iterators, files and queues
    fixed: set[tuple[int, str]] = field(default_factory=set)  # sites whose numbers cannot be inputs
    layouts_read: set[bool] = field(default_factory=set)  # of the tensors whose strides the step asks for, ``is_index``
    notes: set[Any] = field(default_factory=set)  # keys of sites and containers that overrides alone have read
    compared: ComparedObjects = field(default_factory=ComparedObjects)
    contents: list[Contents] = field(default_factory=list)  # of arrays, and what else lies at no site
    cached: dict[int, tuple[str, torch.Tensor, Any]] = field(default_factory=dict)  # by id: of the cache of a function
    at_read: dict[tuple[int, str], Any] = field(default_factory=dict)  # by site, the value at the first read
    new: NewObjects = field(default_factory=NewObjects)  # what the step makes itself is no state

    def sites_of(self, tensor: torch.Tensor) -> list[ReadSite]:
        """The sites that the step read and that hold a tensor, or a container with it."""
        sites = [*self.sites.values()]
        return [site for site in sites if any(leaf is tensor for leaf in tree_flatten(site.get())[0])]

    def name_of(self, tensor: torch.Tensor) -> str:
        """The name of a site that holds a tensor, or a container with it; nothing if the step read none."""
        for site in self.sites_of(tensor):
            return site.name
        if id(tensor) in self.cached:
            return self.cached[id(tensor)][0]
        containers = [*self.containers.values()]
        return next((each.name for each in containers if any(item is tensor for item in each.content or ())), "")

    def note_constant(self, tensor: torch.Tensor) -> None:
        """Note that the program takes a tensor for a constant; one in the cache of a function has to stay there."""
        self.constants.add(id(tensor))
        if id(tensor) in self.cached and not self.sites_of(tensor):
            name, _, function = self.cached[id(tensor)]
            self.contents.append(Contents.of_cached_tensor(function, tensor, name))

    def take(self, tensor: torch.Tensor) -> None:
        """Note that the step takes all values of a tensor as they are now, as numbers of Python's or an array."""
        self.constants.add(id(tensor))
        self.taken.setdefault(id(tensor), (tensor, tensor.detach().clone()))

    def was_read(self, site: ReadSite, before: Any) -> bool:
        """Whether the step may have read the value ``before``: not if it had written another when it first read."""
        return self.at_read.get(site.address, self) is before

    def leave_out(self, addresses: Container[tuple[int, str]]) -> None:
        """Forget sites that the program takes as inputs, or that were written before they were read."""
        written = [self.sites.pop(address) for address in [*self.sites] if address in addresses]
        apart = {id(container) for site in written for container in containers_in(site.get())}
        self.containers = {
            k: each for k, each in self.containers.items() if k not in apart and not holds_fakes(each.content)
        }

    def names_in_code(self) -> set[str]:
        """Names of attributes and of all else in the user's code that ran, and its texts, which may be such names."""
        texts = [each for code in self.code for each in code.co_consts if isinstance(each, str)]
        return {*texts, *(name for code in self.code for name in code.co_names)}

    def is_made(self, value: Any) -> bool:
        """Whether the step itself made an object while it was traced."""
        return value in self.new

    def forget_notes(self) -> None:
        """Forget what overrides alone have read and has changed since: they keep notes."""
        for note in self.notes:
            if note in self.sites and self.sites[note].get() is not self.first.get(note, self):
                del self.sites[note]
            elif note in self.containers and self.containers[note].changed():
                del self.containers[note]
