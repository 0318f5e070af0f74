"""Micro-batches beside the plain step on the whole batch: sums of all kinds, rows, draws, and later programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

import spmd
from passes import Pass, Program
from passes.runtime.random import draw
from tests.harness.cases import make_optimizer, mlp
from tests.harness.oracle import (
    Case,
    Later,
    all_unequal,
    assert_agrees,
    compiled_run,
    plain_run,
    random_generator,
)
from tests.harness.pool import Ranks

STYLES: dict[str, dict[str, Any]] = {
    "replicate": {"parallel_style": "replicate"},
    "fully_shard": {"parallel_style": "fully_shard", "gather_parameters": "once"},
    "shard_optimizer": {"parallel_style": "replicate", "shard_optimizer": True},
    "each": {"parallel_style": "fully_shard", "reduce_gradients": "each"},
}


def masked(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """The mean over rows that count, of which micro-batches and ranks have other numbers (torchtitan#2206, #2972)."""
    labels = torch.where(y[:, 0] > 0.3, 1, -100)
    loss = F.cross_entropy(model(x), labels, ignore_index=-100)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def clipped(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Clipping by the norm of whole gradients (torchtitan#596, pytorch#162638); results with rows, sums over them."""
    predicted = model(x)
    loss = F.mse_loss(predicted, y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss, "norm": norm, "predicted": predicted, "right": (predicted > 0).sum(), "rows": len(x)}


STEPS = {"masked": masked, "clipped": clipped}


@dataclass(frozen=True)
class Rows(Case):
    """``rows`` rows on each rank."""

    name: str
    optimizer: str = "SGD momentum"
    rows: int = 6
    tied: bool = False

    def build(self) -> tuple[Any, ...]:
        model = mlp(5, 5, 3) if self.tied else mlp(5, 7, 3)
        if self.tied:
            model = nn.Sequential(model[0], nn.Tanh(), model[0], *model[1:])
        return model, make_optimizer(self.optimizer, model.parameters())

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        draw = random_generator(rank, step)
        return tuple(torch.randn(self.rows, n, generator=draw, dtype=torch.float64) for n in (5, 3))

    @property
    def step(self) -> Any:  # type: ignore[override]
        return STEPS[self.name]


@pytest.mark.parametrize(
    ("style", "name", "optimizer"),
    [
        ("replicate", "masked", "SGD momentum"),
        ("fully_shard", "clipped", "AdamW fused"),
        ("shard_optimizer", "masked", "AdamW fused"),
        ("each", "clipped", "AdamW fused"),
    ],
)
def test_numbers_are_those_of_the_whole_batch(ranks: Ranks, style: str, name: str, optimizer: str) -> None:
    """Of later programs, too: their third batch has five rows, which three do not divide."""
    rows = Rows(name, optimizer, tied=style == "each")
    case, steps = (Later(rows), 5) if style == "fully_shard" else (rows, 3)
    assert_agrees(ranks, 2, case, STYLES[style] | {"micro_batches": 3}, steps=steps)


@pytest.mark.parametrize(("rows", "count"), [(9, 8), (3, 8)])
def test_rows_and_micro_batches_of_any_number(ranks: Ranks, rows: int, count: int) -> None:
    assert_agrees(ranks, 2, Rows("clipped", rows=rows, tied=True), {"micro_batches": count}, steps=3)


# On simulated ranks


def regress(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    predicted = model(x)
    loss = F.mse_loss(predicted, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss, predicted


def batch(rows: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(rows, n, generator=draw, dtype=torch.float64) for n in (5, 3))
    return x, y


def verified(step: Callable[..., Any], model: nn.Module, rows: int = 12, passes: Any = None, **mode: Any) -> Any:
    compiled = spmd.compile(step, parallel_mode=spmd.DataParallel(**mode), passes=passes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return spmd.verify(compiled, model, optimizer, *batch(rows), world=2, steps=2)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("rows", "passes"), [(10, None), (12, ())], ids=["default", "no passes"])
def test_draws_follow_the_rows(rows: int, passes: Any) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.3), nn.Linear(7, 3)).double()
    mode = {"parallel_style": "fully_shard", "gather_parameters": "each"}
    assert verified(regress, model, rows, passes, micro_batches=3, **mode)


@pytest.mark.usefixtures("alone")
def test_draws_of_a_shorter_part_where_ranks_pass_equal_rows() -> None:
    """``verify`` puts the values of nodes of one name together: what says where a draw begins takes no other's name."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.3), nn.Linear(7, 3)).double()
    assert verified(regress, model, 10, passes=(), axes={"tensor": "dp"}, micro_batches=3)


@pytest.mark.usefixtures("alone")
def test_each_micro_batch_reduces_what_ranks_update() -> None:
    mode = STYLES["shard_optimizer"] | {"reduce_gradients": "each"}
    assert verified(masked, mlp(5, 7, 3), micro_batches=3, **mode)


@pytest.mark.usefixtures("alone")
def test_masks_are_those_of_the_whole_batch_by_position() -> None:
    """With an invariant seed, a mask depends on the row's place in the batch alone."""
    found = []
    for count in (1, 3):
        model = nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5)).double()
        model[0].requires_grad_(False).weight.zero_()
        nn.init.ones_(model[0].bias)
        compiled = spmd.compile(lambda m, x: m(x), parallel_mode=spmd.DataParallel(micro_batches=count))
        spmd.seed(3, invariant=True)
        found.append(compiled(model, batch(6)[0]))
    assert 0 < int((found[0] == 0).sum()) < found[0].numel()
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def attends(x: Tensor) -> Tensor:
    heads = x.unsqueeze(1).expand(-1, 8, -1).unflatten(2, (1, 5)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)


@pytest.mark.usefixtures("alone")
def test_masks_of_attention_are_those_of_the_whole_batch_by_position() -> None:
    found = []
    for options in ({}, {"micro_batches": 4}, {"bits": "same", "virtual": 8}, {"bits": "same", "virtual": 2}):
        compiled = spmd.compile(attends, parallel_mode=spmd.DataParallel(**options))
        spmd.seed(3, invariant=True)
        found.append(compiled(batch(8)[0]))
    spmd.seed(None)
    assert not torch.equal(found[0][0, 0, 0], found[0][0, 0, 1]), "of equal queries, by their masks alone"
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])


@pytest.mark.usefixtures("alone")
def test_beside_tensor_parallel() -> None:
    split = {"0.*": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}}
    params = {f"model.{name}": placed for name, placed in split.items()}
    mode = spmd.DataParallel(
        "fully_shard",
        axes={"batch": "dp", "tensor": "tp"},
        params=params,
        micro_batches=2,
        accumulate_dtype=torch.float64,
    )
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = spmd.compile(clipped, parallel_mode=mode)
    assert spmd.verify(compiled, model, optimizer, *batch(12), mesh={"dp": 2, "tp": 2}, steps=2)


@pytest.mark.parametrize(("role", "rows"), [("tensor", 4), ("sequence", 5)])
def test_on_a_mesh_whose_ranks_pass_equal_rows(ranks: Ranks, role: str, rows: int) -> None:
    params = {"*.0.weight": {"dp": Shard(0)}} if role == "tensor" else {}
    mode = {"axes": {role: "dp"}, "params": params, "micro_batches": 2}
    assert not any(ranks.run(2, with_equal_rows, Rows("clipped", rows=rows), mode))


def with_equal_rows(rank: int, world: int, case: Case, mode: dict[str, Any]) -> list[str]:
    """What differs where each rank passes the whole batch."""
    _, got = compiled_run(0, case, 3, parallel_mode=spmd.DataParallel(**mode))
    return all_unequal(plain_run(case, 1, 3), got, 0, 1)


@pytest.mark.usefixtures("alone")
def test_under_autocast() -> None:
    found = []
    for count in (1, 3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 64), nn.GELU(), nn.Linear(64, 3))
        compiled = spmd.compile(regress, parallel_mode=spmd.DataParallel(micro_batches=count))
        x, y = (each.float() for each in batch(12))
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = compiled(model, torch.optim.SGD(model.parameters(), lr=0.1), x, y)
        found.append([loss, *(p.detach() for p in model.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-3)


class Recurrent(nn.Module):
    """Its first state is filled with zeros: nothing says how to split it."""

    def __init__(self, cells: Any) -> None:
        super().__init__()
        self.cells, self.head = cells(5, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(torch.stack([x, -x], 1))[0][:, -1])  # type: ignore[no-any-return]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("cells", "options"), [(nn.LSTM, {"micro_batches": 3}), (nn.GRU, {"bits": "same", "virtual": 4})]
)
def test_recurrent_modules(cells: Any, options: dict[str, Any]) -> None:
    compiled = spmd.compile(regress, parallel_mode=spmd.DataParallel(**options), passes=())
    model = Recurrent(cells).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    verdict = spmd.verify(compiled, model, optimizer, *batch(24), world=2, steps=1, bits="bits" in options)
    assert verdict, verdict


def merges(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    predicted = model(x.unsqueeze(1).expand(-1, 4, -1)).flatten(0, 1)
    loss = F.mse_loss(predicted, y.repeat_interleave(4, 0))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("rows", "runs"), [(12, 3), pytest.param(16, 4, marks=pytest.mark.exhaustive), (10, 5)])
def test_equal_parts_where_rows_merge_with_other_dims(rows: int, runs: int) -> None:
    model = nn.Sequential(nn.Linear(5, 3)).double()
    compiled = spmd.compile(merges, parallel_mode=spmd.DataParallel(micro_batches=3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert spmd.verify(compiled, model, optimizer, *batch(rows), world=2, steps=2)
    compiled(model, optimizer, *batch(rows // 2))
    assert compiled.program is not None and compiled.program.micro_batches is not None
    assert compiled.program.micro_batches.count == runs
    assert any(f"it runs {runs} times" in note for note in compiled.report().notes) == (runs != 3)


def balanced(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    net, criterion = model
    loss = criterion(net(x), torch.where(y[:, 0] > 0.3, 1, torch.where(y[:, 1] > 0.3, 2, -100)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss  # type: ignore[no-any-return]


@pytest.mark.usefixtures("alone")
def test_a_mean_with_weights_of_classes() -> None:
    model = nn.ModuleList([nn.Linear(5, 3), nn.CrossEntropyLoss(torch.tensor([0.2, 1.0, 3.0]))]).double()
    assert verified(balanced, model, passes=(), parallel_style="fully_shard", micro_batches=3)


def contrasts(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    z = model(x)
    loss = (z @ z.T).logsumexp(1).mean()
    loss.backward()
    optimizer.step()
    return loss


def numbers_rows(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = (model(x).sum(1) * torch.arange(len(x))).mean()
    loss.backward()
    optimizer.step()
    return loss


def keeps(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    model.last = model(x)
    return model.last.sum()


NORM = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).double()
LINEAR = nn.Sequential(nn.Linear(5, 3)).double()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("step", "model", "expected"),
    [
        (contrasts, LINEAR, "needs rows of all micro-batches at once"),
        (regress, NORM, "follows from model.0.weight: it is known only when all have run"),
        (keeps, LINEAR, "is left after the step with rows of the batch"),
    ],
)
def test_what_needs_other_rows_is_an_error_at_its_line(step: Any, model: nn.Module, expected: str) -> None:
    with pytest.raises(spmd.PartitionError, match=expected):
        verified(step, model, parallel_style="replicate", micro_batches=3)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"micro_batches": 3, "statistics": "per_micro_batch"}, "takes micro-batches of equal size, but x has 10 rows"),
        (
            {"bits": "same", "virtual": 2, "reduce_dtype": torch.float32},
            "expected gradients to be reduced in their own",
        ),
        (
            {"bits": "same", "virtual": 2, "parallel_style": "fully_shard", "gather_dtype": torch.float32},
            "expected no gather_dtype",
        ),
    ],
)
def test_options_that_would_change_numbers(options: dict[str, Any], expected: str) -> None:
    compiled = spmd.compile(regress, parallel_mode=spmd.DataParallel(**options))
    with pytest.raises(spmd.PartitionError, match=expected):
        compiled(LINEAR, torch.optim.SGD(LINEAR.parameters()), *batch(10))


@pytest.mark.usefixtures("alone")
def test_a_row_knows_its_place_in_the_batch() -> None:
    assert verified(numbers_rows, LINEAR, passes=(), parallel_style="replicate", micro_batches=3)


@pytest.mark.usefixtures("alone")
def test_wider_accumulators() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).bfloat16()
    compiled = spmd.compile(
        regress, parallel_mode=spmd.DataParallel(micro_batches=3, accumulate_dtype=torch.float32), passes=()
    )
    x, y = (each.bfloat16() for each in batch(6))
    compiled(model, torch.optim.SGD(model.parameters(), lr=0.1), x, y)
    assert compiled.program is not None
    held = [each.dtype for each in compiled.program.inputs if each.role == "accumulator"]
    assert held and set(held) == {torch.float32}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"micro_batches": 0}, "1 or more"),
        ({"micro_batches": 2, "reduce_gradients": "each", "axes": {"stages": "pp"}}, "with stages: sums there"),
        ({"micro_batches": 2, "defer_updates": True}, "leave out one of them"),
        ({"accumulate_dtype": torch.int64}, "a dtype of floating point"),
        ({"statistics": "per_micro_batch"}, "expected micro_batches="),
        ({"micro_batches": 2, "gather_parameters": "once"}, "parameters that the style splits"),
        ({"parallel_style": "fully_shard", "gather_parameters": "each"}, "nothing else gathers several times"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        spmd.DataParallel(**options)


@pytest.mark.usefixtures("alone")
def test_ways_to_look_at_a_call_that_know_one_program_only_say_so() -> None:
    mode = spmd.DataParallel(micro_batches=3)
    compiled, model = spmd.compile(regress, parallel_mode=mode), nn.Linear(5, 3).double()
    with pytest.raises(spmd.SpmdError, match="runs a program for each micro-batch"):
        compiled.profile()
    together = spmd.compile(regress, parallel_mode=spmd.DataParallel(bits="same", virtual=4, micro_batches=2))
    with pytest.raises(ValueError, match=r"use spmd\.verify"):
        spmd.certify(together, model, torch.optim.SGD(model.parameters()), *batch(16), world=1)
    with pytest.raises(ValueError, match="expected no check with micro_batches"):
        spmd.compile(regress, parallel_mode=mode, check="first")


@pytest.mark.usefixtures("alone")
def test_compile_time_and_code_do_not_depend_on_their_number() -> None:
    counts = []
    for count in (2, 4):
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        compiled = spmd.compile(regress, parallel_mode=spmd.DataParallel(micro_batches=count))
        compiled(model, torch.optim.SGD(model.parameters(), lr=0.1), *batch(12))
        program = compiled.program
        assert program is not None
        accumulates = program.earlier["accumulating"]
        counts.append((len(program.graph.nodes), len(accumulates.graph.nodes)))
        updates = {each.name for each in accumulates.inputs if each.in_place}
        assert updates and all(name.startswith("accumulated.") for name in updates)
    assert counts[0] == counts[1] and counts[0][1] < counts[0][0]


@dataclass(frozen=True)
class Forgets(Pass):
    """A wrong pass: one accumulator keeps the last micro-batch alone."""

    def rewrite(self, program: Program) -> int:
        node = next(node for name, (_, node) in program.values().items() if name.startswith("accumulated."))
        (add,) = node.users
        add.replace_all_uses_with(add.args[1])
        return 1


@dataclass(frozen=True)
class DrawsAnew(Pass):
    """A wrong pass: each micro-batch draws what the first one does."""

    def rewrite(self, program: Program) -> int:
        drawn = [node for node in program.graph.nodes if node.target is draw]
        for node in drawn:
            node.update_arg(3, [(0, *rest) for _, *rest in node.args[3]])
        return len(drawn)


@dataclass(frozen=True)
class CountsParts(Pass):
    """A wrong pass: the mean of the means of parts, each by its own count of labels."""

    def rewrite(self, program: Program) -> int:
        nodes = {name: node for name, (_, node) in program.values().items()}
        whole, (first, *_) = nodes["all of y"], sorted(nodes["all of y"].users)
        with program.graph.inserting_before(first):
            repeated = program.graph.call_function(torch.ops.aten.repeat.default, (nodes["y"], [3, 1]))
        whole.replace_all_uses_with(repeated, delete_user_cb=lambda user: user is not repeated)
        return 1


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("step", "wrong"), [(regress, Forgets()), (regress, DrawsAnew()), (masked, CountsParts())])
def test_verify_catches_what_is_wrong_in_micro_batches(step: Callable[..., Any], wrong: Pass) -> None:
    model = nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.3), nn.Linear(64, 3)).double()
    found = verified(step, model, passes=[wrong], parallel_style="replicate", micro_batches=3)
    assert not found and type(wrong).__name__ in str(found)


def normed(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    if optimizer is not None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return loss


def with_norms() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3), nn.BatchNorm1d(3), nn.Tanh()]
    return nn.Sequential(*layers).double()


def statistics_of_parts(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, nn.Module]:
    """Each micro-batch by the plain step from the same state; then the means of losses, gradients and statistics."""
    models = [with_norms() for _ in parts]
    losses = [normed(model, None, *part) for model, part in zip(models, parts, strict=True)]
    mean, rows = models[0], len(parts[0][0])
    for name, buffer in mean.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.stack([dict(model.named_buffers())[name] for model in models]).mean(0))
        if name.endswith("running_var"):  # torch corrects a variance by the rows that it has; here, by all
            of_all = rows * len(parts) / (rows * len(parts) - 1) * (rows - 1) / rows
            buffer.copy_(0.9 + (buffer - 0.9) * of_all)
    for name, parameter in mean.named_parameters():
        gradients = [dict(model.named_parameters())[name].grad for model in models]
        parameter.grad = torch.stack([each for each in gradients if each is not None]).mean(0)
    nn.utils.clip_grad_norm_(mean.parameters(), 0.1)
    torch.optim.SGD(mean.parameters(), lr=0.1).step()
    return torch.stack(losses).mean(), mean


def with_statistics_of_parts(rank: int, world: int) -> None:
    """A compiled step beside these."""
    mode = spmd.DataParallel(micro_batches=3, statistics="per_micro_batch")
    model, (x, y) = with_norms(), batch(24)
    own = (x.chunk(world)[rank], y.chunk(world)[rank])
    loss = spmd.compile(normed, parallel_mode=mode)(model, torch.optim.SGD(model.parameters(), lr=0.1), *own)
    of_ranks = [
        list(zip(*(each.chunk(3) for each in pair), strict=True))
        for pair in zip(x.chunk(world), y.chunk(world), strict=True)
    ]
    parts = [tuple(torch.cat(each) for each in zip(*of_part, strict=True)) for of_part in zip(*of_ranks, strict=True)]
    expected, mean = statistics_of_parts(parts)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12)
    for one, other in zip(model.buffers(), mean.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    for one, other in zip(model.parameters(), mean.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)


def test_statistics_of_each_micro_batch(ranks: Ranks) -> None:
    ranks.run(2, with_statistics_of_parts)


def checks_and_masks(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    torch._assert_async(x.sum() < 1e9, "too large")
    return masked(model, optimizer, x, y)


@pytest.mark.usefixtures("alone")
def test_what_is_computed_ahead_leaves_the_checks_of_a_step() -> None:
    model = mlp(5, 7, 3)
    compiled = spmd.compile(checks_and_masks, parallel_mode=spmd.DataParallel(micro_batches=3), passes=())
    compiled(model, torch.optim.SGD(model.parameters(), lr=0.1), *batch(6))
    assert compiled.program is not None
    assert torch.ops.aten._assert_async.msg in {node.target for node in compiled.program.graph.nodes}
