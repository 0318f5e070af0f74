"""Random ops in steps: their numbers on any number of ranks, seeds, and runs that continue from a checkpoint."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as checkpoints
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import spmd
from passes import CaptureError, Role
from passes.runtime.random import _DRAWN_BY_POSITION, draw
from spmd.rules.registry import RULES
from tests.harness.cases import MLP, make_optimizer, mlp
from tests.harness.fake import fake_world
from tests.harness.oracle import Snapshot, all_unequal, assert_agrees, compiled_run, snapshot, unequal
from tests.harness.pool import RankError, Ranks
from tests.harness.structure import nodes_of

pytestmark = pytest.mark.slow

F64 = torch.float64


class Zoo(nn.Module):
    """Every kind of random op in a model."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(15, 8), nn.Linear(8, 4)
        self.drops = nn.ModuleList([nn.Dropout(0.3), nn.AlphaDropout(0.2), nn.Dropout(0.1, inplace=True), nn.RReLU()])
        self.channels = nn.Sequential(nn.Conv1d(8, 8, 1), nn.Dropout1d(0.3))
        self.lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.4, batch_first=True)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x[torch.randperm(len(x))])
        for drop in self.drops:
            x = drop(x)
        x = self.channels(x[:, :, None])[:, :, 0]
        x = x * torch.rand(len(x), 1) + torch.randn(len(x), 8) + x.new_empty(len(x), 8).uniform_(-1, 1)
        x = checkpoint(self.block, x, use_reentrant=False)
        x = x * F.gumbel_softmax(x) + self.lstm(x.view(-1, 2, 4))[0].flatten(1)
        x = x + F.dropout(x.view(-1, 2, 4).transpose(0, 1).reshape(-1, 4), 0.2).view(2, -1, 4).sum(0).repeat(1, 2)
        heads = x.view(-1, 2, 2, 2)
        x = x + F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3).flatten(1)
        x = x + x.gather(1, torch.multinomial(x.softmax(1), 1)) * torch.randint(1, 5, (len(x), 8))
        x = x + torch.normal(x.detach(), 0.1) + torch.poisson(x.detach().abs())
        return F.linear(x, F.dropout(self.leave.weight, 0.2), self.leave.bias)


@dataclass(frozen=True)
class Drawing(MLP):
    """24 rows a step, however many ranks there are."""

    sizes: tuple[int, ...] = (15, 4)
    world: int = 1
    optimizer: str = "SGD"

    def build(self) -> tuple[Any, ...]:
        model = Zoo().double()
        return model, make_optimizer(self.optimizer, model.parameters())

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        random = torch.Generator().manual_seed(step)
        whole = (torch.randn(24, size, generator=random, dtype=F64) for size in (15, 4))
        return tuple(each.chunk(self.world)[rank] for each in whole)


def invariant_run(rank: int, world: int, style: str) -> list[Snapshot]:
    spmd.seed(5, invariant=True)
    options = {"parallel_mode": spmd.DataParallel(style)}
    torch.set_default_dtype(F64)
    try:
        return compiled_run(rank, Drawing(world=world), 2, **options)[1]
    finally:
        torch.set_default_dtype(torch.float32)


def test_invariant_draws_are_those_of_one_rank(ranks: Ranks, pytestconfig: pytest.Config) -> None:
    """Everything that a user sees is the same on 1 and 2 ranks; more of them, and of styles, with --exhaustive."""
    (alone,) = ranks.run(1, invariant_run, "replicate")
    assert len({step["result"].item() for step in alone}) == 2
    more = ((2, "replicate"), (3, "fully_shard"), (4, "fully_shard")) if pytestconfig.getoption("exhaustive") else ()
    for world, style in ((2, "fully_shard"), *more):
        for seen in ranks.run(world, invariant_run, style):
            assert not [line for want, have in zip(alone, seen, strict=True) for line in unequal(want, have, 0, 1)]


class Hidden(nn.Module):
    """Dropout where rows and columns are split, computed twice; and noise in the shape of a split weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(15, 7), nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(self.up.weight)
        return checkpoint(
            lambda y: self.down(F.dropout(F.linear(y, self.up.weight + noise), 0.5)), x, use_reentrant=False
        )


@dataclass(frozen=True)
class OnMesh(Drawing):
    def build(self) -> tuple[Any, ...]:
        model = Hidden().double()
        return model, make_optimizer(self.optimizer, model.parameters())

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        x, y = super().part(rank // 2 if self.world > 1 else 0, step)
        return x, y


def on_one_rank(rank: int, world: int) -> list[Snapshot]:
    spmd.seed(5, invariant=True)
    return compiled_run(rank, OnMesh(), 2)[1]


def on_mesh(rank: int, world: int, expected: list[Snapshot]) -> list[str]:
    """Rows over one axis, the 7 hidden columns, unevenly, over the other: as on one rank."""
    spmd.seed(5, invariant=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    params = {"*up.weight": {"tp": Shard(0)}, "*up.bias": {"tp": Shard(0)}, "*down.weight": {"tp": Shard(1)}}
    inputs = {name: {"dp": Shard(0)} for name in ("x", "y")}
    _, got = compiled_run(
        rank, OnMesh(world=2), 2, parallel_mode=spmd.DTensorExpand(mesh=mesh, params=params, inputs=inputs)
    )
    return all_unequal(expected, got, rank, world)


def test_invariant_draws_on_a_mesh_of_two_axes(ranks: Ranks) -> None:
    (expected,) = ranks.run(1, on_one_rank)
    assert not [line for lines in ranks.run(4, on_mesh, expected) for line in lines]


def test_split_values_can_be_drawn_by_position() -> None:
    """Each random op with a rule has a form that does not depend on the split; attention is refused when it runs."""
    seeded = {op for op in RULES if torch.Tag.nondeterministic_seeded in op.tags}
    splits = {op for op in seeded if "generator" not in op._overloadname and "_scaled_dot_product" not in op.name()}
    whole = {torch.ops.aten.randperm.default}
    assert splits - whole == set(_DRAWN_BY_POSITION)


def mask_and_noise(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return F.dropout(torch.ones_like(x), 0.5), torch.randn(len(x), 4), torch.randn(5, 3)


def draw_parts(rank: int, world: int) -> list[tuple[Tensor, ...]]:
    step = spmd.compile(mask_and_noise)
    return [step(torch.ones(400, 50)) for _ in range(2)]


def test_shards_draw_differently_and_replicas_equally(ranks: Ranks) -> None:
    """And each call draws anew, with the distribution that was asked for."""
    parts = [each for calls in ranks.run(2, draw_parts) for each in calls]  # 2 calls on each of 2 ranks
    masks, noises, tables = ([tuple(x.flatten().tolist()) for x in kind] for kind in zip(*parts, strict=True))
    assert len(set(masks)) == 4 and len(set(noises)) == 4
    assert tables[0] == tables[2] != tables[1] == tables[3]
    for mask, noise, _ in parts:
        assert mask.shape == (400, 50) and noise.shape == (400, 4)
        assert abs(mask.mean() - 1) < 0.03 and set(mask.unique().tolist()) == {0.0, 2.0}
        assert abs(noise.mean()) < 0.1 and abs(noise.var() - 1) < 0.15


def draw_shared(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Noise on what all ranks share: on a weight in forward, on gradients, on parameters after the update."""
    loss = F.mse_loss(F.linear(x, F.dropout(model.weight, 0.5), model.bias), y)
    loss.backward()
    for parameter in model.parameters():
        parameter.grad.add_(torch.randn_like(parameter), alpha=0.1)
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(), alpha=0.01)
    optimizer.zero_grad()
    return loss


def drift(rank: int, world: int, style: str) -> Snapshot:
    torch.manual_seed(rank)  # what ranks do with their own generators is their own affair
    model = nn.Linear(7, 5).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = spmd.compile(parallel_mode=spmd.DataParallel(style))(draw_shared)
    for _ in range(4):
        loss = step(model, optimizer, torch.randn(6, 7, dtype=F64), torch.randn(6, 5, dtype=F64))
    return snapshot(loss, (model,))


@pytest.mark.parametrize(
    ("world", "style"), [pytest.param(2, "replicate", marks=pytest.mark.exhaustive), (2, "fully_shard")]
)
def test_replicas_never_drift(ranks: Ranks, world: int, style: str) -> None:
    first, *others = ranks.run(world, drift, style)
    assert not [line for other in others for line in unequal(first, other, 0, 1)]


@dataclass(frozen=True)
class Harmless(MLP):
    """Steps that draw, and whose numbers do not depend on what was drawn."""

    sizes: tuple[int, ...] = (15, 17, 4)
    rows: int = 6

    def build(self) -> tuple[Any, ...]:
        torch.manual_seed(1)
        model = mlp(*self.sizes)
        return model, make_optimizer(self.optimizer, model.parameters())

    @staticmethod
    def step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        x, y = permuted(*unread(*no_dropout(x, y)))
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


def permuted(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The rows in another order, the same for both."""
    order = torch.randperm(len(x))
    return x[order], y[order]


def unread(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Noise that is drawn, added to the batch, reduced, and multiplied by zero."""
    noise = torch.randn(len(x), 15, dtype=F64)
    return x + 0 * (noise * x).sum(), y + 0 * noise.sum(1, keepdim=True)


def no_dropout(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Dropout that drops nothing, or all."""
    x = F.dropout(F.dropout(x, 0.5, training=False), 0.0)
    return x + F.dropout(x, 1.0) + nn.Dropout(0.5).eval()(x), y


@pytest.mark.parametrize("style, world", [
    ("replicate", 2), ("fully_shard", 2), pytest.param("fully_shard", 3, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_agrees_where_draws_do_not_matter(ranks: Ranks, style: str, world: int) -> None:
    assert_agrees(ranks, world, Harmless(), style)


NOISE: dict[str, Callable[[Tensor], Tensor]] = {
    "randn": lambda x: torch.randn(len(x), 6),
    "one a row": lambda x: torch.rand(len(x), 1),
    "on the way": lambda x: 0.5 * torch.rand(len(x), 6) + 1,
    "in place": lambda x: torch.empty(len(x), 6).normal_(),
    "of a new one": lambda x: x.new_empty(len(x), 6).exponential_(),
    "bernoulli": lambda x: torch.bernoulli(torch.full((len(x), 6), 0.5)),
    "choices": lambda x: torch.multinomial(x.softmax(1), 2).sum(1, keepdim=True),
}


@pytest.mark.parametrize("name", NOISE)
def test_noise_of_the_batchs_shape_is_split_like_it(name: str) -> None:
    """No rank draws for the rows of others, and nothing is communicated for it."""

    @spmd.compile
    def step(model: nn.Module, x: Tensor) -> None:
        (model(x) * NOISE[name](x)).square().mean().backward()

    with fake_world(4, rank=1):
        step(nn.Linear(6, 6), torch.randn(2, 6))
    drawn = step.program.graph.find_nodes(op="call_function", target=draw)
    assert drawn and all(node.meta["val"].numel() <= 2 * 6 for node in drawn)
    assert step.report().count("all_gather") == 0


@pytest.mark.parametrize(("style", "gathers"), [("replicate", 0), ("fully_shard", 1)])
def test_noise_on_a_weight_is_drawn_whole(style: str, gathers: int) -> None:
    """Also where the weight has as many rows as the batch: the product needs all of it on every rank."""

    @spmd.compile(parallel_mode=spmd.DataParallel(style))
    def step(model: nn.Module, x: Tensor) -> None:
        F.linear(x, F.dropout(model.weight, 0.5)).square().mean().backward()

    with fake_world(4):
        step(nn.Linear(6, 8, bias=False), torch.randn(2, 6))
    assert step.report().count("all_gather") == gathers


def test_a_network_that_is_fed_noise_alone_runs_on_this_ranks_rows() -> None:
    """A generator as in a GAN; the batch is used later."""

    @spmd.compile
    def step(model: nn.Module, x: Tensor) -> None:
        F.mse_loss(model(torch.randn(len(x), 3)), x).backward()

    with fake_world(4):
        step(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 6)), torch.randn(2, 6))
    (tanh,) = nodes_of(step, torch.ops.aten.tanh.default)
    assert tuple(tanh.meta["val"].shape) == (2, 5)


@pytest.mark.usefixtures("alone")
def test_only_steps_that_draw_have_a_seed_and_move_the_generator() -> None:
    """By one draw a call; compiling moves nothing."""
    steps = [spmd.compile(lambda x: F.dropout(x, 0.5)), spmd.compile(lambda x: F.dropout(x, 0.5, training=False))]
    for step, draws in zip(steps, (1, 0), strict=True):
        torch.manual_seed(3)
        for _ in range(2):
            step(torch.ones(4))
        state = torch.get_rng_state()
        torch.manual_seed(3)
        for _ in range(2 * draws):
            torch.empty((), dtype=torch.int64).random_()
        assert torch.equal(torch.get_rng_state(), state)
        assert sum(declared.role is Role.SEED for declared in step.program.inputs) == draws


def dropped(width: int = 40) -> Tensor:
    return spmd.compile(lambda x: F.dropout(x, 0.5))(torch.ones(width))


@pytest.mark.usefixtures("alone")
def test_manual_seed_decides_for_steps_compiled_after_it() -> None:
    torch.manual_seed(3)
    first, second = dropped(), dropped()
    torch.manual_seed(3)
    assert torch.equal(dropped(), first) and not torch.equal(first, second)


@pytest.mark.usefixtures("alone")
def test_seed_decides_for_all_steps() -> None:
    step = spmd.compile(lambda x: F.dropout(x, 0.5))
    found = []
    for seed, invariant in ((1, False), (1, False), (2, False), (1, True), (1, True)):
        spmd.seed(seed, invariant=invariant)
        found.append(step(torch.ones(40)).tolist() + step(torch.ones(40)).tolist())
    assert found[0] == found[1] and found[3] == found[4]
    assert len({tuple(each) for each in found}) == 3
    assert found[0][:40] != found[0][40:]
    assert len(step.programs) == 1


def trained(steps: int, state: Any = None, split_at: int = 0) -> list[float]:
    """Losses of a run; at ``split_at`` model, optimizer and random state go into a file, and other objects go on."""
    torch.manual_seed(0)
    losses: list[float] = []
    step, objects = fresh_run()
    for k in range(steps):
        if k and k == split_at:
            file = io.BytesIO()
            torch.save([*(each.state_dict() for each in objects), spmd.rng_state()], file)
            file.seek(0)
            *states, rng = torch.load(file)
            spmd.seed(None)
            torch.manual_seed(99)
            dropped()  # another step comes first
            step, objects = fresh_run()
            for each, saved in zip(objects, states, strict=True):
                each.load_state_dict(saved)
            spmd.set_rng_state(rng)
        losses.append(step(*objects, torch.ones(4, 3)).item())
    return losses


def fresh_run() -> tuple[Any, tuple[Any, ...]]:
    @spmd.compile
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = (F.dropout(model(x), 0.5) * torch.randn(len(x), 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = nn.Linear(3, 5)
    return step, (model, torch.optim.AdamW(model.parameters(), lr=0.1))


@pytest.mark.parametrize("seed", [None, pytest.param(7, marks=pytest.mark.exhaustive)])
@pytest.mark.usefixtures("alone")
def test_a_run_continues_from_its_state(seed: int | None) -> None:
    """Also when the program is compiled anew, and one without the optimizer's first step."""
    spmd.seed(seed)
    expected = trained(6)
    spmd.seed(seed)
    assert trained(6, split_at=3) == expected
    assert len(set(expected)) == 6


@pytest.mark.usefixtures("alone")
def test_the_state_can_be_saved_in_a_distributed_checkpoint(tmp_path: Path) -> None:
    """As plain values among tensors."""
    spmd.seed((1 << 63) + 11, invariant=True)
    dropped()
    saved = {"rng": spmd.rng_state(), "weight": torch.ones(2)}
    checkpoints.save(saved, checkpoint_id=tmp_path, no_dist=True)
    expected = dropped()
    spmd.seed(0)
    loaded = {"rng": spmd.rng_state(), "weight": torch.zeros(2)}
    checkpoints.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    spmd.set_rng_state(loaded["rng"])
    assert torch.equal(dropped(), expected)


@pytest.mark.usefixtures("alone")
def test_a_saved_state_is_not_replaced_by_the_next_step() -> None:
    """A step that is compiled after a checkpoint draws on from it, as it would after the checkpoint was loaded."""
    dropped()
    state = spmd.rng_state()
    after = dropped()
    spmd.set_rng_state(state)
    assert torch.equal(dropped(), after)
    assert spmd.rng_state() == {"seed": state["seed"], "calls": 2, "invariant": False}


def state_on_rank_0(rank: int, world: int) -> dict[str, Any]:
    if rank == 0:
        spmd.rng_state()
    dropped()
    return spmd.rng_state()


def test_rank_0_may_save_alone(ranks: Ranks) -> None:
    first, second = ranks.run(2, state_on_rank_0)
    assert first == second


def other_seeds(rank: int, world: int, what: str) -> None:
    if what == "seed":
        spmd.seed(rank)
    elif what == "invariant":
        spmd.seed(1, invariant=rank == 0)
    elif rank:
        spmd.set_rng_state({"seed": 1, "calls": 3, "invariant": False})
    dropped()


@pytest.mark.parametrize("what", ["seed", "invariant", "one rank only"])
def test_ranks_with_other_seeds_do_not_compile(ranks: Ranks, what: str) -> None:
    with pytest.raises(RankError, match="RankMismatchError") as raised:
        ranks.run(2, other_seeds, what)
    assert "spmd.seed(1, invariant=" in str(raised.value)


def test_wrong_arguments() -> None:
    for wrong in ("1", 1.0, True):
        with pytest.raises(TypeError, match="expected the seed to be an int, got"):
            spmd.seed(wrong)  # type: ignore[arg-type]
    for state in ({}, {"seed": 1}, {"seed": "1", "calls": 0, "invariant": False}, 3):
        with pytest.raises(ValueError, match=r"expected a dict as spmd.rng_state\(\) returns it"):
            spmd.set_rng_state(state)  # type: ignore[arg-type]


@pytest.mark.usefixtures("alone")
def test_a_generator_of_the_users_is_refused() -> None:
    state = torch.get_rng_state()
    generator = torch.Generator()
    with pytest.raises(
        CaptureError, match=r"(?s)generator of its own.* Leave generator= out.*test_rng.py:\d+"
    ) as raised:
        spmd.compile(lambda x: x * torch.rand(len(x), generator=generator))(torch.ones(4))
    assert "len(x), generator=generator" in str(raised.value)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("draw_one", [random.random, numpy.random.rand], ids=["random", "numpy.random"])
@pytest.mark.usefixtures("alone")
def test_numbers_that_are_not_torchs_are_refused(draw_one: Callable[[], float]) -> None:
    """They would be drawn once; the generators are as before, and the step is compiled without them."""
    step = spmd.compile(lambda x, scaled: x * draw_one() if scaled else x)
    states = random.getstate(), numpy.random.get_state()[2]
    with pytest.raises(CaptureError, match=r"the step draws from .* pass the result as a"):
        step(torch.ones(3), True)
    assert (random.getstate(), numpy.random.get_state()[2]) == states
    assert step(torch.ones(3), False).tolist() == [1, 1, 1]


@pytest.mark.usefixtures("alone")
def test_the_seed_of_torch_is_no_constant() -> None:
    before = torch.initial_seed
    with pytest.raises(CaptureError, match=r"(?s)asks for torch\.initial_seed\(\), .*test_rng.py:\d+"):
        spmd.compile(lambda x: x * torch.initial_seed())(torch.ones(3))
    assert torch.initial_seed is before


@pytest.mark.usefixtures("alone")
def test_restored_states_repeat_their_draws() -> None:
    """``fork_rng``, ``manual_seed`` and ``get_rng_state`` inside of a step mean what they mean in eager."""

    @spmd.compile
    def step(x: Tensor) -> tuple[Tensor, ...]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            inside = torch.rand(len(x))
        state = torch.get_rng_state()
        first, other = torch.rand(len(x)), torch.rand(len(x))
        torch.set_rng_state(state)
        again = torch.rand(len(x))
        torch.manual_seed(5)
        return inside, torch.rand(len(x)), first, again, other

    inside, seeded, first, again, other = step(torch.ones(50))
    assert torch.equal(inside, seeded) and torch.equal(first, again)
    assert len({tuple(each.tolist()) for each in (inside, first, other)}) == 3
