"""Tensor and sequence parallel for ``gpt.GPT``, as in Megatron-LM: placements of its weights and activations.

The heads, the hidden width of the MLPs and the bytes of the vocabulary are sharded over the axis "tp". A block then
needs two all_reduces in forward and two in backward. ``split_sequence`` shards the positions as well, wherever they do
not interact: each all_reduce becomes a reduce_scatter and an all_gather, and no rank has the whole residual stream
between the blocks.
"""

from __future__ import annotations

from typing import Any

import gpt
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import spmd

# Rows of a weight are outputs of its layer: a rank that has rows of one layer has the matching columns of the next.
PLACEMENTS = {
    "*.qkv.weight": {"tp": Shard(0)},
    "*.out.weight": {"tp": Shard(1)},
    "*.up.weight": {"tp": Shard(0)},
    "*.down.weight": {"tp": Shard(1)},
    "*.bytes.weight": {"tp": Shard(0)},
    "*.head.weight": {"tp": Shard(0)},
}


def placements(config: gpt.Config) -> dict[str, Any]:
    """Placements of the parameters of a model; a tied matrix has one name."""
    return {name: placement for name, placement in PLACEMENTS.items() if not (config.tied and "head" in name)}


def split_sequence(model: gpt.GPT) -> None:
    """Shard activations (batch, time, width) along time between the parts of the blocks, by hooks."""
    model.bytes.register_forward_hook(split)
    for block in model.blocks:
        assert isinstance(block, gpt.Block)
        for part in (block.attention, block.mlp):
            part.register_forward_pre_hook(whole)
            part.register_forward_hook(split)
    model.head.register_forward_pre_hook(whole)


def whole(module: nn.Module, arguments: tuple[Tensor]) -> Tensor:
    """Gather all positions in front of a part whose weights are sharded."""
    return spmd.constrain(arguments[0], {"dp": Shard(0)})


def split(module: nn.Module, arguments: tuple[Tensor], result: Tensor) -> Tensor:
    """Reduce the result to some of the positions on each rank."""
    return spmd.constrain(result, {"dp": Shard(0), "tp": Shard(1)})
