"""Collectives of the step's own, as loops for DDP and for contrastive losses have them, are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import spmd
from passes import CaptureError
from spmd._torch import distributed_c10d, object_collectives
from tests.harness.cases import make_optimizer
from tests.harness.fake import fake_world
from tests.harness.oracle import random_generator
from tests.harness.pool import Ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning")

Loss = Callable[[nn.Module, Tensor], Tensor]


class Gathered(torch.autograd.Function):
    """Rows of all ranks, whose gradient goes to the rank that they are from."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> tuple[Tensor, ...]:
        found = [torch.zeros_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(found, rows)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = torch.stack(gradients)
        dist.all_reduce(gradient)
        return gradient[dist.get_rank()]


def contrastive(model: nn.Module, x: Tensor) -> Tensor:
    features = model(x)
    logits = features @ torch.cat(Gathered.apply(features)).T
    labels = torch.arange(len(x)) + len(x) * dist.get_rank()
    return F.cross_entropy(logits, labels)


def contrastive_plain(model: nn.Module, x: Tensor) -> Tensor:
    features = model(x)
    return F.cross_entropy(features @ features.T, torch.arange(len(x)))


def contrastive_by_nn(model: nn.Module, x: Tensor) -> Tensor:
    features = torch.cat(dist_nn.all_gather(model(x)))
    loss = F.cross_entropy(features @ features.T, torch.arange(len(features)))
    return dist_nn.all_reduce(loss) / dist.get_world_size()


def centred(model: nn.Module, x: Tensor) -> Tensor:
    rows = model(x)
    center = rows.detach().sum(0, keepdim=True)
    dist.all_reduce(center)
    return (rows - center / (len(rows) * dist.get_world_size())).square().mean()


def centred_plain(model: nn.Module, x: Tensor) -> Tensor:
    rows = model(x)
    return (rows - rows.detach().mean(0, keepdim=True)).square().mean()


def counted(model: nn.Module, x: Tensor) -> Tensor:
    count = (x[:, 0].abs() > 0.1).sum().double()
    handle = dist.all_reduce(count, async_op=True)
    handle.wait()
    return _masked(model, x) / (count / dist.get_world_size())


def counted_plain(model: nn.Module, x: Tensor) -> Tensor:
    return _masked(model, x) / (x[:, 0].abs() > 0.1).sum().double()


def _masked(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).square().sum(1) * (x[:, 0].abs() > 0.1)).sum()


def queued(model: nn.Module, x: Tensor) -> Tensor:
    keys = model(x).detach()
    found = keys.new_empty(dist.get_world_size() * len(keys), keys.shape[1])
    dist.all_gather_into_tensor(found, keys)
    dist.broadcast(found, src=0)
    dist.barrier()
    return (model(x) @ found.T).logsumexp(1).mean()


def queued_plain(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) @ model(x).detach().T).logsumexp(1).mean()


PAIRS: dict[str, tuple[Loss, Loss]] = {
    "an autograd function of the user's": (contrastive, contrastive_plain),
    "torch.distributed.nn": (contrastive_by_nn, contrastive_plain),
    "a mean of rows": (centred, centred_plain),
    "a count, and a handle": (counted, counted_plain),
    "rows in one tensor": (queued, queued_plain),
}


def make_step(loss_of: Loss, averages: bool) -> Callable[..., Tensor]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        loss.backward()
        if averages:  # as the tutorial has it
            size = float(dist.get_world_size())
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad.data, op=dist.ReduceOp.SUM)
                parameter.grad.data /= size
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach().clone()
        if averages:
            dist.all_reduce(shown, op=dist.ReduceOp.AVG)
        return shown

    return step


def run(rank: int, world: int, name: str, style: str, optimizer: str) -> None:
    own, plain = PAIRS[name]
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Linear(5, 4).double()
        made.append((model, make_optimizer(optimizer, model.parameters())))
    compiled = spmd.compile(parallel_mode=spmd.DataParallel(style))(make_step(own, averages=True))
    for k, rows in enumerate((3, 3, 2)):  # a short last batch
        draws = [random_generator(each, k) for each in range(world)]
        parts = [torch.randn(rows, 5, generator=draw, dtype=torch.float64) for draw in draws]
        expected = make_step(plain, averages=False)(*made[0], torch.cat(parts))
        torch.testing.assert_close(compiled(*made[1], parts[rank]), expected)
        for mine, theirs in zip(made[1][0].parameters(), made[0][0].parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor() if isinstance(mine, DTensor) else mine, theirs)


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=PAIRS)
def test_the_numbers_of_one_device(ranks: Ranks, number: int) -> None:
    style, optimizer = ("fully_shard", "replicate")[number % 2], ("SGD", "AdamW")[number // 2 % 2]
    ranks.run(2, run, [*PAIRS][number], style, optimizer)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", PAIRS)
def test_the_plain_step_that_verifies_it_has_them_too(name: str) -> None:
    model, x = nn.Linear(5, 4).double(), torch.randn(4, 5, dtype=torch.float64)
    with fake_world(2):
        step = spmd.compile(make_step(PAIRS[name][0], averages=True))
        verdict = spmd.verify(step, model, torch.optim.SGD(model.parameters(), 0.1), x, world=2)
    assert verdict, verdict


def sums(loss: Tensor) -> None:
    dist.all_reduce(loss)
    loss /= OUTSIDE


def gathers_for_all(loss: Tensor) -> None:
    dist.all_gather([torch.zeros_like(loss) for _ in range(OUTSIDE)], loss)


def exchanges_for_all(loss: Tensor) -> None:
    dist.all_to_all([torch.zeros_like(loss) for _ in range(OUTSIDE)], [loss] * OUTSIDE)


def exchanges_parts(loss: Tensor) -> None:
    rows = loss.expand(4).clone()
    dist.all_to_all_single(torch.zeros_like(rows), rows, [1, 3], [3, 1])


def sends_objects(loss: Tensor) -> None:
    dist.all_gather_object([None, None], "text")


def sums_over_some(loss: Tensor) -> None:
    dist.all_reduce(loss, op=dist.ReduceOp.AVG, group=SOME[0])


def sends_to_one(loss: Tensor) -> None:
    dist.send(loss, 1)


def gathers_on_one(loss: Tensor) -> None:
    dist.gather(loss, [torch.zeros_like(loss)] if dist.get_rank() == 0 else None)


OUTSIDE = 2
SOME: list[Any] = []  # a group


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "does, message",
    [
        (sums, r"sums over the ranks.*test_own_collectives.py:\d+: dist.all_reduce.*ReduceOp.AVG.*get_world_size"),
        (gathers_for_all, r"allgather_.*not those of one rank.*Ask for it in the step"),
        (exchanges_for_all, r"alltoall_.*not those of one rank"),
        (exchanges_parts, r"alltoall_base_.*not those of one rank"),
        (sends_objects, r"sends a Python object.*Leave it out"),
        (sums_over_some, r"communicates itself.*Leave it out"),
        (sends_to_one, r"communicates itself.*Leave it out"),
        (gathers_on_one, r"communicates itself.*Leave it out"),
    ],
)
def test_what_has_no_meaning_on_one_device_is_refused(does: Callable[[Tensor], None], message: str) -> None:
    """A number of ranks that stands outside is not 1, and would divide a sum that is whole already."""

    @spmd.compile
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        shown = loss.detach().clone()
        does(shown)
        optimizer.step()
        return shown

    model = nn.Linear(5, 4)
    before = model.weight.detach().clone()
    with fake_world(2), pytest.raises(CaptureError, match=f"(?s){message}"):
        SOME[:] = [dist.new_group([0])]
        step(model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(4, 5))
    torch.testing.assert_close(model.weight.detach(), before)


def test_another_thread_is_left_alone() -> None:
    """A checkpoint that is saved in the background may send objects while a step is traced."""
    with object_collectives(lambda *_: "refused"), ThreadPoolExecutor(1) as pool:
        assert distributed_c10d._object_to_tensor(1, torch.device("cpu"), None) == "refused"
        tensor, size = pool.submit(distributed_c10d._object_to_tensor, 1, torch.device("cpu"), None).result()
    assert len(tensor) == size
