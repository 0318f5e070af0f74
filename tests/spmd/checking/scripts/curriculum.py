"""A curriculum: a table of numpy that the step writes, a generator of its own, and dropout by a learned gate."""

import numpy as np
import torch
from torch import nn

import spmd

seen = np.zeros(4)
noise = torch.Generator().manual_seed(0)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.body(x))
        if float(self.gate(h).mean()) > 0:  # refused
            h = nn.functional.dropout(h, 0.1)
        return h


@spmd.compile
def train_step(model: Gated, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    seen[0] += len(x)  # refused
    x = x + torch.randn(x.shape, generator=noise)  # refused
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def example_args() -> tuple[object, ...]:
    model = Gated()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.randn(8, 8)
