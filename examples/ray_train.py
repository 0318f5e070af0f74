"""A compiled step in workers of Ray Train, which has made the process group that ``spmd`` joins.

    python examples/ray_train.py --workers 2

It fits a small network to a sine, and reports the loss of all workers' rows.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.nn.functional as F
from ray.train.torch import TorchConfig, TorchTrainer
from torch import Tensor, nn

import spmd


def train(settings: dict[str, Any]) -> None:
    """The loop of each worker: it passes its own rows of each batch."""
    context = ray.train.get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    @spmd.compile(parallel_mode="fully_shard")
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), torch.sin(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    random = torch.Generator().manual_seed(0)
    for _ in range(settings["steps"]):
        x = torch.rand(64, 1, generator=random, dtype=torch.float64) * 6 - 3
        loss = step(model, optimizer, x.tensor_split(ranks)[rank])
    checkpoint = Path(settings["folder"])
    spmd.save(checkpoint, model=model, optimizer=optimizer)  # on all workers, to a folder that all of them see
    ray.train.report({"loss": float(loss)})
    if rank == 0:
        (checkpoint / "loss").write_text(f"{float(loss):.12f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "ray_train")
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    ray.init(num_cpus=None if has_gpu else options.workers, include_dashboard=False)
    TorchTrainer(
        train,
        train_loop_config={"steps": options.steps, "folder": str(options.folder / "checkpoint")},
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers, use_gpu=has_gpu),
        torch_config=TorchConfig(backend="nccl" if has_gpu else "gloo"),
        run_config=ray.train.RunConfig(storage_path=str(options.folder)),
    ).fit()
    print(f"after {options.steps} steps: loss {(options.folder / 'checkpoint' / 'loss').read_text()}")
