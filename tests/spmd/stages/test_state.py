"""State of pipelines outside of steps: checkpoints into other layouts and from them, exports, whole gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn import functional as F

import spmd
from spmd._torch import dtensor_over
from spmd.placements import OnStage
from tests.harness.fake import fake_world
from tests.harness.oracle import snapshot, unequal
from tests.harness.pool import Ranks


def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """Leaves gradients to the next call."""
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def goes_anywhere(rank: int, world: int, folder: Path) -> list[str]:
    """What differs from the plain step, by way of two cuts of a pipeline, one model whole, and one fully sharded."""
    mesh, lines = init_device_mesh("cpu", (world,), mesh_dim_names=("pp",)), list[str]()
    pipelines = [
        spmd.compile(train, parallel_mode=spmd.DataParallel(mesh=mesh, axes={"stages": "pp"}, **options))
        for options in ({"micro_batches": 2, "stages": ["2"]}, {"micro_batches": 4, "stages": ["3"]})
    ]
    sharded = spmd.compile(train, parallel_mode=spmd.DataParallel("fully_shard", mesh=mesh, axes={"batch": "pp"}))
    torch.manual_seed(0)
    plain, one, other, whole, split = (build() for _ in range(5))
    for each in (one, other, whole, split):
        each[0].load_state_dict(plain[0].state_dict())
    batches = [(torch.randn(8, 3).double(), torch.randn(8, 2).double()) for _ in range(4)]

    def compare(where: str, objects: Any) -> None:
        seen = (snapshot(None, each) for each in (plain, objects))
        expected, got = ({k: v for k, v in each.items() if not k.endswith(".grad")} for each in seen)
        lines.extend(f"{where}: {line}" for line in unequal(expected, got, rank, world))

    train(*plain, *batches[0])
    pipelines[0](*one, *batches[0])
    pipelines[1](*other, *batches[3])
    spmd.save(folder / "one", model=one[0], optimizer=one[1])
    spmd.save(folder / "background", model=one[0], optimizer=one[1], wait=False).wait()
    spmd.export(folder / "export", one[0])
    spmd.load(folder / "one", model=whole[0], optimizer=whole[1])
    compare("in a whole model", whole)
    spmd.load(folder / "background", model=other[0], optimizer=other[1])
    compare("in other stages", other)
    exported = build()
    spmd.load(folder / "export", model=exported[0])
    lines += [n for n, p in exported[0].state_dict().items() if not torch.equal(p, whole[0].state_dict()[n])]
    spmd.load(folder / "one", model=split[0], optimizer=split[1])
    train(*plain, *batches[1])
    pipelines[1](*other, *batches[1])
    compare("behind a load", other)
    sharded(*split, *(each.chunk(world)[rank] for each in batches[1]))
    compare("fully sharded", split)
    spmd.save(folder / "split", model=split[0], optimizer=split[1])
    spmd.load(folder / "split", model=one[0], optimizer=one[1])
    train(*plain, *batches[2])
    pipelines[0](*one, *batches[2])
    compare("back in stages", one)
    with spmd.unshard(one[0], with_grads=True):
        pairs = zip(plain[0].parameters(), one[0].parameters(), strict=True)
        lines += [str(p.grad) for p, q in pairs if not torch.allclose(p.grad, q.grad, 1e-9, 1e-12)]  # type: ignore[arg-type]
        for p in one[0].parameters():
            p.grad.mul_(2)  # type: ignore[union-attr]
    for p, q in zip(plain[0].parameters(), one[0].parameters(), strict=True):
        if not torch.allclose(2 * p.grad, q.grad.full_tensor(), 1e-9, 1e-12):  # type: ignore[union-attr, operator]
            lines.append(f"written back: {q.grad}")
    for p, q in zip(plain[0].parameters(), one[0].parameters(), strict=True):
        for each in (p.data, q.data):
            torch.manual_seed(0)
            each.normal_().mul_(2).add_(torch.ones(each.shape))[0].zero_()
            each.view(-1)[1:].add_(torch.rand_like(each).view(-1)[1:])
            each[1:2] = each[:1] + 1
        if not torch.equal(p, q.full_tensor()):  # type: ignore[operator]
            lines.append(f"written and drawn: {q}")
    return lines


def test_what_a_stage_keeps_is_not_taken_for_a_shard() -> None:
    """torch remembers what an op of DTensors returns by specs that are equal, not by their hashes alone."""
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        kept, split = (
            dtensor_over(torch.ones(1, 3), mesh, [each], (2, 3), (3, 1)) for each in (OnStage({1}), Shard(0))
        )
        assert kept._spec != split._spec
        assert split._spec != kept._spec
        assert kept.detach().placements == (OnStage({1}),)
        assert [type(each) for each in split.detach().placements] == [Shard]


def test_state_goes_into_any_layout_and_back(ranks: Ranks, tmp_path: Path) -> None:
    for lines in ranks.run(2, goes_anywhere, tmp_path):
        assert not lines, "\n".join(lines[:20])
