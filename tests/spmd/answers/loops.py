"""Train steps that branch on values, as people write them; each takes (model, optimizer, x, y)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer


def skips_what_is_not_finite(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Skip the update of a loss with NaN or Inf."""
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    if torch.isfinite(loss):
        optimizer.step()
    return loss


def returns_early(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Look at the number of the loss, and have no backward pass."""
    loss = F.mse_loss(model(x), y)
    value = loss.item()
    if not math.isfinite(value) or value > 20:
        return {"loss": value, "skipped": True}
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return {"loss": value, "skipped": False}


def compares_with_itself(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """NaN is the number that does not equal itself."""
    loss = F.mse_loss(model(x), y)
    number = loss.item()
    if number != number:
        return loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def clips_what_is_large(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Clip only where the norm is large, and update nothing where it is none."""
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    if norm.isnan():
        optimizer.zero_grad()
    elif norm > 1.0:
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
    optimizer.step()
    return loss, norm


def looks_at_each_gradient(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """A question for each gradient, up to the first one with NaN; gradients are cleared last."""
    loss = F.mse_loss(model(x), y)
    loss.backward()
    if not any(bool(torch.isnan(p.grad).any()) for p in model.parameters() if p.grad is not None):
        optimizer.step()
    optimizer.zero_grad()
    return loss


def another_loss(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """A loss of another kind above a threshold."""
    out = model(x)
    loss = F.mse_loss(out, y)
    if loss > 5.0:
        loss = F.smooth_l1_loss(out.nan_to_num(), y.nan_to_num())
    optimizer.zero_grad()
    loss.nan_to_num().backward()
    optimizer.step()
    return loss


def steps_until_it_is_small(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
    """Some updates of one batch, as many as its error needs."""
    steps = 0
    error = F.mse_loss(model(x), y)
    while error > 2.0 and steps < 3:
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        error = F.mse_loss(model(x), y)
        steps += 1
    return error.detach(), steps


def stops_at_a_distance(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
    """Several updates of one batch, until the outputs have moved too far, as in PPO."""
    with torch.no_grad():
        old = model(x)
    steps = 0
    for _ in range(3):
        loss = F.smooth_l1_loss(model(x), y.nan_to_num())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        steps += 1
        with torch.no_grad():
            distance = (model(x) - old).square().mean()
        if distance > 0.003:
            break
    return distance, steps


def takes_a_bad_step_back(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Put parameters back in place where an update has made the loss larger."""
    before = [p.detach().clone() for p in model.parameters()]
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        after = F.mse_loss(model(x), y)
        if not after < loss:
            for p, old in zip(model.parameters(), before, strict=True):
                p.copy_(old)
    return after


def lowers_its_rate(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Another number of a parameter group after a large loss."""
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    if torch.isfinite(loss):
        loss.backward()
        optimizer.step()
    if loss.item() > 5.0:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    return loss


def counts_good_calls(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A buffer that advances in one branch alone."""
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    if loss.detach() < 5.0:
        loss.backward()
        optimizer.step()
        model.good += 1
    return loss, model.good.clone()


def notes_its_best(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
    """Early stopping: Python state that follows from values."""
    loss = F.mse_loss(model(x), y)
    if loss.item() < 5.0:
        model.bad = 0
    else:
        model.bad += 1
    optimizer.zero_grad()
    if model.bad < 2:
        loss.nan_to_num().backward()
        optimizer.step()
    return loss, model.bad


def logs_its_loss(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> float:
    """A number for a log: no question, one program."""
    loss = F.mse_loss(model(x), y).nan_to_num()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


LOOPS = (
    skips_what_is_not_finite,
    returns_early,
    compares_with_itself,
    clips_what_is_large,
    looks_at_each_gradient,
    another_loss,
    steps_until_it_is_small,
    stops_at_a_distance,
    takes_a_bad_step_back,
    lowers_its_rate,
    counts_good_calls,
    notes_its_best,
    logs_its_loss,
)
