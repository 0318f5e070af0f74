"""A later program of a step is the one that a new step would get: what was compiled before changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from passes import Program, print_program
from spmd.running.compiled import Compiled
from tests.harness.fake import fake_world


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 11)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(F.gelu(self.norm(self.embed(x))))
        return y


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def texts(compiled: Compiled) -> list[str]:
    """The captured program, one rank's, and the final one; nodes are numbered, since a trace for sizes names others."""
    return [numbered(each) for each in (compiled.captured.program, compiled.partitioned, compiled.program)]


def numbered(program: Program) -> str:
    numbers = {node.name: f"v{k}" for k, node in enumerate(program.graph.nodes)}
    text = print_program(program).replace(program.name, "program")
    return re.sub(r"(?<!\.)\b\w+", lambda word: numbers.get(word[0], word[0]), text)


def tokens(length: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(2, length, dtype=torch.long), torch.zeros(2, length, dtype=torch.long)


def decay(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    optimizer.param_groups[0]["weight_decay"] = 0.1
    return 5


def freeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    model.embed.weight.requires_grad_(False)
    return 5


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    return 5


def lengthen(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    return 9


AdamW = torch.optim.AdamW
CASES: dict[str, tuple[Callable[..., Any], list[Callable[..., int]]]] = {
    "another truth value": (lambda p: AdamW(p, weight_decay=0.0), [decay]),
    "a frozen layer": (AdamW, [freeze]),
    "an optimizer with state": (torch.optim.Rprop, [nothing]),
    "another length, from what was captured for any": (AdamW, [lambda *_: 7, lengthen]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_later_program_is_that_of_a_new_step(name: str) -> None:
    make, changes = CASES[name]
    torch.manual_seed(0)
    with fake_world(2):
        model = Model()
        optimizer = make(model.parameters())
        step = spmd.compile(train_step)
        step(model, optimizer, *tokens(5))
        for change in changes:
            x, y = tokens(change(model, optimizer))
            step(model, optimizer, x, y)
        later, count = step._dispatch.programs.last, len(step.programs)
        new = spmd.compile(train_step)
        new(model, optimizer, x, y)
        assert later is not None and new._dispatch.programs.last is not None
        assert count == len(changes) + 1
        for mine, theirs in zip(texts(later), texts(new._dispatch.programs.last), strict=True):
            assert mine == theirs
