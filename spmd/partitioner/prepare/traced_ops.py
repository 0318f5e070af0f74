"""The ops of a function on the values of some nodes, as a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..._torch import make_fx


def traced_ops(function: Callable[..., Any], args: Sequence[Any]) -> fx.Graph:
    """The graph of ``function`` on global values; its placeholders are the nodes among ``args``, in order."""
    nodes = [arg for arg in args if isinstance(arg, fx.Node)]

    def call(*tensors: torch.Tensor) -> Any:
        remaining = iter(tensors)
        return function(*(next(remaining) if isinstance(arg, fx.Node) else arg for arg in args))

    with torch.no_grad():
        # Nodes may share a fake, by which a trace would take one for the other.
        vals = [node.meta["val"].detach() for node in nodes]
        return make_fx(call, tracing_mode="fake")(*vals).graph
