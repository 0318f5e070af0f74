"""A GAN that grows a parameter group, cuts its batch by a number of its own, and has a sparse embedding."""

import torch
from torch import nn

import spmd


@spmd.compile
def train_step(
    maker: nn.Module,
    judge: nn.Module,
    of_maker: torch.optim.Optimizer,
    of_judge: torch.optim.Optimizer,
    labels: torch.Tensor,
    real: torch.Tensor,
    count: torch.Tensor,
) -> torch.Tensor:
    made = maker(labels)
    wrong = judge(made.detach()).mean() - judge(real[: int(count)]).mean()  # refused
    wrong.backward()
    of_judge.step()
    of_judge.zero_grad()
    (-judge(made).mean()).backward()  # refused
    of_maker.step()
    of_maker.zero_grad()
    of_judge.param_groups[0]["stage"] = "later"  # refused
    return wrong


def example_args() -> tuple[object, ...]:
    maker = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 8))
    judge = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    optimizers = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (maker, judge))
    return maker, judge, *optimizers, torch.randint(10, (4,)), torch.randn(4, 8), torch.tensor(2)
