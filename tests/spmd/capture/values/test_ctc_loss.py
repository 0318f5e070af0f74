"""``ctc_loss`` on rows that are split: lengths as lists and as tensors, every reduction, losses that are infinite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

import spmd
from passes.runtime.ctc_loss import ctc_loss
from tests.harness.cases import ON_THREE, THREE_IN_TURN, mlp
from tests.harness.oracle import Case, assert_agrees, random_generator
from tests.harness.pool import Ranks
from tests.harness.structure import compile_on_fake_ranks, counts

FRAMES, LABELS, CLASSES = 5, 3, 4


@dataclass(frozen=True)
class Aligned(Case):
    """A 6-5-20 model whose outputs are frames of classes; rows differ in the lengths of frames and of labels."""

    def build(self) -> tuple[Any, ...]:
        model = mlp(6, 5, FRAMES * CLASSES)
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        generator = random_generator(rank, step)
        x = torch.randn(3, 6, generator=generator, dtype=torch.float64)
        targets = torch.randint(1, CLASSES, (3, LABELS), generator=generator)
        labels = torch.randint(0, LABELS + 1, (3,), generator=generator).clamp(max=LABELS - rank % 2)
        return x, targets, torch.randint(1, FRAMES + 1, (3,), generator=generator), labels

    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor, targets: Tensor, frames: Tensor, labels: Tensor) -> Any:
        losses = _losses(model, x, targets, frames, labels)
        (losses[0] + 0.1 * losses[1] + (losses[2] * x[:, 0]).sum() + losses[3]).backward()
        optimizer.step()
        optimizer.zero_grad()
        return losses


def _losses(model: nn.Module, x: Tensor, targets: Tensor, frames: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Lists for lengths, tensors, reduction in three ways; of some rows the frames are too few for the labels."""
    n = len(x)
    outputs = model(x).view(n, FRAMES, CLASSES)
    log_probs, turned = outputs.transpose(0, 1).log_softmax(-1), outputs.log_softmax(-1).transpose(0, 1)
    every = [FRAMES] * n, (LABELS - 1,) * n
    return (
        F.ctc_loss(turned, targets, *every),
        F.ctc_loss(log_probs, targets, torch.full((n,), FRAMES), labels.int(), blank=0, reduction="sum"),
        nn.CTCLoss(reduction="none", zero_infinity=True)(turned, targets, frames, labels),
        nn.CTCLoss(blank=CLASSES - 1, zero_infinity=True)(log_probs, targets % (CLASSES - 1), frames, labels),
    )


@pytest.mark.parametrize(
    "style, world",
    [THREE_IN_TURN[0], *(pytest.param(*s, marks=pytest.mark.exhaustive) for s in (ON_THREE, *THREE_IN_TURN[1:]))],
)
def test_the_numbers_of_the_plain_step(ranks: Ranks, style: str, world: int) -> None:
    assert_agrees(ranks, world, Aligned(), style, steps=3)


def test_what_the_forward_pass_remembers_is_written_whole() -> None:
    log_probs, targets = torch.randn(5, 3, 4).log_softmax(-1), torch.tensor([[1, 2, 3]] * 3)
    lengths = torch.tensor([5, 2, 4]), torch.tensor([3, 1, 0])
    _, remembered = ctc_loss(log_probs, targets, *lengths, 0, False)
    assert bool((remembered[1, 2:] == -torch.inf).all()), "behind the frames of a row"
    assert bool((remembered[1, :, 3:] == -torch.inf).all()), "behind its states"
    expected = torch.ops.aten._ctc_loss(log_probs, targets, *lengths)[1]
    assert remembered[0].equal(expected[0])


def test_rows_stay_on_their_ranks() -> None:
    case = Aligned()
    compiled = compile_on_fake_ranks(2, case.step, case.build(), *case.part(0, 0), passes=())
    assert set(counts(compiled)) == {"all_reduce"}
    assert compiled.report().notes == ()


@pytest.mark.usefixtures("alone")
def test_one_sequence_needs_no_batch() -> None:
    def loss(x: Tensor) -> Tensor:
        return F.ctc_loss(x, torch.tensor([2, 1, 2]), (FRAMES,), target_lengths=(3,))

    x = torch.randn(FRAMES, CLASSES).log_softmax(-1)
    torch.testing.assert_close(spmd.compile(loss)(x), loss(x))


@dataclass(frozen=True)
class InOneDim(Aligned):
    """The targets of all rows one behind the other, as many labels on each rank."""

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        x, targets, frames, labels = super().part(rank, step)
        labels = torch.tensor([2, 0, 3]).roll(rank + step)
        own = [row[:length] for row, length in zip(targets, labels.tolist(), strict=True)]
        return x, torch.cat(own), frames, labels

    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor, targets: Tensor, frames: Tensor, labels: Tensor) -> Any:
        log_probs = model(x).view(len(x), FRAMES, CLASSES).transpose(0, 1).log_softmax(-1)
        loss = F.ctc_loss(log_probs, targets, torch.full((len(x),), FRAMES), labels)
        rows = F.ctc_loss(log_probs, targets, frames, labels, reduction="none", zero_infinity=True)
        (loss + (rows * x[:, 0]).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, rows


def test_targets_of_all_rows_in_one_dim(ranks: Ranks) -> None:
    inputs = dict.fromkeys(("x", "targets", "frames", "labels"), Shard(0))
    assert_agrees(ranks, 2, InOneDim(), {"parallel_style": "fully_shard", "inputs": inputs}, steps=3)


@pytest.mark.usefixtures("alone")
def test_a_target_that_is_longer_than_its_frames_has_an_infinite_loss() -> None:
    def loss(x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
        return F.ctc_loss(x.log_softmax(-1), y, torch.full((2,), 2), labels, reduction="none")

    given = torch.randn(2, 2, CLASSES), torch.tensor([1, 2, 3, 1, 2, 3]), torch.tensor([5, 1])
    mode = spmd.DataParallel(inputs=dict.fromkeys(("x", "y", "labels"), Shard(0)))
    assert torch.equal(spmd.compile(loss, parallel_mode=mode)(*given), loss(*given))
    assert loss(*given)[0].isinf() and loss(*given)[1].isfinite()
