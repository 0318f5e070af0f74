"""Pipelines beside the plain step on one process: a GPT over stages, on gloo ranks and on simulated ones."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import spmd
from tests.harness.cases import make_optimizer
from tests.harness.oracle import Case, all_unequal, compiled_run, plain_run, random_generator, snapshot
from tests.harness.pool import Ranks

TOKENS, WIDTH, LENGTH = 13, 8, 6


class Layer(nn.Module):
    """Attention and two linear layers, each with a residual."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    """Four layers; ``tied``: the head is the embedding."""

    def __init__(self, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


def masked_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean over tokens that count, of which micro-batches have other numbers."""
    return F.cross_entropy(model(x).flatten(0, 1), torch.where(y > 3, y, -100).flatten())


def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = masked_loss(model, x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def clip(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Gradients stay for the next call to clear; metrics besides the loss."""
    optimizer.zero_grad()
    logits = model(x)
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return {"loss": loss, "norm": norm, "right": (logits.argmax(-1) == y).sum(), "rows": len(x)}


def rows(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Results with rows of the batch, which all ranks get whole, of a batch that micro-batches do not divide."""
    logits = model(x)
    each = F.cross_entropy(logits.transpose(1, 2), y, reduction="none").mean(1)
    each.mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"logits": logits.detach(), "each": each.detach(), "right": logits.argmax(-1) == y}


STEPS = {"train": train, "clip": clip, "rows": rows}


@dataclass(frozen=True)
class Training(Case):
    """The rows of one part of the batch are equal on all stages."""

    name: str
    optimizer: str
    tied: bool = False
    rows: int = 8

    def build(self) -> tuple[Any, ...]:
        model = Gpt(self.tied).double()
        return model, make_optimizer(self.optimizer, model.parameters())

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        draw = random_generator(rank, step)
        return tuple(torch.randint(TOKENS, (self.rows, LENGTH), generator=draw) for _ in range(2))

    @property
    def step(self) -> Any:  # type: ignore[override]
        return STEPS[self.name]


def beside_plain(rank: int, world: int, case: Case, sizes: dict[str, int], mode: dict[str, Any]) -> list[str]:
    """What differs on a mesh of these sizes, in five steps."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    part = mesh["dp"].get_local_rank() if "dp" in sizes else 0
    expected = plain_run(case, sizes.get("dp", 1), 5)
    _, got = compiled_run(part, case, 5, parallel_mode=spmd.DataParallel(mesh=mesh, **mode))
    return all_unequal(expected, got, rank, world)


def assert_agrees(ranks: Ranks, case: Case, sizes: dict[str, int], **mode: Any) -> None:
    """Fail with a line for each value that differs on any rank."""
    found = [line for lines in ranks.run(prod(sizes.values()), beside_plain, case, sizes, mode) for line in lines]
    assert not found, "\n".join(found[:20])


TWO: dict[str, Any] = {"axes": {"stages": "pp"}, "micro_batches": 4, "stages": ["layers.2"]}


def of_inner_layers(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Evaluates without the head, and with the tied weight on the first stage alone."""
    with torch.no_grad():
        h = model.tokens(x)
        for layer in model.layers:
            h = layer(h)
        return h.square().mean()


def in_turn(rank: int, world: int, order: str, tied: bool) -> list[float]:
    """How far training and evaluation in turn are from the plain steps."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("pp",))
    case, mode = Training("train", "SGD momentum", tied), spmd.DataParallel(mesh=mesh, **TWO)
    torch.manual_seed(0)
    (model, optimizer), (plain, other) = case.build(), case.build()
    plain.load_state_dict(model.state_dict())
    steps = [spmd.compile(each, parallel_mode=mode) for each in (train, of_inner_layers)]
    found = []
    for k, each in enumerate(order):
        x, y = case.part(0, k)
        if each == "t":
            found.append(float(steps[0](model, optimizer, x, y)) - float(train(plain, other, x, y)))
        else:
            found.append(float(steps[1](model, x, y)) - float(of_inner_layers(plain, x, y)))
    return found


@pytest.mark.parametrize(("order", "tied"), [("tet", True), ("ett", False)])
def test_a_step_that_reads_less_leaves_state_where_it_is(ranks: Ranks, order: str, tied: bool) -> None:
    for found in ranks.run(2, in_turn, order, tied):
        assert max(map(abs, found)) < 1e-12, found


@pytest.mark.parametrize(
    ("case", "schedule"),
    [
        (Training("train", "SGD momentum", tied=True), "interleaved"),
        (Training("clip", "AdamW fused"), "zb-h1"),
        (Training("rows", "AdamW fused", tied=True, rows=10), "1f1b"),
    ],
    ids=str,
)
def test_numbers_on_two_stages(ranks: Ranks, case: Case, schedule: str) -> None:
    assert_agrees(ranks, case, {"pp": 2}, **TWO | {"schedule": schedule, "stages": None})


def fails_once(rank: int, world: int, case: Case) -> list[str]:
    """A call in which stage 1 raises in a backward, between two that train: what differs, and what was not raised."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    torch.manual_seed(0)
    objects = case.build()
    compiled = spmd.compile(case.step, parallel_mode=spmd.DataParallel(mesh=mesh, **TWO))
    got = [_snapshot(compiled, objects, case.part(0, 0))]
    stages = compiled._dispatch.programs.last.executable.function.executable  # type: ignore[union-attr]
    lowered = stages._programs[f"backward.{rank}"]
    sound, runs = lowered.executable, list[int]()

    def raises(inputs: Any) -> Any:
        runs.append(1)
        if rank == 1 and len(runs) == 2:
            raise RuntimeError("a fault")
        return sound(inputs)

    lowered.executable = raises
    lines = []
    try:
        compiled(*objects, *case.part(0, 1))
        lines.append(f"rank {rank} did not raise")
    except (RuntimeError, spmd.SpmdError) as error:
        shown = "".join(traceback.format_exception(error))
        lines += [] if f"in backward.{rank}, on micro-batch" in shown else [f"rank {rank}: {shown}"]
    lowered.executable = sound
    got.append(_snapshot(compiled, objects, case.part(0, 1)))
    return lines + all_unequal(plain_run(case, 1, 2), got, rank, world)


def _snapshot(step: Any, objects: tuple[Any, ...], batch: tuple[Any, ...]) -> dict[str, Any]:
    return snapshot(step(*objects, *batch), objects)


def test_a_stage_that_raises_ends_the_call_on_all(ranks: Ranks) -> None:
    found = ranks.run(2, fails_once, Training("train", "SGD momentum"))
    assert not any(found), found
