"""The trainer in one file computes what the plain step computes, and sends what its styles say."""

from __future__ import annotations

import from_scratch
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.optim import SGD

from tests.harness.pool import Ranks

SENT = {
    "replicate": {"all_gather": 0, "all_reduce": 1, "reduce_scatter": 0},  # all gradients and the loss together
    "fully_shard": {"all_gather": 6, "all_reduce": 1, "reduce_scatter": 6},  # once for each parameter; the loss
}


@pytest.mark.parametrize("style", SENT)
def test_both_styles_train_as_the_plain_step(style: str, ranks: Ranks) -> None:
    assert ranks.run(2, _trained, style) == [SENT[style]] * 2


def _trained(rank: int, world: int, style: str) -> dict[str, int]:
    return from_scratch.train(style)


def test_a_step_is_captured_without_being_run() -> None:
    model, optimizer = from_scratch.make()
    before = [each.detach().clone() for each in model.parameters()]
    batch = [torch.randn(8, 4).double(), torch.randn(8, 2).double()]
    graph = from_scratch.capture(from_scratch.train_step, model, optimizer, batch)
    assert all(each.equal(value) for each, value in zip(model.parameters(), before, strict=True))
    assert all(isinstance(each, nn.Parameter) for each in model.parameters())
    assert not any("profiler" in str(node.target) for node in graph.graph.nodes)
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    assert len(output.all_input_nodes) == 1


def test_an_op_without_a_rule_is_computed_whole(ranks: Ranks) -> None:
    ranks.run(2, _sorted)


def _sorted(rank: int, world: int) -> None:
    def step(model: nn.Module, optimizer: SGD, x: torch.Tensor) -> torch.Tensor:
        loss = (model(x).sort(dim=0)[0] * torch.arange(8.0).double()[:, None]).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    (plain, of_plain), (model, optimizer) = from_scratch.make(), from_scratch.make()
    compiled = from_scratch.CompiledStep(step, "fully_shard")
    for _ in range(3):
        x = torch.randn(8, 4).double()
        loss = compiled(model, optimizer, from_scratch.own_share(x, 0))
        torch.testing.assert_close(loss, step(plain, of_plain, x).detach(), rtol=0, atol=1e-12)
    assert compiled.placements[0] == Shard(0)
