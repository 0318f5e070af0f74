"""State to which a step adds rows of the batch by their index: counts of classes, sums of their features.

Each micro-batch adds to zeros, and the state gets their sum. Ranks send sums, too, also behind an update.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

import spmd
from tests.harness.structure import compile_on_fake_ranks
from tests.harness.structure import counts as collectives

CLASSES = 4


def confusion_by_bincount(state: nn.Module, h: Tensor, p: Tensor, y: Tensor) -> None:
    state.pairs += torch.bincount(y * CLASSES + p, minlength=CLASSES**2).view(CLASSES, CLASSES)


def confusion_by_index(state: nn.Module, h: Tensor, p: Tensor, y: Tensor) -> None:
    state.pairs.index_put_((y, p), torch.ones_like(y), accumulate=True)


def confusion_by_number(state: nn.Module, h: Tensor, p: Tensor, y: Tensor) -> None:
    state.pairs.view(-1).index_add_(0, y * CLASSES + p, torch.ones_like(y))


def counts_and_moving_sums(state: nn.Module, h: Tensor, p: Tensor, y: Tensor) -> None:
    state.seen.scatter_add_(0, y, torch.ones_like(y))
    state.sums.mul_(0.9).index_add_(0, y, h, alpha=0.1)


def means_of_classes(state: nn.Module, h: Tensor, p: Tensor, y: Tensor) -> None:
    sums, seen = torch.zeros_like(state.sums).index_add_(0, y, h), torch.bincount(y, minlength=CLASSES).unsqueeze(1)
    state.sums = torch.where(seen > 0, 0.9 * state.sums + 0.1 * sums / seen.clamp(min=1), state.sums)


COUNTS = (confusion_by_bincount, confusion_by_index, confusion_by_number, counts_and_moving_sums, means_of_classes)
Count = Callable[[nn.Module, Tensor, Tensor, Tensor], None]


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Module()
    model.features, model.head = nn.Linear(5, 8), nn.Linear(8, CLASSES)
    model.double()
    model.register_buffer("pairs", torch.zeros(CLASSES, CLASSES, dtype=torch.long))
    model.register_buffer("seen", torch.zeros(CLASSES, dtype=torch.long))
    model.register_buffer("sums", torch.zeros(CLASSES, 8, dtype=torch.float64))
    return model, torch.optim.SGD(model.parameters(), 0.1)


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 5, dtype=torch.float64), torch.randint(CLASSES, (rows,))


def step_that(*counts: Count, is_last: bool) -> Callable[..., Tensor]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(model.features(x))
        out = model.head(h)
        loss = F.cross_entropy(out, y)
        for count in () if is_last else counts:
            count(model, h.detach(), out.argmax(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for count in counts if is_last else ():
            count(model, h.detach(), out.argmax(1), y)
        return loss

    return step


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("is_last", [False, True], ids=["before the update", "after it"])
def test_numbers_are_those_of_the_plain_step(is_last: bool) -> None:
    mode = spmd.DataParallel("replicate", micro_batches=2)
    compiled = spmd.compile(step_that(*COUNTS, is_last=is_last), parallel_mode=mode)
    verdict = spmd.verify(compiled, *built(), *batch(8), world=2, steps=2)
    assert verdict, verdict


@pytest.mark.usefixtures("alone")
def test_ranks_send_sums_and_no_rows() -> None:
    step = step_that(confusion_by_bincount, means_of_classes, is_last=True)
    assert set(collectives(compile_on_fake_ranks(2, step, built(), *batch(64)))) == {"all_reduce"}


def private(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Gradients of each row, clipped by its norm and added up: DP-SGD without its noise."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(model, parameters, (x[None],)), y[None])

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
    norms = torch.stack([each.flatten(1).norm(dim=1) for each in gradients.values()]).norm(dim=0)
    for name, p in model.named_parameters():
        p.grad = torch.einsum("n,n...->...", (0.5 / norms).clamp(max=1), gradients[name]) / len(x)
    optimizer.step()
    return norms


@pytest.mark.usefixtures("alone")
def test_gradients_of_each_row_stay_with_it() -> None:
    """Ranks gathered them to add them up, and micro-batches could not."""
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    given = (torch.randn(16, 5, dtype=torch.float64), torch.randn(16, 4, dtype=torch.float64))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    mode = spmd.DataParallel("replicate", micro_batches=2)
    verdict = spmd.verify(spmd.compile(private, parallel_mode=mode), net, optimizer, *given, world=2, steps=2)
    assert verdict, verdict
    assert set(collectives(compile_on_fake_ranks(2, private, (net, optimizer), *given))) == {"all_reduce"}
