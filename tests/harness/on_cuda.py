"""Programs for a GPU where there is none: what was traced on the CPU is partitioned as if that had been a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import spmd
from passes import Program


class OnCuda(spmd.DataParallel):
    """Partitions what was traced on the CPU as if that had been a GPU. Counters of optimizers are on the CPU anyway."""

    def partition(self, program: Program) -> Program:
        """With other fake values, on which ops are run again."""
        program, cuda = program.copy(), torch.device("cuda", 0)
        for node in program.graph.nodes:
            counts = node.op == "placeholder" and not getattr(node.meta["val"], "shape", ())
            if "val" in node.meta and not counts:
                node.meta["val"] = tree_map(partial(moved, device=cuda), node.meta["val"])
            if node.kwargs.get("device") is not None:
                node.kwargs = {**node.kwargs, "device": cuda}
        return super().partition(program)


def moved(value: Any, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    with value.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def back_on_cpu(program: Program) -> Program:
    """The same nodes on the CPU, to run."""
    program, cpu = program.copy(), torch.device("cpu")
    for node in program.graph.nodes:
        node.args, node.kwargs = tree_map(lambda x: cpu if isinstance(x, torch.device) else x, (node.args, node.kwargs))
        node.meta["val"] = tree_map(partial(moved, device=cpu), node.meta.get("val"))
    return program
