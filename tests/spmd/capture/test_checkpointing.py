"""``torch.utils.checkpoint``, both variants: the recomputation stays in the graph and draws what was drawn before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import spmd
from passes import Phase
from passes.runtime.random import draw
from tests.harness.cases import MLP, make_optimizer
from tests.harness.oracle import Snapshot, all_unequal, assert_agrees, compiled_run
from tests.harness.pool import Ranks
from tests.harness.structure import nodes_of

pytestmark = pytest.mark.slow


class Block(nn.Module):
    """Two layers with dropout between them."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(width, 2 * width), nn.Dropout(p), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(x))))


def plain(blocks: nn.Sequential, x: Tensor, **_: Any) -> Tensor:
    return blocks(x)


def each(blocks: nn.Sequential, x: Tensor, **options: Any) -> Tensor:
    for block in blocks:
        x = checkpoint(block, x, **options)
    return x


def same_twice(blocks: nn.Sequential, x: Tensor, **options: Any) -> Tensor:
    """One module in two checkpoints."""
    x = checkpoint(blocks[0], x, **options)
    return checkpoint(blocks[0], blocks[1](x), **options)


def nested(blocks: nn.Sequential, x: Tensor, **options: Any) -> Tensor:
    return checkpoint(lambda y: blocks[1](checkpoint(blocks[0], y, **options)), x, **options)


def in_segments(blocks: nn.Sequential, x: Tensor, **options: Any) -> Tensor:
    return checkpoint_sequential(blocks, 2, x, **options)


FORMS: dict[str, Callable[..., Tensor]] = {f.__name__: f for f in (plain, each, same_twice, nested, in_segments)}


class Net(nn.Module):
    """Blocks between two layers, computed in one of ``FORMS``."""

    def __init__(self, form: str, reentrant: bool, p: float) -> None:
        super().__init__()
        self.form, self.reentrant = form, reentrant
        self.enter, self.leave = nn.Linear(15, 6), nn.Linear(6, 4)
        self.blocks = nn.Sequential(*(Block(6, p) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        x = FORMS[self.form](self.blocks, self.enter(x), use_reentrant=self.reentrant)
        return self.leave(x)


@dataclass(frozen=True)
class Checkpointed(MLP):
    form: str = "each"
    reentrant: bool = False
    p: float = 0.0
    sizes: tuple[int, ...] = (15, 4)
    rows: int = 6

    def build(self) -> tuple[Any, ...]:
        model = Net(self.form, self.reentrant, self.p).double()
        return model, make_optimizer(self.optimizer, model.parameters())


@pytest.mark.parametrize(
    ("form", "reentrant", "world", "style"),
    [
        ("each", False, 2, "replicate"),
        pytest.param("each", True, 2, "fully_shard", marks=pytest.mark.exhaustive),
        ("same_twice", True, 2, "fully_shard"),
        pytest.param("nested", False, 3, "fully_shard", marks=pytest.mark.exhaustive),
        ("nested", True, 2, "fully_shard"),
        pytest.param("in_segments", False, 2, "replicate", marks=pytest.mark.exhaustive),
    ],
)
def test_agrees(ranks: Ranks, form: str, reentrant: bool, world: int, style: str) -> None:
    assert_agrees(ranks, world, Checkpointed(form=form, reentrant=reentrant), style)


class Exp(torch.autograd.Function):
    """Computes its gradient from what it saved, not from its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.exp()


class Normed(nn.Module):
    """Batch norm, whose statistics eager updates once more in backward; a function with a backward of its own."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.up, self.norm, self.down = nn.Linear(15, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda y: torch.tanh(self.norm(y)), self.up(x), use_reentrant=self.reentrant)
        return self.down(checkpoint(lambda y: Exp.apply(y.sin()), x, use_reentrant=self.reentrant))


class WithNorm(Checkpointed):
    def build(self) -> tuple[Any, ...]:
        model = Normed(self.reentrant).double()
        return model, make_optimizer(self.optimizer, model.parameters())


class Penalized(WithNorm):
    """With a gradient of a gradient through the recomputation."""

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        loss = F.mse_loss(model(x), y)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


@pytest.mark.parametrize("case", [WithNorm(reentrant=True), Penalized()], ids=lambda case: type(case).__name__)
def test_agrees_with_batch_norm_and_gradients_of_gradients(ranks: Ranks, case: Checkpointed) -> None:
    assert_agrees(ranks, 2, case, "fully_shard")


def run(case: Checkpointed, style: str = "replicate", **options: Any) -> tuple[spmd.CompiledStep, list[Snapshot]]:
    spmd.seed(3)
    return compiled_run(0, case, steps=2, parallel_mode=spmd.DataParallel(style), **options)


def with_and_without(rank: int, world: int, reentrant: bool, style: str) -> list[str]:
    """The differences between a computation with checkpoints and without, with dropout."""
    _, expected = run(Checkpointed(form="plain", p=0.5), style)
    _, got = run(Checkpointed(form="each", reentrant=reentrant, p=0.5), style)
    return all_unequal(expected, got, 0, 1)


@pytest.mark.usefixtures("alone")
def test_dropout_is_that_of_the_step_without_checkpoint() -> None:
    _, expected = run(Checkpointed(form="plain", p=0.5))
    for form, reentrant in (("each", True), ("in_segments", False)):
        _, got = run(Checkpointed(form=form, reentrant=reentrant, p=0.5))
        assert not all_unequal(expected, got, 0, 1), (form, reentrant)


@pytest.mark.parametrize(("reentrant", "world", "style"), [
    (True, 2, "fully_shard"), pytest.param(False, 2, "replicate", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_dropout_on_ranks(ranks: Ranks, reentrant: bool, world: int, style: str) -> None:
    assert not any(ranks.run(world, with_and_without, reentrant, style))


class InNested(nn.Module):
    """The same computation, plain and in nested checkpoints, drawing inside and outside of them."""

    def __init__(self, wrapped: bool, reentrant: bool) -> None:
        super().__init__()
        self.wrapped, self.reentrant = wrapped, reentrant
        self.blocks = nn.Sequential(*(Block(4, 0.3) for _ in range(3)))

    def _run(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return checkpoint(function, x, use_reentrant=self.reentrant) if self.wrapped else function(x)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.2, self.training)
        x = self._run(lambda y: self.blocks[2](F.dropout(self._run(self.blocks[0], self.blocks[1](y)), 0.1)), x)
        return F.dropout(x, 0.2, self.training)


@pytest.mark.parametrize("autocast", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["", "autocast"])
@pytest.mark.usefixtures("alone")
def test_nested_with_draws_around(autocast: bool) -> None:
    """Under autocast, too, what is computed again is what was computed first: there is no difference at all."""

    def gradients(wrapped: bool, reentrant: bool = False) -> list[Tensor]:
        torch.manual_seed(0)
        model = InNested(wrapped, reentrant)
        x = torch.randn(8, 4)

        @spmd.compile
        def step(model: nn.Module, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=autocast):
                loss = model(x.clone().requires_grad_()).square().mean()
            loss.backward()
            return loss

        spmd.seed(1)
        return [step(model, x), *(parameter.grad for parameter in model.parameters())]

    expected = gradients(False)
    for reentrant in (False, True):
        torch.testing.assert_close(gradients(True, reentrant), expected, rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.usefixtures("alone")
def test_recomputation_stays_in_the_graph(reentrant: bool) -> None:
    """Every tanh of a block is there twice after all passes, the second in backward and marked.

    Checkpoint may leave modules by an exception; the update belongs to none of them.
    """
    step, _ = run(Checkpointed(form="each", reentrant=reentrant, p=0.5))
    assert step.program is not None
    nodes = {node.name: node for node in step.program.graph.nodes}
    tanhs = nodes_of(step, torch.ops.aten.tanh.default)
    again = [node for node in tanhs if "recompute_of" in node.meta]
    assert len(tanhs) == 4 and len(again) == 2
    assert {node.meta["recompute_of"] for node in again} == {node.name for node in tanhs if node not in again}
    assert all(node.meta["phase"] is Phase.BACKWARD for node in again)
    assert all(node.meta["module"] == nodes[node.meta["recompute_of"]].meta["module"] for node in again)
    drawn = step.program.graph.find_nodes(op="call_function", target=draw)
    assert len(drawn) == 4 and len({node.args[2] for node in drawn}) == 2
    update = [node for node in step.program.graph.nodes if node.meta.get("phase") is Phase.UPDATE]
    assert update and not any(node.meta.get("module") for node in update)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.usefixtures("alone")
def test_preserve_rng_state_false_draws_anew(reentrant: bool) -> None:
    """As in eager: the gradient of a dropped sum is the mask of the second draw, not that of the first."""

    @spmd.compile
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        y = checkpoint(lambda z: F.dropout(z, 0.5) * z, x, use_reentrant=reentrant, preserve_rng_state=False)
        y.sum().backward()
        return y.detach() / x.detach(), x.grad

    spmd.seed(0)
    first, second = step(torch.ones(64, 8))
    assert set(second.unique().tolist()) <= {0.0, 2.0, 4.0}
    assert not torch.equal(first != 0, second != 0)


def save_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy: matrix products are saved, all else is computed again."""
    saved = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.usefixtures("alone")
def test_selective_checkpoint() -> None:
    """It gives the gradients of the plain step."""

    def gradient(wrapped: bool) -> Tensor:
        torch.manual_seed(0)
        block = Block(4, 0.0).double()

        @spmd.compile
        def step(block: nn.Module, x: Tensor) -> None:
            contexts = partial(create_selective_checkpoint_contexts, save_products)
            y = checkpoint(block, x, use_reentrant=False, context_fn=contexts) if wrapped else block(x)
            y.square().mean().backward()

        step(block, torch.randn(8, 4, dtype=torch.float64))
        assert block.up.weight.grad is not None
        return block.up.weight.grad

    torch.testing.assert_close(gradient(True), gradient(False), rtol=1e-12, atol=1e-14)
