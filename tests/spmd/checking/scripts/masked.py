"""A tagger that drops what is padded, counts its labels and takes its predictions to Python."""

import numpy as np
import torch
from torch import nn

import spmd

PADDED = -1


@spmd.compile
def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    logits = model(x)
    kept = y != PADDED
    loss = nn.functional.cross_entropy(logits[kept], y[kept])  # refused
    counts = torch.bincount(y.flatten().clamp(min=0))  # refused
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), counts, logits.detach().numpy()  # refused


def example_args() -> tuple[object, ...]:
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 4))
    y = torch.randint(4, (4, 6))
    y[:, 4:] = PADDED
    return model, torch.optim.Adam(model.parameters()), torch.randint(16, (4, 6)), y
