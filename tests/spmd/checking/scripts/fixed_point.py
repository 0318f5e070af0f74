"""A layer that iterates to a fixed point, numpy's noise, and a scheduler that looks at the loss."""

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import spmd


class Equilibrium(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, change = x, torch.tensor(1.0)
        while float(change) > 1e-3:  # refused
            new = torch.tanh(self.inner(state) + x)
            state, change = new, (new - state).abs().max()
        return self.head(state)


@spmd.compile
def train_step(
    model: Equilibrium, optimizer: torch.optim.Optimizer, scheduler: ReduceLROnPlateau, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    x = x + np.random.normal(0.0, 0.1)  # refused
    loss = nn.functional.l1_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step(loss.detach())  # refused
    return loss


def example_args() -> tuple[object, ...]:
    model = Equilibrium()
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, ReduceLROnPlateau(optimizer), torch.randn(4, 8), torch.randn(4, 1)
