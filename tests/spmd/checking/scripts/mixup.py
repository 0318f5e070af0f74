"""Images that are mixed at random, with a look at whether the loss is finite, and a log file."""

import random
import tempfile

import torch
from torch import nn

import spmd

log = tempfile.TemporaryFile("w")  # noqa: SIM115


@spmd.compile
def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    share = random.random()  # refused
    images = share * images + (1 - share) * images.flip(0)
    loss = nn.functional.cross_entropy(model(images), labels)
    if float(loss) > 1e6:  # refused
        raise ValueError("the loss is not finite")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    log.write("a step\n")  # refused
    return loss


def example_args() -> tuple[object, ...]:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 3, 8, 8), torch.randint(10, (4,))
