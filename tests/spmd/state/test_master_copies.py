"""Exact parts of parameters that all ranks hold rounded: edits reach them, and what shows a parameter knows them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

import spmd
from tests.harness.messages import messages
from tests.harness.pool import Ranks

BF16 = torch.bfloat16
ROUNDED = {"shard_optimizer": True, "gather_dtype": BF16}
LR = 0.1


def build() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 4)).double()
    return model, torch.optim.SGD(model.parameters(), lr=LR)


def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def batch(rank: int, k: int) -> tuple[Tensor, Tensor]:
    """One row fewer in the third call, for which there is a program of its own."""
    draw = torch.Generator().manual_seed(10 * k + rank)
    rows = 2 if k == 2 else 3
    x, y = torch.randn(rows, 5, generator=draw), torch.randn(rows, 4, generator=draw)
    return x.double(), y.double()


def whole(k: int, world: int) -> list[Tensor]:
    return [torch.cat(each) for each in zip(*(batch(rank, k) for rank in range(world)), strict=True)]


def agrees(found: dict[str, Tensor], plain: nn.Module) -> bool:
    return all(torch.allclose(found[name], each, 1e-12, 1e-13) for name, each in plain.state_dict().items())


def rounded(values: Tensor) -> Tensor:
    return values.to(BF16).to(values.dtype)


# Edits between calls


def copied(model: nn.Module) -> None:
    model[0].weight.data.copy_(model[0].weight * 0.7)


def set_anew(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.detach() * 0.7


def loaded(model: nn.Module) -> None:
    model.load_state_dict({name: each * 0.7 for name, each in model.state_dict().items()})


@torch.no_grad()
def moved_a_row(model: nn.Module) -> None:
    model[0].weight[1].add_(0.123456789)


def by_numpy(model: nn.Module) -> None:
    model[2].bias.detach().numpy()[:] = 1 / 3


def replaced(model: nn.Module) -> None:
    model[2].weight = nn.Parameter(model[2].weight.detach() * 0.7)


def unsharded(model: nn.Module) -> None:
    with spmd.unshard(model), torch.no_grad():
        model[0].weight.mul_(0.7)


def looked_at(model: nn.Module) -> None:
    with spmd.unshard(model):
        assert not torch.equal(model[0].weight, rounded(model[0].weight))


EDITS = (copied, set_anew, loaded, moved_a_row, by_numpy, unsharded, looked_at)


class ByHand:
    """What one process computes with the whole batch: gradients at what ranks hold, updates of exact parameters."""

    def __init__(self) -> None:
        self.model, _ = build()
        self.exact = [each.detach().clone() for each in self.model.parameters()]
        self.put(map(rounded, self.exact))

    def put(self, values: Any) -> None:
        for parameter, value in zip(self.model.parameters(), values, strict=True):
            parameter.data.copy_(value)

    def step(self, x: Tensor, y: Tensor) -> None:
        gradients = torch.autograd.grad(F.mse_loss(self.model(x), y), [*self.model.parameters()])
        self.exact = [value - LR * gradient for value, gradient in zip(self.exact, gradients, strict=True)]
        self.put(map(rounded, self.exact))

    def edit(self, edit: Callable[[nn.Module], None]) -> None:
        if edit in (unsharded, looked_at):  # of exact values, and what is held is rounded again
            self.put(self.exact)
            if edit is unsharded:
                self.model[0].weight.data.mul_(0.7)
            self.exact = [each.detach().clone() for each in self.model.parameters()]
            self.put(map(rounded, self.exact))
            return
        before = [each.detach().clone() for each in self.model.parameters()]
        edit(self.model)
        pairs = zip(self.model.parameters(), before, self.exact, strict=True)
        self.exact = [torch.where(now == old, exact, now).detach() for now, old, exact in pairs]


def edited(rank: int, world: int) -> list[str]:
    """Where the run departs from that by hand, or from what another rank holds, after each edit and call."""
    model, optimizer = build()
    step, hand, wrong = spmd.compile(train, parallel_mode=spmd.DataParallel(**ROUNDED)), ByHand(), []
    for k, edit in enumerate((lambda model: None, *EDITS)):
        edit(model)
        hand.edit(edit)
        step(model, optimizer, *batch(rank, k))
        hand.step(*whole(k, world))
        exact = [*spmd.state_dict(model).values()]
        pairs = zip(exact, hand.exact, model.parameters(), strict=True)
        fits = [torch.allclose(one, two, 1e-12, 1e-13) and torch.equal(held, rounded(one)) for one, two, held in pairs]
        wrong += [] if all(fits) else [f"{edit.__name__}: {fits}"]
    return wrong


def test_edits_between_calls_reach_the_exact_parts(ranks: Ranks) -> None:
    assert ranks.run(2, edited) == [[]] * 2


def hybrid(rank: int, world: int) -> list[list[Tensor]]:
    """Ranks that update the same parts, of which one writes the values that are there already."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    (model, optimizer), seen = build(), []
    step = spmd.compile(train, parallel_mode=spmd.DataParallel(mesh=mesh, **ROUNDED))
    for k in range(4):
        step(model, optimizer, *batch(rank, k))
        seen.append([each.detach().clone() for each in model.parameters()])
        if rank == 3:
            model[0].weight.data.copy_(model[0].weight.detach().clone())
    return [*seen, [*spmd.state_dict(model).values()]]


def test_replicas_of_exact_parts_stay_equal(ranks: Ranks) -> None:
    first, *others = ([tensor for seen in of_rank for tensor in seen] for of_rank in ranks.run(4, hybrid))
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))


# Other steps


def switched(rank: int, world: int) -> list[str]:
    """What other steps, compiled for a model that ranks hold rounded, begin with: its exact values."""
    wrong = []
    for other in ({}, {"shard_optimizer": True}, {"parallel_style": "fully_shard"}):
        model, optimizer = build()
        step = spmd.compile(train, parallel_mode=spmd.DataParallel(**ROUNDED))
        for k in range(2):
            step(model, optimizer, *batch(rank, k))
        plain, _ = build()
        plain.load_state_dict(spmd.state_dict(model))
        train(plain, torch.optim.SGD(plain.parameters(), lr=LR), *whole(2, world))
        spmd.compile(train, parallel_mode=spmd.DataParallel(**other))(model, optimizer, *batch(rank, 2))
        wrong += [] if agrees(spmd.state_dict(model), plain) else [str(other)]
        if "parallel_style" not in other:  # and back
            train(plain, torch.optim.SGD(plain.parameters(), lr=LR), *whole(3, world))
            step(model, optimizer, *batch(rank, 3))
            wrong += [] if agrees(spmd.state_dict(model), plain) else [f"{other}, and back"]
    return wrong


def test_a_step_without_the_option_goes_on_exactly(ranks: Ranks) -> None:
    assert ranks.run(2, switched) == [[]] * 2


def sent_otherwise(rank: int, world: int) -> list[str]:
    """Where steps that send parameters in other dtypes than the one before begin with other values than its exact."""
    (model, optimizer), wrong = build(), list[str]()
    for k, wire in enumerate((BF16, torch.float16, BF16)):
        before = {name: each.clone() for name, each in spmd.state_dict(model).items()}
        step = spmd.compile(train, parallel_mode=spmd.DataParallel(shard_optimizer=True, gather_dtype=wire))
        step(model, optimizer, *batch(rank, k))
        plain, _ = build()
        plain.load_state_dict({name: each.to(wire).double() for name, each in before.items()})
        gradients = torch.autograd.grad(
            F.mse_loss(plain(whole(k, world)[0]), whole(k, world)[1]), [*plain.parameters()]
        )
        plain.load_state_dict({name: each - LR * g for (name, each), g in zip(before.items(), gradients, strict=True)})
        wrong += [] if agrees(spmd.state_dict(model), plain) else [f"{k}: {wire}"]
    return wrong


def test_a_step_that_sends_another_dtype_goes_on_exactly(ranks: Ranks) -> None:
    assert ranks.run(2, sent_otherwise) == [[]] * 2


def converted(rank: int, world: int) -> list[torch.dtype]:
    """The dtypes of a model that was trained with a DTensor among its parameters, which torch swaps to convert."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model, _ = build()
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh["tp"], [Shard(0)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    step = spmd.compile(train, parallel_mode=spmd.DataParallel(mesh=mesh["dp"], **ROUNDED))
    step(model, optimizer, *batch(rank, 0))
    return [each.dtype for each in model.float().parameters()]


def test_a_model_with_dtensors_can_be_converted(ranks: Ranks) -> None:
    assert ranks.run(2, converted) == [[torch.float32] * 4] * 2


def run_with(rank: int, world: int, by_messages: bool, options: dict[str, Any]) -> list[Tensor]:
    with messages(rank) if by_messages else nullcontext():
        (model, optimizer), seen = build(), list[Tensor]()
        step = spmd.compile(train, parallel_mode=spmd.DataParallel(**ROUNDED, **options))
        for k in range(5):
            seen.append(step(model, optimizer, *batch(rank, k)))
        step.flush()
        return [*seen, *(each.detach() for each in model.parameters()), *spmd.state_dict(model).values()]


def test_deferral_and_micro_batches_keep_exact_parts(ranks: Ranks) -> None:
    """Over messages, where updates are deferred."""
    expected = ranks.run(2, run_with, True, {})
    for options in ({"defer_updates": True}, {"micro_batches": 3}):
        got = ranks.run(2, run_with, True, options)
        for one, two in zip(expected, got, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-12, atol=1e-13, msg=lambda text, by=options: f"{by}: {text}")
        assert all(torch.equal(*pair) for pair in zip(got[0][5:], got[1][5:], strict=True)), options
