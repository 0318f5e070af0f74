"""Guards on tensors in Python state that a program takes as inputs: their specs, and what they are nested in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .._torch import local_tensor, tree_flatten
from ..python_state.effects.carried import Carried, is_carried
from ..python_state.reads import ReadSite
from .equality import structurally_equal
from .leaves import describe, expectation


@dataclass
class CarriedTensors:
    """The sites, and for each what its value was when the program was compiled, with specs for tensors."""

    sites: list[ReadSite]
    expected: list[Any]
    names: list[str]  # of the tensors, in order

    @classmethod
    def of(cls, carried: Carried) -> CarriedTensors:
        """The tensors now."""
        sites = list(carried.sites)
        return cls(sites, [_expected(site) for site in sites], [each.name for each in carried.tensors()])

    def hold(self) -> bool:
        """Whether every site holds such tensors, in the same structure."""
        return all(
            structurally_equal(_expected(site), was) for site, was in zip(self.sites, self.expected, strict=True)
        )

    def tensors(self) -> list[torch.Tensor]:
        """This rank's storages, in order."""
        leaves = [leaf for site in self.sites for leaf in tree_flatten(site.get())[0]]
        return [local_tensor(leaf) for leaf in leaves if is_carried(leaf)]

    def difference(self) -> str:
        """The first site that is not as it was, or nothing."""
        for site, was in zip(self.sites, self.expected, strict=True):
            now = _expected(site)
            if not structurally_equal(now, was):
                return f"{site.name}: {_text(was)} -> {_text(now)}"
        return ""


def _expected(site: ReadSite) -> tuple[Any, ...]:
    leaves, spec = tree_flatten(site.get())
    placements = tuple(leaf.placements for leaf in leaves if isinstance(leaf, DTensor))
    return (spec, placements, *map(expectation, leaves))


def _text(expected: tuple[Any, ...]) -> str:
    return ", ".join(map(describe, expected[2:]))
