"""When sums are added up: a sum over the batch stays a sum of the ranks' shares until someone needs its value.

A gradient is reduced once, at the node that capture knows to be the whole of it, to where its parameter is updated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial

from passes import Phase

from . import reasons
from .context import Facts
from .hints import Wanted
from .materialize import Forms
from .values import Value


@dataclass
class Sums:
    """Reduces what the walk has come to, before and after each op."""

    facts: Facts
    wanted: Wanted
    forms: Forms

    def before(self, node: fx.Node) -> None:
        """Where each gradient is reduced by itself, reduce what is about to be added to one that is."""
        parameter = self.facts.complete.get(node)
        if parameter is None or not self.facts.reduces_each(parameter):
            return
        shape = self.facts.shapes[parameter]
        for held in (self.forms.values.get(leaf) for leaf in node.all_input_nodes):
            if isinstance(held, Value) and held.shape == shape and any(isinstance(p, Partial) for p in held.primary):
                self._to_parameter(held, parameter)

    def after(self, node: fx.Node) -> None:
        """Reduce a gradient, once it is complete, to where it is computed with, and a sum that is used in many ways."""
        held = self.forms.values.get(node)
        if not isinstance(held, Value):
            return
        parameter = self.facts.complete.get(node)
        if parameter is not None:
            self._to_parameter(held, parameter)
        if node.meta.get("phase") is Phase.BACKWARD and _fans_out(node):
            self._over_the_model(node, held)

    def _to_parameter(self, held: Value, parameter: str) -> None:
        place = self.facts.place_of_gradient(parameter)
        held.move(place, self.forms.want(held, place, self.facts.to_reduce(parameter)))
        held.batch = frozenset()

    def _over_the_model(self, node: fx.Node, held: Value) -> None:
        """Reduce a sum over the model's ranks that is used in several ways: each would leave a sum of its own."""
        wanted = self.wanted.of(node) or self.facts.whole
        open_axes = [k for k in self.facts.model_axes if isinstance(held.primary[k], Partial)]
        place = tuple(wanted[k] if k in open_axes else p for k, p in enumerate(held.primary))
        if place != held.primary:
            held.move(place, self.forms.want(held, place, reasons.for_branches(node, self.facts)))


def _fans_out(node: fx.Node) -> bool:
    """Whether more than one value is computed from ``node``, and not all of them are smaller."""
    made = [val for user in node.users for val in _used(user)]
    return len(made) > 1 and any(val.numel() >= node.meta["val"].numel() for val in made)


def _used(node: fx.Node) -> list[Any]:
    """The tensors that an op gives and that somebody takes."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return [node.meta["val"]]
    return [user.meta["val"] for user in node.users if isinstance(user.meta.get("val"), torch.Tensor) and user.users]
