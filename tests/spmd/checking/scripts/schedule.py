"""A language model's loop that skips large losses, measures its time and steps its scheduler."""

import time

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

import spmd


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layer = nn.Embedding(32, 16), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.tokens(x)))


@spmd.compile
def train_step(
    model: Model, optimizer: torch.optim.Optimizer, scheduler: LRScheduler, x: torch.Tensor
) -> tuple[torch.Tensor, float]:
    begun = time.perf_counter()  # refused
    logits = model(x[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
    if float(loss) < 100:  # refused
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    scheduler.step()  # refused
    return loss.detach(), begun


def example_args() -> tuple[object, ...]:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, CosineAnnealingLR(optimizer, 100), torch.randint(32, (4, 9))
