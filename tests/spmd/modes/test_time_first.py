"""Tensors of time x rows: ``sequence_dim=0`` splits their sequences, beside the plain step and as rows x time does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import spmd
from tests.harness.fake import fake_world
from tests.harness.oracle import all_unequal, snapshot
from tests.harness.pool import Ranks

pytestmark = pytest.mark.skipif(
    torch.__version__.startswith("2.11"), reason="its fake kernel of attention in float64 gives log-sum-exps in float32"
)
VOCABULARY, WIDTH, HEADS = 13, 16, 4
TIME_FIRST: dict[str, Any] = {"input_batch_dim": 1, "sequence_dim": 0}
BOTH = {"batch": "dp", "sequence": "cp"}


class Torchs(nn.Module):
    """The module of torch, as it is by default: time first, and a mask given as a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(x), dtype=x.dtype)
        seen: Tensor = self.attention(x, x, x, need_weights=False, attn_mask=mask, is_causal=True)[0]
        return seen


class Own(nn.Module):
    """Attention that is causal by its option, of time x rows or of rows x time."""

    def __init__(self, time: int = 0) -> None:
        super().__init__()
        self.time = time
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, back = ((1, 2, 0, 3), (2, 0, 1, 3)) if self.time == 0 else ((0, 2, 1, 3), (0, 2, 1, 3))
        query, key, value = (each.unflatten(-1, (HEADS, -1)).permute(*rows) for each in self.qkv(x).chunk(3, -1))
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(seen.permute(*back).flatten(2))  # type: ignore[no-any-return]


class Scanned(nn.Module):
    """A scan along time, which takes all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0]  # type: ignore[no-any-return]


class Net(nn.Module):
    """Tokens of time x rows, with a position of each time."""

    def __init__(self, inner: nn.Module, time: int = 0) -> None:
        super().__init__()
        self.time = time
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.norm, self.inner, self.head = nn.LayerNorm(WIDTH), inner, nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        positions = self.positions(torch.arange(x.shape[self.time]))
        h = self.embed(x) + (positions[:, None] if self.time == 0 else positions)
        return self.head(h + self.inner(self.norm(h)))  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: Any, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = model(x)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss, logits


def objects(inner: type[nn.Module]) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Net(inner()).double()
    model.positions.weight.requires_grad_(False)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def tokens(time: int, rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x, labels = (torch.randint(VOCABULARY, (time, rows), generator=draw) for _ in range(2))
    return x, labels


CP = {"cp": 2}
DP_CP = {"dp": 2, "cp": 2}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("inner", "mesh", "sizes", "passes", "mode"),
    [
        (Torchs, DP_CP, (8, 4), (), {"micro_batches": 2}),
        (Torchs, CP, (7, 3), (), {}),
        (Own, DP_CP, (8, 4), (), {"parallel_style": "fully_shard", "attention": "ring"}),
        (Own, CP, (8, 3), (), {"attention": "heads"}),
        (Scanned, CP, (8, 4), (), {}),
        pytest.param(Scanned, DP_CP, (8, 4), None, {}, marks=pytest.mark.exhaustive),
    ],
)
def test_numbers(
    inner: type[nn.Module], mesh: dict[str, int], sizes: tuple[int, int], passes: Any, mode: dict[str, Any]
) -> None:
    axes = BOTH if "dp" in mesh else {"sequence": "cp"}
    step = spmd.compile(train, parallel_mode=spmd.DataParallel(axes=axes, **TIME_FIRST, **mode), passes=passes)
    world = torch.Size(mesh.values()).numel()
    found = spmd.verify(step, *objects(inner), *tokens(*sizes), mesh=mesh, world=world, steps=1)
    assert found, found


def of_ranks(rank: int, world: int) -> list[str]:
    """What differs on two ranks that split sequences: five steps, of which one has shorter ones, and evaluation."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    mode = spmd.DataParallel("fully_shard", mesh=mesh, axes={"sequence": "cp"}, **TIME_FIRST)
    compiled, found = spmd.compile(train, parallel_mode=mode), []
    evaluated = spmd.compile(lambda model, x: model(x), parallel_mode=mode)
    for step, evaluate in ((train, lambda model, x: model(x)), (compiled, evaluated)):
        model, optimizer = objects(Torchs)
        seen = []
        for k in range(5):
            x, labels = tokens(6 if k == 3 else 8, 3, seed=k)
            seen.append(snapshot(step(model, optimizer, x, labels), (model, optimizer) if k == 4 else ()))
        with torch.no_grad():
            seen.append(snapshot(evaluate(model, tokens(8, 3, seed=9)[0]), ()))
        found.append(seen)
    return all_unequal(found[0], found[1], 0, 1, 1e-9)


def test_numbers_of_ranks(ranks: Ranks) -> None:
    assert ranks.run(2, of_ranks) == [[], []]


def test_it_communicates_as_rows_first_does() -> None:
    """Positions, products, loss and attention follow the parts of time, also mirrored ones."""
    found = []
    for time in (0, 1):
        with fake_world(4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
            options = TIME_FIRST if time == 0 else {}
            step = spmd.compile(train, parallel_mode=spmd.DataParallel(mesh=mesh, axes=BOTH, **options))
            model = Net(Own(time), time)
            x = tokens(8, 4)[0] if time == 0 else tokens(4, 8)[0]
            step(model, torch.optim.SGD(model.parameters(), lr=0.1), x, x)
        report = step.report()
        kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        found.append([(report.count(kind), report.bytes(kind)) for kind in kinds])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"axes": BOTH, "input_batch_dim": 1}, ValueError, "of time x rows input_batch_dim=1 and sequence_dim=0"),
        ({"axes": BOTH, "sequence_dim": 0}, ValueError, "dims of rows and of sequences to differ"),
        (
            {"axes": {"sequence": "cp"}, "sequence_dim": 0, "micro_batches": 2},
            ValueError,
            "input_batch_dim=0 and sequence_dim=0",
        ),
        ({"sequence_dim": 0}, ValueError, "without an axis that splits sequences"),
        ({"axes": BOTH, "sequence_dim": -1}, ValueError, "to count from the front"),
        ({"axes": BOTH, "sequence_dim": True}, TypeError, "expected sequence_dim to be an int, got True"),
    ],
)
def test_dims_that_cannot_be(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        spmd.DataParallel(**options)


@pytest.mark.usefixtures("alone")
def test_one_sequence_without_rows() -> None:
    """Documents in one row: all ranks pass all of it, and nothing divides rows."""

    def of_one(model: nn.Module, optimizer: Any, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return train(model, optimizer, x[:, None], labels[:, None])

    mode = spmd.DataParallel(axes={"sequence": "cp"}, sequence_dim=0)
    x, labels = (each[:, 0] for each in tokens(8, 1))
    assert "sequence_dim=0" in repr(mode)
    step = spmd.compile(of_one, parallel_mode=mode, passes=())
    found = spmd.verify(step, *objects(Own), x, labels, mesh=CP, world=2, steps=1)
    assert found, found
