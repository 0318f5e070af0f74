"""Rows that the step makes itself (types, positions, masks, biases of attention) beside the plain step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from passes.analysis.reachability import descendants
from spmd.micro_batches.early_sums import WHOLE
from tests.harness.oracle import Case, assert_agrees, random_generator
from tests.harness.pool import Ranks

LENGTH, WIDTH, HEADS, TOKENS = 5, 8, 2, 11


class Reader(nn.Module):
    """Attention over tokens. ``bias``: what is added to scores, of shape (rows, heads, length, length)."""

    def __init__(self, bias: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.bias = bias
        self.tokens, self.types = nn.Embedding(TOKENS, WIDTH), nn.Embedding(2, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layer, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        rows, length = ids.shape
        types = torch.zeros(1, length, dtype=torch.long).expand(rows, -1)
        positions = torch.arange(length).repeat(rows, 1)
        h = self.tokens(ids) + self.types(types) + self.positions(positions)
        q, k, v = self.layer(h).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT + self.bias(ids)
        return self.head(h + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def causal(ids: Tensor) -> Tensor:
    """A mask by the positions of each row, which masks of packed sequences look up by its number."""
    rows, length = ids.shape
    positions = torch.arange(length).expand(rows, -1)
    starts = (positions.diff(prepend=positions[:, :1] - 1, dim=1) != 1).cumsum(1)
    row, query, key = torch.arange(rows)[:, None, None], torch.arange(length)[:, None], torch.arange(length)
    seen = (positions[row, key] <= positions[row, query]) & (starts[row, key] == starts[row, query])
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, float("-inf")).unsqueeze(1)


def alibi(ids: Tensor) -> Tensor:
    """Slopes of heads, with rows and heads in one dim."""
    rows, length = ids.shape
    slopes = torch.tensor([0.5, 0.25], dtype=torch.float64)[:, None, None] * torch.arange(length)
    return slopes.repeat(rows, 1, 1).view(rows, HEADS, 1, length)


def by_number(ids: Tensor) -> Tensor:
    """Another one for each row of the batch."""
    rows, length = ids.shape
    return (torch.arange(rows).sin()[:, None] * torch.arange(length)).double()[:, None, None]


def reads(model: nn.Module, optimizer: Any, ids: Tensor) -> dict[str, Tensor]:
    logits = model(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), torch.where(ids > 3, ids, -100).flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss, "norm": norm, "logits": logits.detach()}


def build(bias: Callable[[Tensor], Tensor]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Reader(bias).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def ids(rows: int) -> Tensor:
    return torch.randint(TOKENS, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


STAGES = {"axes": {"stages": "dp"}, "stages": ["layer"], "micro_batches": 2}


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("bias", "rows", "options"),
    [
        (causal, 12, {"micro_batches": 3, "parallel_style": "fully_shard"}),
        (alibi, 10, {"micro_batches": 3, "shard_optimizer": True}),
        (by_number, 16, {"bits": "same", "virtual": 8, "micro_batches": 2}),
        (by_number, 12, STAGES),
    ],
    ids=["causal", "alibi", "same bits", "stages"],
)
def test_rows_that_the_step_makes(bias: Callable[[Tensor], Tensor], rows: int, options: dict[str, Any]) -> None:
    passes = None if "bits" in options else ()
    compiled = spmd.compile(reads, parallel_mode=spmd.DataParallel(**options), passes=passes)
    verdict = spmd.verify(compiled, *build(bias), ids(rows), world=2, steps=1, bits="bits" in options)
    assert verdict, verdict


@dataclass(frozen=True)
class Reading(Case):
    """Each rank has rows of its own."""

    def build(self) -> tuple[Any, ...]:
        return build(by_number)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        return (torch.randint(TOKENS, (5, LENGTH), generator=random_generator(rank, step)),)

    step = staticmethod(reads)


def test_on_two_ranks_whose_last_part_is_short(ranks: Ranks) -> None:
    assert_agrees(ranks, 2, Reading(), {"parallel_style": "fully_shard", "micro_batches": 3}, steps=2)


@pytest.mark.usefixtures("alone")
def test_equal_rows_are_computed_for_those_of_a_part() -> None:
    compiled = spmd.compile(reads, parallel_mode=spmd.DataParallel(micro_batches=3), passes=())
    compiled(*build(causal), ids(21))
    assert compiled.program is not None
    inputs = zip(compiled.program.inputs, compiled.program.placeholders, strict=True)
    nodes = list(compiled.program.graph.nodes)
    counted = descendants(nodes, {node for each, node in inputs if each.name.startswith(WHOLE)})  # labels, ahead
    whole = [node for node in nodes if node not in counted and 21 in getattr(node.meta.get("val"), "shape", ())]
    assert not whole, f"{whole} have the rows of all parts, of which each has 7"


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_certificate_knows_where_the_rows_of_a_run_begin() -> None:
    compiled = spmd.compile(reads, parallel_mode=spmd.DataParallel("fully_shard", micro_batches=3), passes=())
    found = spmd.certify(compiled, *build(by_number), ids(10), world=2)
    assert found, found


def test_a_cut_without_rows_adds_nothing() -> None:
    """Of a single row, which is equal in all of its rows, and of which nothing is taken."""
    compiled = spmd.compile(reads, parallel_mode=spmd.DataParallel(micro_batches=2), passes=())
    verdict = spmd.verify(
        compiled,
        *build(lambda ids: torch.zeros(1, LENGTH, dtype=torch.float64).cos()[1:].sum(0)),
        ids(8),
        world=1,
        steps=1,
    )
    assert verdict, verdict
