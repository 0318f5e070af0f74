"""The "why" of each collective: what is moved, how, and for what."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from passes import Kind, Role
from spmd.partitioner.redistribute import Reason
from tests.harness.structure import compile_on_fake_ranks


def test_a_text_names_the_value_then_how_it_is_moved_then_its_use() -> None:
    assert Reason(Role.GRADIENT).why(Kind.REDUCE_SCATTER, "dp", "sum") == "gradient: sum over dp"
    assert Reason(Role.PARAMETER, "before use").why(Kind.ALL_GATHER, "dp", None) == "parameter: gathered before use"
    assert Reason(use="for mm").why(Kind.ALL_TO_ALL, "tp", None) == "activation: split anew for mm"
    assert Reason(Role.RESULT, value="loss").why(Kind.ALL_REDUCE, "dp", "max") == "loss: max over dp"


def whys(step: Any, style: str) -> set[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mode = spmd.DataParallel(style)
    x, labels = torch.randn(4, 6), torch.zeros(4, dtype=torch.long)
    compiled = compile_on_fake_ranks(2, step, (model, optimizer), x, labels, parallel_mode=mode, passes=())
    return {node.meta["collective"].why for node in compiled.program.collectives()}


def classify(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = model(x)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), (logits.argmax(1) == labels).sum()


def test_a_loss_its_label_count_and_a_metric_have_names_of_their_own() -> None:
    found = whys(classify, "replicate")
    expected = {"loss: sum over dp", "label count: sum over dp", "result.1: sum over dp", "gradient: sum over dp"}
    assert expected <= found
    assert found - expected and all(why.endswith(" at model.1") for why in found - expected)  # batch norm's statistics


def test_split_parameters_are_gathered_before_use() -> None:
    assert {"parameter: gathered before use", "gradient: sum over dp"} <= whys(classify, "fully_shard")
