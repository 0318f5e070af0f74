"""The ops that update the example GPT."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import spmd
from examples.gpt import GPT, Config
from passes import Phase
from tests.harness.fake import fake_world

pytestmark = pytest.mark.slow


def step(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def updating_ops(style: Any, **options: Any) -> tuple[Any, Counter[str]]:
    """The program of the second step on two ranks, and the ops of its update but for accesses to lists."""
    model = GPT(Config(width=32, layers=1, context=16))
    optimizer = torch.optim.AdamW(model.parameters())
    with fake_world(2):
        compiled = spmd.compile(parallel_mode=spmd.DataParallel(style), **options)(step)
        for _ in range(2):
            compiled(model, optimizer, torch.randint(256, (4, 17)))
    program = compiled.program
    assert program is not None
    nodes = [node for node in program.graph.nodes if node.meta.get("phase") == Phase.UPDATE]
    return program, Counter(str(node.target) for node in nodes if "getitem" not in str(node.target))


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_a_unit_of_the_example_is_updated_by_two_ops(style: Any) -> None:
    program, ops = updating_ops(style)
    units = len(program.units)
    assert units >= 1
    assert {op: ops[op] for op in ops if "foreach" in op or "fused" in op} == {
        "aten._foreach_add_.Scalar": units,
        "aten._fused_adamw_.default": units,
    }
    assert not {"aten.lerp_.Scalar", "aten.addcdiv_.default", "aten.clone.default", "aten.copy_.default"} & ops.keys()


def test_without_passes_each_parameter_takes_many() -> None:
    program, ops = updating_ops("replicate", passes=())
    parameters = sum(declared.name.startswith("model") and declared.role == "parameter" for declared in program.inputs)
    assert sum(ops.values()) > 14 * parameters
