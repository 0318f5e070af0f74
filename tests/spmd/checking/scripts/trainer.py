"""A trainer whose step is a method: it keeps all losses, replaces a weight, and stops at full accuracy."""

import torch
from torch import nn

import spmd


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.losses: list[torch.Tensor] = []
        self.done = False

    @spmd.compile
    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.model(x)
        loss = nn.functional.cross_entropy(logits, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())  # refused
        mean = torch.stack(self.losses).mean()
        if int((logits.argmax(1) == y).sum()) == len(y):  # refused
            self.done = True
        self.model[0].bias = nn.Parameter(self.model[0].bias.clamp(-1, 1))  # refused
        return mean


trainer = Trainer()


def example_args() -> tuple[object, ...]:
    return torch.randn(6, 8), torch.randint(3, (6,))
