"""Overrides of a row: a module that is traced in other ops, and an edit of each program's graph; both count."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

import spmd

aten = torch.ops.aten


class ByHand(nn.Module):
    """A linear layer in other ops, with the parameters of the one that it replaces."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return (x[..., None, :] * self.weight).sum(-1) + self.bias


class Replaced(spmd.Override):
    """Replaces a layer of one block while a step is traced."""

    def __init__(self) -> None:
        self.count = 0

    def replacement(self, fqn: str, orig_submodule: nn.Module) -> nn.Module:
        if fqn.endswith("blocks.1.layer") and isinstance(orig_submodule, nn.Linear):
            self.count += 1
            return ByHand(orig_submodule)
        return orig_submodule


class Edited(spmd.Override):
    """Writes each tanh of a program as a sigmoid."""

    def __init__(self) -> None:
        self.count = 0

    def transform(self, gm: fx.GraphModule, flat_state: list[Tensor]) -> fx.GraphModule:
        for node in gm.graph.find_nodes(op="call_function", target=aten.tanh.default):
            with gm.graph.inserting_before(node):
                twice = gm.graph.call_function(aten.mul.Tensor, (node.args[0], 2.0))
                risen = gm.graph.call_function(aten.sigmoid.default, (twice,))
                wide = gm.graph.call_function(aten.mul.Tensor, (risen, 2.0))
                node.replace_all_uses_with(gm.graph.call_function(aten.sub.Tensor, (wide, 1.0)))
            gm.graph.erase_node(node)
            self.count += 1
        gm.recompile()
        return gm


OVERRIDES = {"replacement": Replaced, "transform": Edited}
