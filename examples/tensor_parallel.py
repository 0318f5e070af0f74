"""Tensor parallel for ``gpt.GPT``, as Megatron-LM does it: where its weights live, and, if asked, its activations.

Ranks along the axis "tp" share out the heads, the hidden width of the MLPs and the bytes of the vocabulary. A block
then needs two all_reduces in forward and two in backward. With ``split_sequence`` they share out the positions, too,
wherever every position goes by itself: each all_reduce becomes a reduce_scatter and an all_gather, and no rank has a
whole residual stream.
"""

from __future__ import annotations

from typing import Any

import gpt
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import spmd

# Rows of a weight are outputs of its layer: columns meet the rows of the layer before on the rank that has them.
PLACEMENTS = {
    "*.qkv.weight": {"tp": Shard(0)},
    "*.out.weight": {"tp": Shard(1)},
    "*.up.weight": {"tp": Shard(0)},
    "*.down.weight": {"tp": Shard(1)},
    "*.bytes.weight": {"tp": Shard(0)},
    "*.head.weight": {"tp": Shard(0)},
}


def placements(config: gpt.Config) -> dict[str, Any]:
    """Where the parameters of a model live; one matrix that both reads and writes bytes has one name."""
    return {name: placement for name, placement in PLACEMENTS.items() if not (config.tied and "head" in name)}


def split_sequence(model: gpt.GPT) -> None:
    """Let ranks share out the positions between blocks: (batch, time, width) is split along time there."""
    model.bytes.register_forward_hook(split)
    for block in model.blocks:
        assert isinstance(block, gpt.Block)
        for part in (block.attention, block.mlp):
            part.register_forward_pre_hook(whole)
            part.register_forward_hook(split)
    model.head.register_forward_pre_hook(whole)


def whole(module: nn.Module, arguments: tuple[Tensor]) -> Tensor:
    """What goes into a part that shares out its weights has all positions."""
    return spmd.constrain(arguments[0], {"dp": Shard(0)})


def split(module: nn.Module, arguments: tuple[Tensor], result: Tensor) -> Tensor:
    """What comes out is added up into some of the positions on each rank."""
    return spmd.constrain(result, {"dp": Shard(0), "tp": Shard(1)})
