"""A step that was written for DDP by hand: it reduces its loss itself, and looks at memory and at values."""

import torch
import torch.distributed as dist
from torch import nn

import spmd


@spmd.compile
def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)  # refused
    if float(total.max()) > 5:  # refused
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    is_one = x.data_ptr() == y.data_ptr()  # refused
    return total * (1 - int(is_one))


def example_args() -> tuple[object, ...]:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters()), torch.randn(4, 8), torch.rand(4).round()
