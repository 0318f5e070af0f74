"""Training runs for the tests of checkpoints: a small model in every layout, and its state as plain values."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

import spmd
from tests.harness.oracle import random_generator


class Net(nn.Module):
    """Tied weights, a batch norm, dropout, and sizes that leave some ranks a smaller or an empty part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.norm = nn.BatchNorm1d(7)
        self.up, self.down = nn.Linear(7, 3), nn.Linear(3, 7, bias=False)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embed(x))
        h = h + F.dropout(self.down(torch.tanh(self.up(h))), 0.3, self.training)
        return self.head(h)  # type: ignore[no-any-return]


def train_step(model: nn.Module, optimizers: list[torch.optim.Optimizer], x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss


def part(rank: int, k: int) -> tuple[Tensor, Tensor]:
    random = random_generator(rank, k)
    return torch.randint(11, (6,), generator=random), torch.randint(11, (6,), generator=random)


def make_optimizers(kind: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    match kind:
        case "SGD":
            return [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)]
        case "Adafactor":
            return [torch.optim.Adafactor(model.parameters(), lr=0.05)]
        case "Muon":
            return [torch.optim.Muon(matrices, lr=0.05), torch.optim.Adam(others, lr=0.01)]
    return [torch.optim.Adam([{"params": matrices}, {"params": others, "lr": 0.02}], lr=0.01)]


def annotate(model: Net) -> None:
    spmd.fully_shard([model.up, model.down])
    spmd.fully_shard(model.head, reshard_after_forward=False)
    spmd.replicate(model.norm)


TENSOR_PARALLEL = {
    "*.up.weight": {"tp": Shard(0)},
    "*.up.bias": {"tp": Shard(0)},
    "*.down.weight": {"tp": Shard(1)},
    "*": {"tp": Replicate()},
}
LAYOUTS = (
    "replicate", "shard_optimizer", "fully_shard", "fully_shard, kept", "fully_shard, regathered",
    "fully_shard, kept in pairs", "hybrid", "tensor parallel", "annotated",
)  # fmt: skip
PLAIN = ("plain", 1)  # torch without a process group
# A layout and a number of ranks. Each layout is among those of every run, and each number of ranks.
USUAL = (
    PLAIN,
    ("replicate", 2),
    ("fully_shard", 3),
    ("shard_optimizer", 3),
    ("annotated", 2),
    ("fully_shard, kept", 4),
    ("fully_shard, kept in pairs", 4),
    ("fully_shard, regathered", 1),
    ("hybrid", 4),
    ("tensor parallel", 4),
)
ALL = (PLAIN, *((layout, world) for layout in LAYOUTS for world in (1, 2, 3, 4)))


def mesh_shape(layout: str, world: int) -> tuple[int, int]:
    """Of a layout on two axes. With tensor parallelism over three ranks each has a row, over two the parts differ."""
    if layout == "tensor parallel":
        return {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2)}[world]
    return {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2)}[world]


def mode(layout: str, world: int) -> spmd.DataParallel | None:
    match layout.split(",")[0]:
        case "hybrid":
            mesh = init_device_mesh("cpu", mesh_shape(layout, world), mesh_dim_names=("replicate", "shard"))
            return spmd.DataParallel("fully_shard", mesh=mesh)
        case "tensor parallel":
            mesh = init_device_mesh("cpu", mesh_shape(layout, world), mesh_dim_names=("dp", "tp"))
            return spmd.DataParallel("fully_shard", mesh=mesh, params=TENSOR_PARALLEL)
        case "shard_optimizer":
            return spmd.DataParallel("replicate", shard_optimizer=True)
        case "rounded":
            return spmd.DataParallel("replicate", shard_optimizer=True, gather_dtype=torch.bfloat16)
        case "fully_shard":
            reshard = {"kept": False, "kept in pairs": 2, "regathered": True}.get(layout.partition(", ")[2])
            return spmd.DataParallel("fully_shard", reshard_after_forward=reshard)
        case "annotated":
            return None
    return spmd.DataParallel("replicate")


class Run:
    """One training run on one rank. ``step`` is None where nothing is compiled."""

    def __init__(self, layout: str, optimizer: str = "SGD", seed: int = 0, *, on_meta: bool = False) -> None:
        self.layout, self.world = layout, dist.get_world_size() if dist.is_initialized() else 1
        torch.manual_seed(seed)
        with torch.device("meta" if on_meta and layout != "plain" else "cpu"):
            self.model = Net().double()
        if layout == "annotated":
            annotate(self.model)
        if on_meta and layout != "plain":
            spmd.materialize(self.model, mode(layout, self.world))
        self.optimizers = make_optimizers(optimizer, self.model)
        self.step: Any = train_step
        if layout != "plain":
            self.step = spmd.compile(train_step, parallel_mode=mode(layout, self.world))

    def update(self) -> None:
        """One eager update, which makes optimizer state, where the layout is there without a compiled step."""
        for parameter in self.model.parameters():
            parameter.grad = parameter.detach() * 0.3
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def train(self, rank: int, start: int, stop: int) -> list[Tensor]:
        same = mesh_shape(self.layout, self.world)[1] if self.layout == "tensor parallel" else 1
        row = rank // same  # ranks along "tp" have the same rows
        return [self.step(self.model, self.optimizers, *part(row, k)) for k in range(start, stop)]

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model} | {f"optimizer{k}": each for k, each in enumerate(self.optimizers)}

    def state(self) -> dict[str, Any]:
        """All state by name, whole and as plain tensors."""
        found = {f"model.{name}": whole(value) for name, value in self.model.state_dict().items()}
        if self.layout == "rounded":
            found |= {f"exact.{name}": value for name, value in spmd.state_dict(self.model).items()}
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for k, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                hypers = {key: value for key, value in group.items() if key != "params"}
                found |= {f"optimizer{k}.group.{names[id(p)]}": hypers for p in group["params"]}
            for parameter, entries in optimizer.state.items():
                found |= {f"optimizer{k}.{names[id(parameter)]}.{key}": whole(each) for key, each in entries.items()}
        return found


def whole(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def unequal(expected: dict[str, Any], got: dict[str, Any]) -> list[str]:
    """The names whose values are not the same, bit by bit."""

    def same(one: Any, other: Any) -> bool:
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            return bool(one == other)
        return one.dtype == other.dtype and torch.equal(one, other)

    wrong = [name for name in expected.keys() & got.keys() if not same(expected[name], got[name])]
    return sorted(wrong + list(expected.keys() ^ got.keys()))
