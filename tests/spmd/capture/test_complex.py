"""Complex parameters: real norms and statistics of them, optimizers whose second moment is ``g * g.conj()``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from tests.harness.cases import THREE_IN_TURN, in_turn
from tests.harness.oracle import Case, assert_agrees, random_generator
from tests.harness.pool import Ranks

COMPLEX, FLOAT = torch.complex128, torch.float64


class Spectral(nn.Module):
    """A layer of a Fourier neural operator, with a complex batch norm of its frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.out = nn.Linear(1, 3).double(), nn.Linear(3, 1).double()
        self.weight = nn.Parameter(torch.randn(3, 3, 4, dtype=COMPLEX))
        self.scale = nn.Parameter(torch.ones(3, 1, dtype=COMPLEX))
        self.register_buffer("mean", torch.zeros(3, dtype=COMPLEX))
        self.register_buffer("var", torch.ones(3, dtype=FLOAT))

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x).transpose(1, 2)
        low = torch.einsum("bix,iox->box", torch.fft.rfft(h)[..., :4], self.weight)
        mean, var = low.mean((0, 2)), low.var((0, 2), unbiased=False)
        with torch.no_grad():
            self.mean.lerp_(mean, 0.1)
            self.var.lerp_(var, 0.1)
        low = (low - mean[:, None]) / (var[:, None] + 1e-5).sqrt() * self.scale
        return self.out(F.gelu(torch.fft.irfft(F.pad(low, (0, 1)), n=8) + h).transpose(1, 2))


class Conjugates(torch.optim.Optimizer):
    """A second moment of ``g * g.conj()``, kept complex."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["square"] = torch.zeros_like(p)
                state["square"].mul_(0.9).add_(p.grad * p.grad.conj(), alpha=0.1)
                p.addcdiv_(p.grad, state["square"].sqrt().add_(1e-2), value=-group["lr"])


OPTIMIZERS = (torch.optim.RMSprop, Conjugates, torch.optim.AdamW)


@dataclass(frozen=True)
class Waves(Case):
    """Regression of waves, clipped by norm."""

    optimizer: type[torch.optim.Optimizer]

    def build(self) -> tuple[Any, ...]:
        model = Spectral()
        return model, self.optimizer(model.parameters(), lr=0.02)  # type: ignore[call-arg]

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        generator = random_generator(rank, step)
        return tuple(torch.randn(4, 8, 1, generator=generator, dtype=FLOAT) for _ in range(2))

    @staticmethod
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        loss = F.mse_loss(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_complex_parameters_train_as_in_the_plain_step(
    ranks: Ranks, request: pytest.FixtureRequest, optimizer: type[torch.optim.Optimizer]
) -> None:
    for style, world in in_turn(request, OPTIMIZERS.index(optimizer), THREE_IN_TURN):
        assert_agrees(ranks, world, Waves(optimizer), style)


def reductions(z: Tensor) -> list[Tensor]:
    norms = [torch.linalg.vector_norm(z, p, dim=1) for p in (0, 1, 2, 3, math.inf, -math.inf)]
    norms += [torch.linalg.vector_norm(z, dtype=COMPLEX), torch.linalg.matrix_norm(z), torch.norm(z, p="fro")]
    moments = [z.var(0), z.std(), *torch.var_mean(z, 1, correction=0), *torch.std_mean(z, 0, keepdim=True)]
    others = [z.abs(), z.angle(), z.real * 2, z.imag * 2, z.mean(0), z.sum(1), z.prod(0), z.cumsum(0), z.sgn()]
    return [*norms, *moments, *others, *torch._foreach_norm([z, z * 2])]


@pytest.mark.usefixtures("alone")
def test_reductions_of_complex_numbers_have_the_dtypes_and_gradients_of_eager() -> None:
    def step(model: nn.ParameterList, optimizer: torch.optim.Optimizer, x: Tensor) -> list[Tensor]:
        found = reductions(x @ model[0])
        torch.stack([each.abs().square().sum() for each in found]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return [each.detach() for each in found]

    def built() -> Any:
        torch.manual_seed(0)
        model = nn.ParameterList([torch.randn(3, 4, dtype=COMPLEX)])
        return model, torch.optim.SGD(model.parameters(), lr=1e-3)

    plain, compiled, x = built(), built(), torch.randn(6, 3, dtype=COMPLEX)
    torch.testing.assert_close(spmd.compile(step)(*compiled, x), step(*plain, x))
    torch.testing.assert_close(compiled[0][0], plain[0][0], rtol=1e-10, atol=1e-10)
