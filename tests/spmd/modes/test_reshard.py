"""``reshard_after_forward``: parameters are gathered again for backward, and few units are whole at once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd
from passes import Kind, Phase, Program, Role
from passes.ir.collectives import is_wait
from passes.ir.ops import Trait, has
from tests.harness.cases import MLP, Block, make_optimizer
from tests.harness.fake import fake_world
from tests.harness.oracle import assert_agrees
from tests.harness.pool import Ranks

LAYERS = 4
UNITS = LAYERS + 2  # of blocks: the two that forward reads first, 2.1 MB each, are sent in halves
GATHER = Kind.ALL_GATHER, Role.PARAMETER


class Model(nn.Module):
    """A root with a layer before and one after its blocks."""

    def __init__(self, width: int, layers: int = LAYERS) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def step(model: nn.Module, optimizer: Any, *batches: Tensor) -> Tensor:
    """Accumulates over the batches, then updates."""
    losses = []
    for x in batches:
        losses.append(model(x).square().mean())
        losses[-1].backward()
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack([loss.detach() for loss in losses]).sum()


@cache
def compiled(width: int = 256, batches: int = 1, layers: int = LAYERS, **options: Any) -> spmd.CompiledStep:
    """The step on 64 fake ranks."""
    with fake_world(64):
        model = Model(width, layers)
        mode = spmd.DataParallel("fully_shard", **options)
        result = spmd.compile(step, parallel_mode=mode)
        result(model, torch.optim.SGD(model.parameters()), *(torch.randn(4, width) for _ in range(batches)))
    return result


def counts(program: Program) -> tuple[int, int, int]:
    """The number of gathers of parameters in forward and backward, and of reduce_scatters."""
    described = [(node.meta["collective"], node.meta.get("phase")) for node in program.collectives()]
    gathers = [phase for each, phase in described if (each.kind, each.role) == GATHER]
    backward = sum(phase is Phase.BACKWARD for phase in gathers)
    return len(gathers) - backward, backward, sum(each.kind is Kind.REDUCE_SCATTER for each, _ in described)


@pytest.mark.slow
@pytest.mark.parametrize("reshard, backward", [(None, UNITS), (True, UNITS + 1)])
def test_each_block_is_gathered_twice_and_reduced_once(reshard: bool | None, backward: int) -> None:
    program = compiled(reshard_after_forward=reshard).program
    assert program is not None
    assert counts(program) == (UNITS + 1, backward, UNITS + 1)


@pytest.mark.slow
def test_without_it_nothing_is_gathered_twice() -> None:
    program = compiled(reshard_after_forward=False).program
    assert program is not None
    of = [name for node in program.collectives() for name in node.meta["collective"].of]
    assert counts(program)[1] == 0 and len(of) == 2 * len({*of}) - 1  # all but the loss are gathered, and reduced


@pytest.mark.slow
def test_micro_batches_are_reduced_once() -> None:
    program = compiled(batches=2).program
    assert program is not None
    assert counts(program) == (2 * UNITS + 1, 2 * UNITS, UNITS + 1)


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [(0, 0), (1, 1), (1, 2)])
def test_so_many_units_are_whole_at_once(prefetch: tuple[int, int]) -> None:
    assert most_ahead(compiled(reshard_after_forward=True, prefetch=prefetch)) == prefetch


@pytest.mark.slow
@pytest.mark.parametrize("limit", [*(pytest.param(each, marks=pytest.mark.exhaustive) for each in (1, 3)), 2])
def test_a_limit_of_gathers_caps_what_is_ahead_and_whole_at_once(limit: int) -> None:
    """Of what is kept whole, too, how much is under way."""
    result = compiled(reshard_after_forward=True, prefetch=(4, 2), limit_gathers=limit)
    assert most_ahead(result) == (min(4, limit - 1), min(2, limit - 1))
    assert blocks_at_once(result) == limit
    kept = compiled(reshard_after_forward=False, limit_gathers=limit)
    assert most_ahead(kept) == (limit - 1, 0)
    assert most_ahead(compiled(reshard_after_forward=False))[0] > 3


def blocks_at_once(result: spmd.CompiledStep) -> int:
    """The most blocks whose gather has started, and of which something is still read."""
    assert result.program is not None
    nodes = list(result.program.graph.nodes)
    changes: list[tuple[int, int]] = []
    for node in result.program.collectives():
        described = node.meta["collective"]
        if described.role is Role.PARAMETER and all("blocks" in name for name in described.of):
            changes += [(nodes.index(node), 1), (max(map(nodes.index, readers(node))) + 1, -1)]
    return max(accumulate(change for _, change in sorted(changes)))


def readers(gather: torch.fx.Node) -> set[torch.fx.Node]:
    """All that reads a gathered value, or what only unpacks it."""
    found, pending = set[torch.fx.Node](), [gather]
    while pending:
        node = pending.pop()
        found.update(node.users)
        pending += [user for user in node.users if is_wait(user) or has(user.target, Trait.VIEW, Trait.UNPACKS)]
    return found


def most_ahead(result: spmd.CompiledStep) -> tuple[int, int]:
    """The most gathers that have started before the one that is waited for next, in forward and in backward."""
    program = result.program
    assert program is not None
    ahead = {Phase.FORWARD: 0, Phase.BACKWARD: 0}
    started: list[torch.fx.Node] = []
    for node in program.graph.nodes:
        described = node.meta.get("collective")
        if described is not None and (described.kind, described.role) == GATHER:
            started.append(node)
            phase = node.meta.get("phase", Phase.FORWARD)
            ahead[phase] = max(ahead[phase], len(started) - 1)
        elif started and node.target is torch.ops._c10d_functional.wait_tensor.default and node.args[0] in started:
            started.remove(node.args[0])
    return ahead[Phase.FORWARD], ahead[Phase.BACKWARD]


@pytest.mark.slow
def test_memory_does_not_grow_with_depth() -> None:
    def peak(layers: int, reshard: bool | None) -> int:
        report = compiled(layers=layers, reshard_after_forward=reshard).report()
        return report.memory["cpu"].arena_used

    unit = sum(p.numel() * 4 for p in Block(256).parameters())
    assert peak(7, None) - peak(5, None) < unit  # activations
    assert peak(7, False) - peak(5, False) > 2 * unit


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_parameters_gradients_and_state_take_their_share_and_three_units(prefetch: int) -> None:
    """A unit that is on its way ahead of its use comes on top."""
    with fake_world(2):
        model = Model(256, 6)
        whole = sum(p.numel() * 4 for p in model.parameters())
        unit = sum(p.numel() * 4 for p in Block(256).parameters())
        mode = spmd.DataParallel("fully_shard", prefetch=(prefetch, prefetch))
        compiled_step = spmd.compile(step, parallel_mode=mode)
        compiled_step(model, torch.optim.AdamW(model.parameters()), torch.randn(4, 256))
        (memory,) = compiled_step.report().memory.values()
    kept = sum(memory.roles[role] for role in ("parameters", "gathered", "gradients", "optimizer state"))
    assert unit < kept - 4 * whole / 2 < (3 + prefetch) * unit


@dataclass(frozen=True)
class Deep(MLP):
    """Blocks of an odd width, so that ranks have unequal parts."""

    sizes: tuple[int, ...] = (7, 7)
    rows: int = 4

    def build(self) -> tuple[Any, ...]:
        model = Model(self.sizes[0], 2).double()
        return model, make_optimizer(self.optimizer, model.parameters())


@dataclass(frozen=True)
class Accumulated(Deep):
    """Two micro-batches."""

    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return step(model, optimizer, x, y)


@pytest.mark.parametrize("case, world, options", [
    pytest.param(Deep(optimizer="SGD"), 2, {}, marks=pytest.mark.exhaustive),
    (Deep(optimizer="SGD momentum"), 2, {"reshard_after_forward": True, "prefetch": (0, 2)}),
    pytest.param(Deep(sizes=(8, 8), optimizer="SGD"), 2, {"reshard_after_forward": True}, marks=pytest.mark.exhaustive),
    (Accumulated(optimizer="SGD"), 2, {"reshard_after_forward": True}),
    (Accumulated(sizes=(8, 8), optimizer="SGD"), 2, {"reduce_gradients": "each", "limit_gathers": 1}),
    (Deep(optimizer="SGD"), 4, {"reshard_after_forward": 2, "offload_policy": spmd.OffloadPolicy()}),
], ids=["uneven", "all", "even", "accumulated", "reduced each", "kept by two, offloaded"])  # fmt: skip
def test_numbers_are_those_of_the_plain_step(ranks: Ranks, case: Deep, world: int, options: dict[str, Any]) -> None:
    assert_agrees(ranks, world, case, {"parallel_style": "fully_shard", **options})


@pytest.mark.parametrize("options, words", [
    ({"parallel_style": "replicate", "reshard_after_forward": True}, "gathers no parameters"),
    ({"reshard_after_forward": 2, "offload_policy": spmd.OffloadPolicy()}, "gathers no parameters"),
    ({"parallel_style": "fully_shard", "prefetch": (1,)}, "two numbers of units"),
    ({"parallel_style": "fully_shard", "limit_gathers": 0}, "limit_gathers to be None or a number of units"),
    ({"parallel_style": "fully_shard", "limit_gathers": True}, "limit_gathers to be None or a number of units"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        spmd.DataParallel(**options)


@pytest.mark.parametrize("given, error, words", [
    ("no", TypeError, "a number of ranks"),
    (1, ValueError, "2 ranks or more, got 1: False keeps all on each"),
])  # fmt: skip
def test_what_is_no_number_of_ranks_is_refused(given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        spmd.DataParallel("fully_shard", reshard_after_forward=given)


def test_a_number_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(spmd.PlacementError, match=r"reshard_after_forward=3 does not divide the 64 ranks of dp"):
        compiled(reshard_after_forward=3)


@pytest.mark.slow
def test_so_many_ranks_keep_a_block_together() -> None:
    """Backward gathers among two of all ranks, and half of each block lives until then."""
    program = compiled(reshard_after_forward=2).program
    assert program is not None
    assert counts(program) == (UNITS + 1, UNITS + 1, UNITS + 1)
    described = [(node.meta["collective"], node.meta.get("phase")) for node in program.collectives()]
    axes = {(phase, each.axis) for each, phase in described if (each.kind, each.role) == GATHER}
    assert axes == {(None, "dp"), (Phase.BACKWARD, "dp/2")}  # a bucket serves many phases, and has none
    everyone = compiled(reshard_after_forward=64).program
    assert everyone is not None and everyone.mesh.subgroups == ()  # as with True

    def peak(reshard: bool | int) -> int:
        return int(compiled(layers=6, reshard_after_forward=reshard).report().memory["cpu"].peak)

    none, half, whole = map(peak, (True, 2, False))
    block = sum(p.numel() * 4 for p in Block(256).parameters())
    assert 2 * block < half - none < 6 * block and half < whole


def fails_early(rank: int, world: int) -> tuple[str, float]:
    """One rank passes what cannot be an argument; then all go on."""
    model = Model(8, 2)
    optimizer = make_optimizer("SGD", model.parameters())
    compiled = spmd.compile(step, parallel_mode=spmd.DataParallel("fully_shard", reshard_after_forward=2))
    start = time.monotonic()
    with pytest.raises((spmd.CaptureError, spmd.RankMismatchError)) as raised:
        compiled(model, optimizer, torch.ones(4, 8), {1} if rank == 1 else torch.ones(4, 8))
    seconds = time.monotonic() - start
    assert torch.isfinite(compiled(model, optimizer, torch.ones(4, 8) + rank))
    return str(raised.value), seconds


def test_a_rank_that_fails_early_keeps_none_waiting_for_a_subgroup(ranks: Ranks) -> None:
    for message, seconds in ranks.run(4, fails_early):
        assert seconds < 60 and ("a set" in message or "since rank 1 failed" in message), message
