"""Micro-batches on one rank beside the plain step: what a run takes, returns and leaves, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

import spmd
from examples.gpt import GPT, Config
from passes.ir.micro_batches import ACCUMULATOR
from passes.memory.peak_memory import planned_memory

pytestmark = pytest.mark.usefixtures("alone")

Rows = tuple[Tensor, ...]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def rows(count: int, seed: int = 0, dims: tuple[int, ...] = (5, 3)) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(count, n, generator=draw, dtype=torch.float64) for n in dims)


def regress(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    return loss


def both(
    step: Callable[..., Any], calls: list[Rows], count: int = 3, options: dict[str, Any] | None = None, **mode: Any
) -> tuple[list[Any], list[Any]]:
    """The results of all calls, looked at after the last one, and parameters: of the compiled and the plain step."""
    found = []
    compiled = spmd.compile(step, parallel_mode=spmd.DataParallel(micro_batches=count, **mode), **(options or {}))
    for each in (compiled, step):
        torch.manual_seed(0)
        model = net()
        returned = [each(model, *call) for call in calls]
        found.append([*returned, *(p.detach() for p in model.parameters())])
    return found[0], found[1]


def predicts(model: nn.Module, x: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
    loss.backward()
    return loss


def with_a_mean_of_arguments(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return model(x).sum(), y / y.abs().sum()


def with_a_mean_of_activations(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    predicted = model(x)
    return predicted - predicted.mean(0)


@pytest.mark.parametrize("passes", [None, ()], ids=["default", "no passes"])
def test_rows_that_are_returned_see_sums_over_all_rows(passes: Any) -> None:
    torch.testing.assert_close(*both(with_a_mean_of_arguments, [rows(12), rows(10, 1)], options={"passes": passes}))


def test_rows_that_need_sums_of_activations_are_an_error() -> None:
    with pytest.raises(spmd.PartitionError, match="it is known only when all have run"):
        both(with_a_mean_of_activations, [rows(12)])


@pytest.mark.parametrize("count", [2, 13])
def test_one_row_and_none(count: int) -> None:
    def total(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (model(x) - y).square().sum()

    torch.testing.assert_close(*both(regress, [rows(1)], count))
    torch.testing.assert_close(*both(total, [rows(3), rows(0), rows(1)], count))


def test_rows_along_another_dim_are_contiguous_in_each_run() -> None:
    def flattens(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return x.view(-1).sin().sum() + x.flatten().exp().sum() + y.sum()

    def transposed(seed: int) -> Rows:
        return tuple(each.view(4, 10, -1) for each in rows(40, seed))

    torch.testing.assert_close(*both(flattens, [transposed(0), transposed(1)], 5, input_batch_dim=1))


def test_arguments_with_other_numbers_of_rows() -> None:
    def squares(model: nn.Module, x: Tensor, w: Tensor) -> Tensor:
        return model(x).square().mean() + model(w).square().mean()

    def call(length: int) -> list[Rows]:
        return [(rows(12)[0], rows(length, 1)[0])]

    for length in (24, 7):
        torch.testing.assert_close(*both(squares, call(length), 4, inputs={"w": Shard(0)}))
    with pytest.raises(spmd.PartitionError, match="w has other rows than the rest, 5 on each rank"):
        both(squares, call(5), 4, inputs={"w": Shard(0)})


def test_without_an_axis_of_the_batch_advice_names_what_is_whole() -> None:
    def scales(model: nn.Module, x: Tensor, w: Tensor) -> Tensor:
        return (model(x) * w).square().mean()

    spmd.world("cpu")
    tensor = {"mesh": init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)), "axes": {"tensor": "tp"}}
    call = rows(12)[0], rows(1)[1][0]
    torch.testing.assert_close(*both(scales, [call], inputs={"w": Replicate()}, **tensor))
    with pytest.raises(spmd.PlacementError, match=r"inputs=\{'a_table_all_ranks_share': Replicate\(\)\}"):
        both(scales, [call], **tensor)
    with pytest.raises(spmd.PartitionError, match="and leave it out of inputs="):
        both(scales, [call], inputs={"x": Shard(0), "w": Replicate()}, **tensor)


@pytest.mark.parametrize(
    ("own", "sent", "held"),
    [
        (torch.bfloat16, torch.float32, {torch.float32}),
        (torch.float32, torch.bfloat16, {torch.float32}),
    ],
    ids=["wider", "narrower"],
)
def test_gradients_are_summed_in_the_wider_dtype(own: torch.dtype, sent: torch.dtype, held: set[Any]) -> None:
    """``reduce_dtype`` widens sums over micro-batches too, and rounds nothing that stays here."""
    compiled = spmd.compile(regress, parallel_mode=spmd.DataParallel(micro_batches=3, reduce_dtype=sent))
    compiled(net().to(own), *(each.to(own) for each in rows(12)))
    assert compiled.program is not None
    assert {each.dtype for each in compiled.program.inputs if each.role is ACCUMULATOR} == held


@pytest.mark.parametrize("count", [12, 10])
def test_gm_transformation_edits_all_runs(count: int) -> None:
    def sigmoid_for_tanh(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default):
            node.target = torch.ops.aten.sigmoid.default
        return gm

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return model(x).square().sum()

    options = {"gm_transformation": sigmoid_for_tanh, "passes": ()}
    found = [both(forward, [rows(count)], k, options)[0] for k in (1, 3)]
    torch.testing.assert_close(*found)


def test_an_override_that_edits_a_graph_needs_equal_parts() -> None:
    class Edits(spmd.Override):
        def transform(self, gm: Any, flat_state: list[Tensor]) -> Any:
            return gm

    mode, model = spmd.DataParallel(micro_batches=3), net()
    compiled = spmd.compile([Edits()], parallel_mode=mode)(regress)
    compiled(model, *rows(12))
    with pytest.raises(spmd.PassError, match="expected rows that 3 micro-batches divide"):
        compiled(model, *rows(10))


def test_memory_that_others_see_stays_in_uneven_runs() -> None:
    model, mode = net(), spmd.DataParallel("replicate", micro_batches=3)
    seen = model[0].weight.detach().numpy()  # type: ignore[union-attr,operator,index]
    spmd.compile(regress, parallel_mode=mode)(model, *rows(10))
    assert (torch.from_numpy(seen) == model[0].weight).all()  # type: ignore[index]


def test_pending_gradients_hold_all_micro_batches() -> None:
    def twice(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        with spmd.no_sync(model):
            F.mse_loss(model(x), y).backward()
        loss = F.mse_loss(model(x + 1), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = net()
    compiled = spmd.compile(twice, parallel_mode=spmd.DataParallel("fully_shard", micro_batches=3))
    assert spmd.verify(compiled, model, torch.optim.SGD(model.parameters(), 0.1), *rows(10), world=2, steps=2)


def test_an_error_in_a_run_changes_nothing() -> None:
    def looks_up(table: nn.Module, index: Tensor) -> Tensor:
        loss = table(index).square().sum()
        loss.backward()
        with torch.no_grad():
            table.weight -= 0.1 * table.weight.grad  # type: ignore[operator,arg-type]
        table.weight.grad = None  # type: ignore[assignment]
        return loss

    found = []
    for step in (spmd.compile(looks_up, parallel_mode=spmd.DataParallel(micro_batches=3)), looks_up):
        torch.manual_seed(0)
        table = nn.Embedding(10, 4).double()
        found.append([step(table, torch.arange(6))])
        with pytest.raises(IndexError):
            step(table, torch.tensor([0, 1, 2, 77, 4, 5]))
        found[-1] += [step(table, torch.arange(6)), table.weight]
    torch.testing.assert_close(*found)


def test_the_memory_of_a_step_is_that_of_the_run_with_the_most_rows() -> None:
    found = []
    for count in (300, 271):  # 30 rows in each run, and one in the last
        step = spmd.compile(regress, parallel_mode=spmd.DataParallel(micro_batches=10))
        step(net(), *rows(count))
        found.append(step.report().memory["cpu"].roles["activations"])
    assert 0 < found[0] <= 1.1 * found[1]


def test_activations_fall_with_their_number_and_the_report_says_so() -> None:
    """A GPT of 2 layers: what it says of eight parts is what the whole batch takes."""
    config, found, notes = Config(width=16, layers=2, heads=2, context=16), [], []
    x = torch.zeros(16, config.context, dtype=torch.int64)
    for count in (1, 8):
        step = spmd.compile(predicts, parallel_mode=spmd.DataParallel(micro_batches=count))
        step(GPT(config), x)
        found.append(step.report().memory["cpu"].roles["activations"])
        notes += step.report().notes
    assert 0 < found[1] <= 0.2 * found[0]
    noted = re.search(r"8 micro-batches: ([\d,]+) bytes of activations at once, of some ([\d,]+)", " ".join(notes))
    assert noted is not None
    once, whole = (int(each.replace(",", "")) for each in noted.groups())
    assert once == found[1] and abs(whole - found[0]) < 0.05 * found[0]


def test_a_step_takes_as_few_micro_batches_as_fit() -> None:
    def wide() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 256), nn.Linear(256, 256), nn.Linear(256, 3)).double()

    mode, batch = spmd.DataParallel(micro_batches="auto"), rows(4096)
    compiled, models = spmd.compile(regress, parallel_mode=mode, memory=20_000_000), [wide(), wide()]
    torch.testing.assert_close(compiled(models[0], *batch), regress(models[1], *batch))
    torch.testing.assert_close(list(models[0].parameters()), list(models[1].parameters()))
    assert compiled.program is not None and compiled.program.micro_batches is not None
    assert 1 < compiled.program.micro_batches.count < 64
    compiled(models[0], *rows(8))
    assert compiled.program.micro_batches is None, "few rows fit as they are"
    assert spmd.verify(spmd.compile(regress, parallel_mode=mode, memory=20_000_000), wide(), *batch, world=2, steps=1)
    with pytest.raises(ValueError, match='expected memory= with micro_batches="auto"'):
        spmd.compile(regress, parallel_mode=mode)


def test_a_budget_counts_the_longest_part() -> None:
    """The last of 30 parts has one row, the others 30."""
    mode, wide = spmd.DataParallel(micro_batches=30), nn.Sequential(nn.Linear(5, 512), nn.Linear(512, 3)).double()
    compiled = spmd.compile(regress, parallel_mode=mode)
    compiled(wide, *rows(871))
    assert compiled.program is not None and compiled.program.micro_batches is not None
    longest, last = compiled.program.earlier["accumulating"], replace(compiled.program, micro_batches=None, earlier={})
    needed, less = (planned_memory(each)["cpu"].peak for each in (longest, last))
    assert needed > less
    with pytest.raises(spmd.MemoryBudgetError):
        spmd.compile(regress, parallel_mode=mode, memory=needed - 1)(wide, *rows(871))
