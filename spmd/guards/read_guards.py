"""Guards on plain Python state: values at the sites that the trace read, and entries of the containers it reached."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import repeat
from operator import is_
from typing import Any

import torch

from ..capture.tensor_attributes import is_constant
from ..python_state.reads import MISSING, READERS, Contents, Reads, ReadSite, Reference, content_of
from .equality import same_bits
from .leaves import can_be_live
from .weak_values import AnyOf, WeakValues, described, matches, unchanged


@dataclass
class ReadGuards:
    """The read sites of a trace with their values."""

    sites: list[ReadSite]
    values: list[Any]
    bulk: list[tuple[Callable[..., Any], list[Any], list[str], list[Any]]]  # by kind: (reader, sources, keys, values)
    absent: tuple[list[dict[str, Any]], list[str]]  # (dicts, keys) of entries that must stay missing
    empty: list[Any]  # containers that must stay empty
    contents: list[tuple[Any, Any]]  # (container, its entries)
    names: dict[int, str]  # of values, by id
    weak: list[tuple[ReadSite, Any]]  # sites that lead to models or logs, each with what ``matches`` compares
    holders: list[tuple[Any, list[Any]]]  # (container that holds a log, what ``matches`` compares its entries with)
    shared: list[list[Reference]]  # the sites and entries that hold one log
    fixed: set[tuple[int, str]]  # sites whose numbers cannot be inputs
    names_in_code: frozenset[str]  # of attributes and in text, of the user's code that ran
    layouts_read: set[bool]  # of the tensors whose strides the step asks for, ``is_index``
    taken: list[tuple[torch.Tensor, torch.Tensor]]  # tensors whose values the step took, each with these
    inside: list[Contents]  # of arrays, and what else lies at no site

    @classmethod
    def of(cls, reads: Reads, holders: Collection[Any], constants: Collection[torch.Tensor]) -> ReadGuards:
        """The values now. Of tensors only constants count: all others are refused, or are state.

        ``holders``: objects that hold models; neither they nor models are kept alive. ``constants``: the tensors that
        each call reads anew, with them arrays that are their memory (``torch.from_numpy``).
        """
        values = WeakValues(set(map(id, holders)))
        reads.forget_notes()
        found = [(site.weak(), site.get()) for site in reads.sites.values()]
        found = [(s, v) for s, v in found if not isinstance(v, torch.Tensor) or _is_guarded(s, v, reads)]
        logs = {key: AnyOf(type(each.live)) for key, each in reads.journals.by_id.items()}
        weak = [(s, expected) for s, v in found if (expected := logs.get(id(v)) or values.of(v)) is not v]
        apart = {site.address for site, _ in weak}
        covered = {id(c) for site, v in found if site.address in apart for c in values.containers(v)}
        found = [(site, value) for site, value in found if site.address not in apart]
        containers = [each.value for key, each in reads.containers.items() if key not in covered]
        found += [(site, MISSING) for site in reads.journals.absent()]
        absent = [site for site, value in found if site.kind == "item" and value is MISSING]
        contents = [(c, content) for c in containers if (content := content_of(c)) is not None]
        holding = [(c, [logs.get(id(v), v) for v in content]) for c, content in contents if logs]
        holding = [(c, content) for c, content in holding if any(isinstance(v, AnyOf) for v in content)]
        contents = [(c, content) for c, content in contents if all(c is not other for other, _ in holding)]
        return cls(
            [site for site, _ in found],
            [value for _, value in found],
            [_bulk(kind, found) for kind in READERS],
            ([site.source for site in absent], [site.key for site in absent]),
            [c for c, content in contents if not content],
            [(c, content) for c, content in contents if content],
            {key: each.name for key, each in reads.containers.items()}
            | {id(value): site.name for site, value in reversed(found)},  # the first of several is the user's
            weak,
            holding,
            [each.references for each in reads.journals.by_id.values() if len(each.references) > 1],
            reads.fixed,
            frozenset(reads.names_in_code()),
            reads.layouts_read,
            [*reads.taken.values()],
            [each for each in reads.contents if not any(each.has_memory_of(x) for x in constants)],
        )

    def hold(self) -> bool:
        """Whether all values and entries are as they were."""
        if any(self.empty) or any(map(dict.__contains__, *self.absent)):
            return False
        if not all(_has_content(c, content) for c, content in self.contents):
            return False
        for reader, sources, keys, values in self.bulk:
            now = list(map(reader, sources, keys, repeat(MISSING)))
            if not all(map(is_, now, values)) and not all(map(unchanged, now, values)):
                return False
        if not all(_matches(c, content) for c, content in self.holders):
            return False
        if not all(matches(site.get(), expected) for site, expected in self.weak):
            return False
        if not all(unchanged(each.read(), each.before) for each in self.inside):
            return False
        return all(same_bits(*pair) for pair in self.taken) and all(map(_is_one, self.shared))

    def changed_numbers(self) -> list[tuple[ReadSite, bool]]:
        """The sites with numbers that can be inputs, each with whether there is another value now."""
        pairs = zip(self.sites, self.values, strict=True)
        found = [(site, value, site.get()) for site, value in pairs if site.address not in self.fixed]
        return [(site, now != value) for site, value, now in found if can_be_live(value, now)]

    def difference(self) -> str:
        """The first value that is not as it was, or nothing."""
        for site, value in zip(self.sites, self.values, strict=True):
            now = site.get()
            if not unchanged(now, value):
                return f"{site.name}: {_shorten(value)} -> {_shorten(now)}"
        for site, expected in self.weak:
            if not matches(site.get(), expected):
                return f"{site.name}: {described(expected)} -> {_shorten(site.get())}"
        for container, content in [*self.contents, *((empty, ()) for empty in self.empty)]:
            if not _has_content(container, content):
                return f"the entries of {self.names.get(id(container), 'a container that the step reads')}"
        for container, content in self.holders:
            if not _matches(container, content):
                return "the entries of a container that holds a log"
        for tensor, values in self.taken:
            if not same_bits(tensor, values):
                return f"the values of {self.names.get(id(tensor), 'a tensor')}"
        for each in self.inside:
            if not unchanged(each.read(), each.before):
                return f"what {each.name} holds"
        return next(
            (f"{group[0].name} is no longer {group[1].name}" for group in self.shared if not _is_one(group)), ""
        )


def _is_one(references: list[Reference]) -> bool:
    """Whether all of them hold one object."""
    first = references[0].get()
    return all(each.get() is first for each in references)


def _matches(container: Any, content: list[Any]) -> bool:
    now = content_of(container) or ()
    return len(now) == len(content) and all(map(matches, now, content))


def _bulk(kind: str, found: list[tuple[ReadSite, Any]]) -> tuple[Callable[..., Any], list[Any], list[str], list[Any]]:
    """The sites of one kind, to be read by one ``map``; missing items are checked apart."""
    pairs = [(site, v) for site, v in found if site.kind == kind and (kind != "item" or v is not MISSING)]
    sites = [site for site, _ in pairs]
    return READERS[kind], [site.source for site in sites], [site.key for site in sites], [value for _, value in pairs]


def _is_guarded(site: ReadSite, value: Any, reads: Reads) -> bool:
    """Whether a tensor at a site is a constant of the program, or refers to its state."""
    is_reference = any(each.holder is site for each in reads.references)
    return (site.owned and is_constant(value)) or id(value) in reads.constants or is_reference


def _has_content(container: Any, content: tuple[Any, ...]) -> bool:
    now = content_of(container) or ()
    return len(now) == len(content) and (all(map(is_, now, content)) or all(map(unchanged, now, content)))


def _shorten(value: Any) -> str:
    text = repr(value) if value is not MISSING else "not there"
    return text if len(text) <= 60 else f"{text[:57]}..."
