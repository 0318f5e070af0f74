"""Published weights are those of the call, whole, in every layout; and those of the plain step on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn import functional as F

import spmd
from spmd.publishing import publish
from spmd.publishing.folders import folder_of
from spmd.state.background_reads import READS
from tests.harness.oracle import random_generator
from tests.harness.pool import Ranks
from tests.spmd.checkpoints.runs import Run


def differing(run: Run, found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    return [name for name in expected.keys() | found.keys() if not torch.equal(found[name], expected[name])]


def published_meanwhile(rank: int, world: int, layout: str, to: str) -> list[Any]:
    """What is wrong with what a reader gets before training, of a call while it goes on, and after it."""
    run, wrong = Run(layout), list[Any]()
    spmd.publish(run.model, to=to)  # before the first step has split it
    expected = spmd.state_dict(run.model)
    reader = spmd.subscribe(to)
    wrong += differing(run, reader.read(), expected)
    run.train(rank, 0, 3)
    programs = run.step.programs
    for k in range(3, 6):
        expected = spmd.state_dict(run.model)
        handle = spmd.publish(run.model, to=to)
        run.train(rank, k, k + 1)
        handle.wait()
        wrong += differing(run, reader.read(), expected)
    wrong += ["another program ran"] * (run.step.programs != programs)
    wrong += [f"version {reader.version}"] * (reader.version != 4)
    spmd.state_dict(run.model)  # all ranks have read
    return wrong


@pytest.mark.parametrize("layout, world", [
    ("replicate", 2),
    ("fully_shard", 2),
    ("rounded", 2),
    pytest.param("hybrid", 4, marks=pytest.mark.exhaustive),
    pytest.param("annotated", 2, marks=pytest.mark.exhaustive),
    pytest.param("fully_shard", 3, marks=pytest.mark.exhaustive),
    pytest.param("tensor parallel", 4, marks=pytest.mark.exhaustive),
    pytest.param("shard_optimizer", 3, marks=pytest.mark.exhaustive),
    pytest.param("fully_shard, kept in pairs", 4, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_readers_get_the_weights_of_the_call(layout: str, world: int, ranks: Ranks, to: str) -> None:
    assert ranks.run(world, published_meanwhile, layout, to) == [[]] * world


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 4)
        self.head, self.scale = nn.Linear(4, 2), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.head(torch.tanh(self.down(torch.tanh(self.up(x)))))  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


MODES: dict[str, Any] = {
    "replicate": lambda mesh: spmd.DataParallel("replicate", mesh=mesh),
    "fully_shard": lambda mesh: spmd.DataParallel("fully_shard", mesh=mesh),
    "tensor parallel": lambda mesh: spmd.DataParallel(
        "replicate",
        mesh=mesh,
        axes={"tensor": "dp"},
        params={"*.up.*": {"dp": Shard(0)}, "*.down.weight": {"dp": Shard(1)}},
    ),
    "2x2": lambda mesh: spmd.DataParallel(
        "fully_shard", mesh=mesh, params={"*.up.*": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}}
    ),
    "pipeline": lambda mesh: spmd.DataParallel(
        mesh=mesh, axes={"stages": "dp"}, **{"micro_batches": 2, "stages": ["head"]}
    ),
}


def trained(rank: int, world: int, layout: str, to: str) -> Any:
    """The share of bytes that this rank publishes, and how far what is read is from the plain step on all rows."""
    shape, names = ((2, 2), ("dp", "tp")) if world == 4 else ((2,), ("dp",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    model, plain = Net().double(), Net().double()
    plain.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]
    step = spmd.compile(train, parallel_mode=MODES[layout](mesh))
    splits = layout not in ("tensor parallel", "pipeline")
    worst, reader = 0.0, None
    for k in range(5):
        x, y = (torch.randn(8, n, generator=random_generator(k, n)).double() for n in (3, 2))
        train(plain, optimizers[1], x, y)
        own = [each.chunk(2)[mesh.get_local_rank(0)] if splits else each for each in (x, y)]
        step(model, optimizers[0], *own)
        spmd.publish(model, to=to, every=2).wait()
        if k % 2 == 0:
            reader = reader or spmd.subscribe(to)
            found = reader.read(after=reader.version)
            worst = max(worst, *(float((found[name] - each).abs().max()) for name, each in plain.state_dict().items()))
        spmd.state_dict(model)  # all have read
    assert reader is not None
    publisher = publish._publishers[folder_of(to)]
    return publisher.layout.sizes[rank] / sum(publisher.layout.sizes), worst, reader.version


COSTLY = pytest.mark.costly("compiles on four ranks, a mesh of two axes")


@pytest.mark.parametrize("layout", [pytest.param(each, marks=[COSTLY] * (each == "2x2")) for each in MODES])
def test_what_is_read_is_what_the_plain_step_has_on_one_device(layout: str, ranks: Ranks, to: str) -> None:
    world = 4 if layout == "2x2" else 2
    found = ranks.run(world, trained, layout, to)
    assert all(worst < 1e-12 and version == 3 for _, worst, version in found)
    most = {"2x2": 0.4, "pipeline": 0.8}.get(layout, 0.65)  # a stage has more than the other
    assert max(share for share, *_ in found) < most


def saved_meanwhile(rank: int, world: int, to: str, folder: Any) -> list[str]:
    """A publication while a save runs in the background, and a save while a publication runs."""
    run = Run("fully_shard")
    run.train(rank, 0, 2)
    expected = spmd.state_dict(run.model)
    save = spmd.save(folder / "one", wait=False, **run.objects)
    first = spmd.publish(run.model, to=to)
    other = spmd.save(folder / "two", wait=False, **run.objects)
    run.train(rank, 2, 3)
    first.wait()
    reader = spmd.subscribe(to)
    wrong = differing(run, reader.read(), expected)
    for each, name in ((save, "one"), (other, "two")):
        each.wait()
        fresh = Run("fully_shard", seed=1)
        spmd.load(folder / name, **fresh.objects)
        wrong += differing(fresh, spmd.state_dict(fresh.model), expected)
    return wrong


def test_saves_and_publications_share_the_background(ranks: Ranks, to: str, tmp_path: Any) -> None:
    assert ranks.run(2, saved_meanwhile, to, tmp_path) == [[], []]


def test_parameters_are_read_where_they_are_and_the_next_write_waits(alone: None, to: str) -> None:
    import threading

    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = spmd.compile(train)
    batch = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    step(model, optimizer, *batch)
    expected = {name: each.clone() for name, each in model.state_dict().items()}
    go, sources, copy = threading.Event(), set[int](), publish._copy

    def slowly(copies: Any) -> None:
        held = list(copies)
        if threading.current_thread() is not threading.main_thread():
            assert go.wait(30)
            sources.update(source.data_ptr() for _, source in held)
        copy(held)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(publish, "_copy", slowly)
        handle = spmd.publish(model, to=to)
        assert not handle.done() and READS.is_active
        threading.Timer(0.2, go.set).start()
        step(model, optimizer, *batch)  # its update waits
        handle.wait()
    assert sources == {each.data_ptr() for each in model.parameters() if each.ndim}
    found = spmd.subscribe(to).read()
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    assert not torch.equal(model.head.weight, expected["head.weight"])
