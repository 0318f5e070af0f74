"""Sections of a program: blocks are counted once, and one capture describes batches of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import spmd
from passes import Kind, Phase
from passes.schedule.op_work import OpClass
from spmd.planning.capture import partitioned, sections
from spmd.planning.kernels import Section
from spmd.planning.shorten import shortened

WIDTH, TOKENS, VOCABULARY = 16, 8, 256  # a table is larger than what is read of it


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


def model(blocks: int) -> nn.Module:
    with torch.device("meta"):
        head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Sequential(*(Block() for _ in range(blocks))), head)


@spmd.compile
def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor) -> Tensor:
    loss = F.cross_entropy(model(text).flatten(0, 1), text.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def found(blocks: int = 3, rows: int = 2, tensor: int = 1, fused: bool = False) -> list[Section]:
    made = model(blocks)
    text = torch.zeros(rows, TOKENS, dtype=torch.long)
    params = {"*.up.weight": {"tp": Shard(0)}, "*.up.bias": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}}

    def mode(mesh: DeviceMesh) -> spmd.DataParallel:
        return spmd.DataParallel("replicate", mesh=mesh, params=params if tensor > 1 else None)

    args = (made, torch.optim.SGD(made.parameters(), lr=0.1), text)
    return sections(partitioned(train_step, mode, args, {}, {"dp": 2, "tp": tensor}), fused)


def amounts(section: Section, rows: float) -> Any:
    kernels = [(k.kind, k.flops.at(rows), k.bytes.at(rows)) for p in section.kernels.values() for k in p]
    return kernels, section.saved.at(rows), section.boundary.at(rows), section.parameters


def flops(section: Section, phase: Phase, rows: float) -> float:
    return sum(kernel.flops.at(rows) for kernel in section.kernels[phase] if kernel.kind is OpClass.MATMUL)


def test_blocks_are_one_section_between_what_comes_before_and_after() -> None:
    first, block, last = found()
    assert [first.count, block.count, last.count] == [1, 3, 1]
    assert block.name == "model.1.0"
    assert first.parameters == last.parameters == VOCABULARY * WIDTH
    assert block.parameters == sum(each.numel() for each in Block().parameters())


def test_products_are_counted_by_their_formula() -> None:
    _, block, last = found()
    forward = 2 * 3 * TOKENS * 2 * WIDTH * 4 * WIDTH  # rows, and two products
    assert flops(block, Phase.FORWARD, rows=3) == forward
    assert flops(block, Phase.BACKWARD, rows=3) == 2 * forward
    assert flops(last, Phase.FORWARD, rows=3) == 2 * 3 * TOKENS * WIDTH * VOCABULARY


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_one_capture_describes_other_numbers_of_rows(fused: bool) -> None:
    few, many = found(rows=2, fused=fused), found(rows=6, fused=fused)
    for one, other in zip(few, many, strict=True):
        for each, same in zip(amounts(one, 6)[0], amounts(other, 6)[0], strict=True):
            assert each[0] is same[0]
            assert each[1:] == pytest.approx(same[1:])
        assert amounts(one, 6)[1:] == pytest.approx(amounts(other, 6)[1:])


def test_a_block_hands_on_its_activations() -> None:
    _, block, _ = found()
    assert block.boundary.at(5) == 5 * TOKENS * WIDTH * 4
    assert block.saved.at(5) > block.boundary.at(5)


def test_a_split_block_has_less_work_and_its_collectives() -> None:
    whole, split = found(tensor=1)[1], found(tensor=2)[1]
    assert flops(split, Phase.FORWARD, 1) == flops(whole, Phase.FORWARD, 1) / 2
    assert not any(whole.messages.values())
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        (message,) = split.messages[phase]
        assert (message.kind, message.axis, message.bytes.at(3)) == (Kind.ALL_REDUCE, "tp", 3 * TOKENS * WIDTH * 4)


def test_fused_kernels_are_fewer_and_move_less() -> None:
    plain, fused = found()[1], found(fused=True)[1]
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert len(fused.kernels[phase]) < len(plain.kernels[phase])
        assert flops(fused, phase, 1) == flops(plain, phase, 1)
    moved = [sum(k.bytes.at(1) for p in each.kernels.values() for k in p) for each in (fused, plain)]
    assert moved[0] < moved[1]


def test_two_blocks_stand_for_all() -> None:
    long = model(5)
    optimizer = torch.optim.SGD(long.parameters(), lr=0.1)
    (short, kept, _), _, counts = shortened(train_step, (long, optimizer, torch.zeros(2, TOKENS)), {})
    assert counts == {"model.1.0": 5}
    assert len(short[1]) == 2
    assert len(long[1]) == 5  # type: ignore[arg-type]
    assert {id(each) for each in kept.param_groups[0]["params"]} == {id(each) for each in short.parameters()}
    for one, other in zip(found(blocks=2), found(blocks=5), strict=True):
        assert amounts(one, 2) == amounts(other, 2)


def test_what_repeats_inside_of_a_block_stays() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for each in self.inner:
                x = each(x)
            return x

    whole = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Sequential(*(Nested() for _ in range(3))))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    (short, *_), _, counts = shortened(train_step, (whole, optimizer, torch.zeros(2, TOKENS)), {})
    assert counts == {"model.1.0": 3}
    assert [len(each.inner) for each in short[1]] == [4, 4]
