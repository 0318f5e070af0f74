"""The model, the step and the loop of a row, as a user writes them: each value of a dimension is a few lines here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..harness.oracle import random_generator

WIDTH, LENGTH, EXPERTS, HEADS = 4, 4, 2, 2
ROWS, SHORT, MORE = 16, 8, 24  # uneven rows divide by each number of ranks, and by eight
CALLS = 5
IN_PLACE = ("parameter", "state in place")  # what is written to between two calls; an update must not be pending then


class Attention(nn.Module):
    """Causal attention, by one of two spellings of the mask."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op, self.out = op, nn.Linear(WIDTH, WIDTH)
        # A bias of keys has no gradient but rounding, which Adafactor would make large.
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.project(x).chunk(3, -1))
        if self.op == "causal mask":
            seen = F.scaled_dot_product_attention(q, k, v, torch.ones(n, n, dtype=torch.bool).tril())
        else:
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(seen.transpose(1, 2).flatten(2))


class Mixture(nn.Module):
    """One expert a token, whose weights are looked up by number."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        share, expert = self.router(tokens).softmax(-1).max(-1)
        out = (tokens[:, None] @ self.up[expert]).squeeze(1) * share[:, None]
        return x + out.view_as(x)


class Block(nn.Module):
    """Attention and a layer, with the op that kernels or passes treat apart."""

    def __init__(self, op: str, attends: bool) -> None:
        super().__init__()
        self.op, self.attention = op, Attention(op) if attends else None
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 1) if op == "convolution" else None
        self.images = None
        if op == "channels last":
            # With the default eps it divides by small deviations: what fp32 rounds grows beyond the tolerance of a row.
            self.images = nn.Sequential(nn.Conv2d(2, 2, 1), nn.GroupNorm(2, 2, eps=0.1))
            self.images.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x + self.attention(x) if self.attention is not None else x))
        if self.op == "remainder":
            h = h + x % 0.7
        if self.convolution is not None:
            h = h + self.convolution(x.transpose(1, 2)).transpose(1, 2)
        if self.images is not None:
            h = h + torch.tanh(self.images(as_images(x))).movedim(1, -1).flatten(2) ** 3
        if self.op == "draw" and self.training:
            h = h * (torch.rand_like(h) < 0.8)
        if self.op == "rows that the step makes":
            h = h + torch.arange(x.shape[1], dtype=x.dtype).expand(len(x), -1)[..., None] / 10
        return x + h


def as_images(x: Tensor) -> Tensor:
    """(rows, length, width) as images, (rows, 2, length, width / 2), whose channels lie last."""
    return x.unflatten(-1, (-1, 2)).movedim(-1, 1).contiguous(memory_format=torch.channels_last)


class Net(nn.Module):
    """Blocks between two layers, with the row's trait."""

    def __init__(self, trait: str, op: str) -> None:
        super().__init__()
        self.trait, self.op, self.first = trait, op, nn.Linear(WIDTH, WIDTH)
        # A second block that attends shows what is done to equal blocks; in all four it doubles the time of a row.
        self.blocks = nn.ModuleList(Block(op, trait != "rows alone" and number % 2 == 1) for number in range(4))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.norm: nn.Module | None = None
        if trait == "batch norm":
            self.norm = nn.BatchNorm2d(2) if op == "channels last" else nn.BatchNorm1d(WIDTH)
        self.mixture = Mixture() if trait == "mixture" else None
        self.unused = nn.Linear(WIDTH, WIDTH) if trait == "unused" else None
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0
        if trait == "tied":
            self.last.weight = self.first.weight
        if trait == "frozen":
            self.blocks[0].requires_grad_(False)
        if trait == "hook":
            self.blocks[1].register_forward_hook(lambda module, given, out: out * 1.5)
            self.blocks[2].register_full_backward_hook(lambda module, given, out: tuple(each * 0.5 for each in given))
            self.last.weight.register_hook(lambda gradient: gradient * 0.5)
        if trait == "accumulation hook":
            self.last.weight.register_post_accumulate_grad_hook(halve_gradient)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.pooled(x))
        if self.op == "floor":
            h = h + 0.1 * self.pooled(x // 0.1)
        for block in self.blocks:
            h = block(h)
        if self.mixture is not None:
            h = self.mixture(h)
        if self.norm is not None and self.op == "channels last":
            h = self.norm(as_images(h)).movedim(1, -1).flatten(2)
        elif self.norm is not None:
            h = self.norm(h.transpose(1, 2)).transpose(1, 2)
        if self.trait == "counter" and self.training:
            self.seen += 1
        if self.trait == "branch":
            h = self.branch(h)
        out: Tensor = self.last(h)
        return out[:, None].expand_as(x) if self.trait == "rows alone" else out

    def pooled(self, x: Tensor) -> Tensor:
        """A row of each sequence, if rows are alone: so no op merges them with another dim."""
        return x.mean(1) if self.trait == "rows alone" else x

    def branch(self, h: Tensor) -> Tensor:
        """What depends on a number in Python: first its size, then its remainder."""
        self.calls += 1
        h = h if self.calls > 1 else h * 0.5
        return h * 1.5 if self.calls % 2 == 0 else h


def halve_gradient(parameter: Tensor) -> None:
    """A hook on the gradient once it is there."""
    parameter.grad = parameter.grad * 0.5  # type: ignore[operator]


def ctc(out: Tensor, y: Tensor) -> Tensor:
    """Two labels a row, of which the first frames of ``y`` say which; the classes are the width."""
    labels = 1 + (y[:, :2, 0] > 0).long()
    frames, counts = torch.full((len(y),), out.shape[1]), torch.full((len(y),), 2)
    return F.ctc_loss(out.log_softmax(-1).transpose(0, 1), labels, frames, counts)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": F.mse_loss,
    "sum": lambda out, y: (out - y).square().sum() / 1000,
    "masked": lambda out, y: ((out - y).square() * (y > 0)).sum() / (y > 0).sum(),
    "penalty": F.mse_loss,
    "ctc": ctc,
}


@dataclass
class Training:
    """What a loop trains, and what it keeps between calls."""

    values: Mapping[str, str]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    average: nn.Module | None
    log: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, values: Mapping[str, str]) -> Training:
        """A fresh one."""
        model = Net(values["model"], values["op"]).double()
        left = model.get_submodule("blocks.3.layer") if values["between"] == "group added" else None
        optimizer = optimizer_of(values["optimizer"], model, left)
        schedule = None
        if values["optimizer"] == "two groups and a schedule":
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        average = copy.deepcopy(model).requires_grad_(False) if values["model"] == "average" else None
        return cls(values, model, optimizer, schedule, average)

    def arguments(self) -> tuple[Any, ...]:
        """Of the step, in front of the batch."""
        return self.model, self.optimizer, self.average, self.log

    def saved(self) -> dict[str, Any]:
        """What goes into a checkpoint, by name."""
        found = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "average": self.average}
        return {name: each for name, each in found.items() if each is not None}

    def after(self, call: int) -> None:
        """What the loop does after a call."""
        if self.values["clears"].startswith("each second") and call % 2:
            self.optimizer.zero_grad()
        if self.schedule is not None:
            self.schedule.step()
        if call == 1:
            self.change(self.values["between"])
        if call == 2 and self.values["between"] == "eval":
            self.model.train()

    def change(self, what: str) -> None:
        """What happens between the second call and the third."""
        weight, first = self.model.get_parameter("last.bias"), next(iter(self.model.parameters()))
        with torch.no_grad():
            if what == "eval":
                self.model.eval()
            if what == "parameter":
                first.mul_(0.9)
            if what == "gradient" and weight.grad is not None:
                weight.grad.add_(0.1)
            if what in ("state in place", "state replaced"):
                for name, value in self.optimizer.state[weight].items():
                    if isinstance(value, Tensor) and value.ndim and what == "state in place":
                        value.mul_(0.5)
                    elif isinstance(value, Tensor) and value.ndim:
                        self.optimizer.state[weight][name] = torch.full_like(value, 0.01)
            if what == "load":
                self.model.load_state_dict({name: value * 0.9 for name, value in self.model.state_dict().items()})
        if what == "learning rate":
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.5
        if what == "weight decay":
            self.optimizer.param_groups[-1]["weight_decay"] = 0.05
        if what == "group added":
            self.optimizer.add_param_group({"params": [*self.model.get_submodule("blocks.3.layer").parameters()]})
        if what == "freeze":
            self.model.get_submodule("blocks.1").requires_grad_(False)
        if what == "copy":
            memo: dict[int, Any] = {}
            for name in ("model", "optimizer", "schedule", "average"):
                setattr(self, name, copy.deepcopy(getattr(self, name), memo))


def optimizer_of(name: str, model: nn.Module, left: nn.Module | None = None) -> torch.optim.Optimizer:
    """The optimizer of a row, of all parameters but those of the module that is ``left`` for later."""
    later = set() if left is None else {*left.parameters()}
    trained = [each for each in model.parameters() if each.requires_grad and each not in later]
    if name == "SGD":
        return torch.optim.SGD(trained, lr=0.1)
    if name == "step hooks":
        optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
        optimizer.register_step_pre_hook(halve_last_gradient)
        optimizer.register_step_post_hook(shrink_first)
        return optimizer
    if name == "momentum":
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=0.01)
    if name == "two groups and a schedule":
        groups = [{"params": trained[::2]}, {"params": trained[1::2], "lr": 0.02, "weight_decay": 0.1}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    if name == "Adafactor":
        return torch.optim.Adafactor(trained, lr=0.01)
    return torch.optim.AdamW(trained, lr=0.01, eps=1e-3, fused=name == "fused AdamW")


def halve_last_gradient(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A hook in front of an optimizer's step."""
    last = optimizer.param_groups[0]["params"][-1]
    if last.grad is not None:
        last.grad.mul_(0.5)


def shrink_first(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A hook behind an optimizer's step."""
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].mul_(0.99)


def step_of(values: Mapping[str, str]) -> Callable[..., Any]:
    """The train step of a row."""
    clears, loss_of, penalized = values["clears"], LOSSES[values["loss"]], values["loss"] == "penalty"
    puts_back, branches = values["op"] == "put back", values["op"] == "branch on a value"
    logs = values["model"] == "log"

    def step(
        model: Any, optimizer: torch.optim.Optimizer, average: nn.Module | None, log: list[Tensor], x: Tensor, y: Tensor
    ) -> Any:
        if clears == "first":
            optimizer.zero_grad()
        if not model.training:
            with torch.no_grad():
                return loss_of(model(x), y)
        kept = {}
        for name, p in model.last.named_parameters() if puts_back else ():
            kept[name] = p.data.clone() if name == "bias" else p.data
            p.data = kept[name] * 1.01
        out = model(x)
        loss = loss_of(out, y)
        if penalized:
            (slope,) = torch.autograd.grad(out.square().mean(), model.last.weight, create_graph=True)
            loss = loss + 0.1 * slope.square().sum()
        if branches and x.mean() > 0:
            loss = loss / 2
        loss.backward()
        for name, p in model.last.named_parameters() if puts_back else ():
            p.data = kept[name]
        if clears.endswith("clipped"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if average is not None:
            for mean, new in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(new.detach(), 0.1)
        if clears == "last":
            optimizer.zero_grad()
        if logs:
            log.append(loss.detach())
        return loss.detach()

    return step


def batch(values: Mapping[str, str], part: int, call: int) -> tuple[Tensor, Tensor]:
    """``x`` and ``y`` of one part of the batch in a call, (rows, length, width)."""
    rows, length = ROWS, LENGTH
    if values["rows"] == "short third" and call == 2:
        rows = SHORT
    if values["rows"] == "uneven" and part == 0:
        rows += MORE
    if values["rows"] == "other length" and call >= 2:
        length *= 2
    draw = random_generator(part, call)
    x, y = (torch.randn(rows, length, WIDTH, generator=draw, dtype=torch.float64) for _ in range(2))
    # Of multiples of 0.1 a quotient that is rounded has another floor than an exact one.
    return (4 * x).round() / 10 if values["op"] == "floor" else x, y
