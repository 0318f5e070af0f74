"""A mixture of experts, written in the three usual forms, whose routing a test chooses; and its train step.

The experts of each token are an argument of the step, so that a test decides who gets how many; the weights of their
results are learned, with a loss that balances them, and a bias that follows their load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers.integrations.moe  # has the grouped product that takes fp64  # noqa: F401
from torch import Tensor, nn
from torch.nn import functional as F

from .oracle import Case, random_generator

Form = Literal["ends", "numbers", "capacity"]
WIDTH, HIDDEN, EXPERTS, CHOSEN = 6, 10, 4, 2
ROWS = 8  # of a rank


class Mixture(nn.Module):
    """Two experts a token, beside one that all tokens have."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ParameterDict(
            {
                "up": nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3),
                "down": nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 3),
            }
        )
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def forward(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, width), and the numbers of the experts of each row -> the same shape, and the auxiliary loss."""
        share = (self.router(x) + self.bias).softmax(-1)
        weights = share.gather(1, chosen)
        load = F.one_hot(chosen, EXPERTS).to(x.dtype).sum(1).mean(0)
        with torch.no_grad():
            self.bias += 0.01 * (load.mean() - load).sign()
        mixed = {"ends": self.by_ends, "numbers": self.by_numbers, "capacity": self.by_capacity}[self.form]
        out = mixed(x, chosen, weights / weights.sum(-1, keepdim=True))
        return x + self.shared(x) + out, (load * share.mean(0)).sum() + self.router(x).logsumexp(-1).square().mean()

    def by_ends(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Rows sorted by expert, and products of groups that end at given rows."""
        experts, order = chosen.flatten().sort()
        ends = experts.bincount(minlength=EXPERTS).cumsum(0).int()
        product, rows = torch.ops.transformers.grouped_mm_fallback, order // CHOSEN
        hidden = F.silu(product(x[rows], self.experts["up"], ends))
        out = product(hidden, self.experts["down"], ends) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, rows, out.to(x.dtype))  # bias is a buffer, which no policy casts

    def by_numbers(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weights of each row's expert, looked up."""
        experts = chosen.flatten()
        hidden = F.silu(x.repeat_interleave(CHOSEN, 0).unsqueeze(1) @ self.experts["up"][experts])
        out = (hidden @ self.experts["down"][experts]).squeeze(1) * weights.flatten()[:, None]
        return out.view(len(x), CHOSEN, WIDTH).sum(1)

    def by_capacity(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """A place for each row at each expert, by products with ones and zeros."""
        capacity = len(x)
        hot = F.one_hot(chosen, EXPERTS).to(x.dtype)  # (rows, chosen, experts)
        place = (hot.sum(1).cumsum(0) - 1).clamp(0, capacity - 1).long()
        sent = torch.einsum("nke,nec->nkec", hot, F.one_hot(place, capacity).to(x.dtype))
        hidden = F.silu(torch.bmm(torch.einsum("nkec,nd->ecd", sent, x), self.experts["up"]))
        back = torch.einsum("nkec,nk->nec", sent, weights)
        return torch.einsum("nec,ecd->nd", back, torch.bmm(hidden, self.experts["down"]))


class Alone(Mixture):
    """The experts by themselves, where a test is about their rows: the rest takes twice as long to compile."""

    def forward(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, width), and the numbers of the experts of each row -> the same shape, and no auxiliary loss."""
        return x + self.by_ends(x, chosen, self.router(x).sigmoid().gather(1, chosen)), x.new_zeros(())


@dataclass(frozen=True)
class Training(Case):
    """Steps with other routing each: even, skewed, an expert without a row, a rank without a token for its experts."""

    form: Form = "ends"
    alone: bool = False

    def build(self) -> tuple[Any, ...]:
        """The model in fp64, and SGD with momentum."""
        model = (Alone if self.alone else Mixture)(self.form).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        """Rows, the experts of each, and targets."""
        draw = random_generator(rank, step)
        x, y = (torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64) for _ in range(2))
        return x, routing(rank, step, draw), y

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, chosen: Tensor, y: Tensor) -> Any:
        """A loss with the auxiliary one."""
        out, auxiliary = model(x, chosen)
        loss = F.mse_loss(out, y) + 0.1 * auxiliary
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, out


def routing(rank: int, step: int, draw: torch.Generator) -> Tensor:
    """(rows, chosen) numbers of experts, other ones for each row."""
    chosen = torch.rand(ROWS, EXPERTS, generator=draw).topk(CHOSEN).indices
    if step == 1:
        return torch.tensor([0, 1]).expand(ROWS, CHOSEN).clone()  # the experts of the first rank alone
    if step == 2:
        return chosen.masked_fill(chosen == 2, 3).where(chosen.sum(1, keepdim=True) != 5, torch.tensor([0, 3]))
    if step == 3:
        return torch.tensor([[2, 3], [1, 0]])[rank % 2].expand(ROWS, CHOSEN).clone()  # all rows go to the other half
    return chosen
