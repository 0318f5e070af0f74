"""Halves of a step as CUDA graphs: what moves is copied in, results are copied out, and reports have reasons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import passes
import spmd
from spmd.lowering import cuda_graphs
from tests.harness.cases import MLP, NARROW, STYLES
from tests.harness.on_cuda import OnCuda, moved
from tests.harness.op_capture import OpCapture
from tests.harness.oracle import all_unequal, compiled_run, plain_run

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Capture on the CPU; the list has what was captured."""
    found: list[Any] = []

    def capture(device: torch.device) -> OpCapture:
        found.append(OpCapture(device))
        return found[-1]

    monkeypatch.setattr(cuda_graphs, "CudaCapture", capture)
    monkeypatch.setattr(cuda_graphs, "device_of", lambda program: torch.device("cuda"))
    monkeypatch.setattr(cuda_graphs, "_is_on_host", lambda node: False)  # as it would be there
    yield found
    assert found and any(each.noted for each in found)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("optimizer", ["SGD momentum", "AdamW fused", "AdamW foreach"])
@pytest.mark.in_turn("optimizer")
def test_replayed_steps_equal_the_plain_ones(captures: list[Any], optimizer: str, style: str) -> None:
    case = replace(NARROW, optimizer=optimizer)
    _, got = compiled_run(0, case, 8, parallel_mode=spmd.DataParallel(style), cuda_graphs=True)
    assert all_unequal(plain_run(case, 1, 8), got, 0, 1) == []
    assert sum(bool(each.noted) for each in captures) == 1  # the second program, which has state from the start


class ClearedFirst(MLP):
    """Gradients stay after the step, which are copied out of the memory that is replayed in."""

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss


def test_gradients_stay_after_a_replay(captures: list[Any]) -> None:
    case = ClearedFirst(sizes=(9, 8, 4), rows=6, optimizer="SGD momentum")
    _, got = compiled_run(0, case, 6, cuda_graphs=True)
    assert all_unequal(plain_run(case, 1, 6), got, 0, 1) == []


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
    y = model(x) * scale
    loss = F.mse_loss(y, x.flip(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss, "rows": y, "given": x, "weight": model[0].weight.view(-1)}


def trained(steps: int, change: Any = None, **options: Any) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    run = spmd.compile(step, **options) if options else step
    kept = []
    for k in range(steps):
        if change is not None:
            change(k, model, optimizer)
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        found = run(model, optimizer, x, scale=1.0 + k / 10)
        assert found["given"] is x
        kept.append({name: found[name] for name in ("loss", "rows")})  # as the user keeps them, without a copy
        schedule.step()
    return [*kept, {name: p.detach().clone() for name, p in model.named_parameters()}]


def test_results_stay_and_numbers_change(captures: list[Any]) -> None:
    for one, other in zip(trained(7), trained(7, cuda_graphs=True), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_state_that_moves_is_captured_anew(captures: list[Any]) -> None:
    def move(k: int, model: Any, optimizer: Any) -> None:
        if k == 5:
            with torch.no_grad():
                model[0].weight.data = model[0].weight.detach() * 0.5

    for one, other in zip(trained(10, move), trained(10, move, cuda_graphs=True), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert sum(bool(each.noted) for each in captures) >= 1


def test_numbers_of_the_host_are_captured_anew_and_not_for_ever(captures: list[Any]) -> None:
    def change(k: int, model: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.1 + k // 4

    def always(k: int, model: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.1 + k

    for one, other in zip(trained(12, change), trained(12, change, cuda_graphs=True), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    with pytest.warns(UserWarning, match="a number from the host that changes from call to call"):
        found = trained(12, always, cuda_graphs=True)
    for one, other in zip(trained(12, always), found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_micro_batches_are_captured_too(captures: list[Any]) -> None:
    mode = spmd.DataParallel(micro_batches=3)
    _, got = compiled_run(0, NARROW, 8, parallel_mode=mode, cuda_graphs=True)
    assert all_unequal(plain_run(NARROW, 1, 8), got, 0, 1) == []


def test_a_program_that_writes_to_an_argument_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay would write to its own copy, and leave the user's as it was."""

    def halved(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        x.mul_(0.5)
        return y

    monkeypatch.setattr(cuda_graphs, "CudaCapture", OpCapture)
    monkeypatch.setattr(cuda_graphs, "device_of", lambda _: torch.device("cuda"))
    monkeypatch.setattr(cuda_graphs, "_is_on_host", lambda _: False)
    run, model = spmd.compile(halved, cuda_graphs=True), nn.Linear(6, 6)
    for _ in range(4):
        x = torch.ones(4, 6)
        run(model, x)
        assert x.eq(0.5).all()
    assert "runs without CUDA graphs: it writes to an argument of the call" in run.report().notes


def test_a_program_on_the_cpu_says_that_it_runs_as_it_is() -> None:
    compiled, _ = compiled_run(0, MLP(), 1, cuda_graphs=True)
    assert "runs without CUDA graphs: it does not run on a GPU" in compiled.report().notes


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [("AdamW", "make the optimizer with fused=True or capturable=True"), ("SGD momentum", ""), ("AdamW fused", "")],
)
def test_what_computes_on_the_host_is_named(optimizer: str, why: str) -> None:
    """Counters of an optimizer that is neither fused nor capturable are on the CPU."""
    compiled, _ = compiled_run(0, replace(NARROW, optimizer=optimizer), 2)
    partitioned = OnCuda().partition(compiled._dispatch.programs.all[-1].captured.program)
    program = passes.run(partitioned, passes.with_numbers_on_device(passes.default()))
    if optimizer == "AdamW fused":  # its counters are where its parameters are
        like = next(node.meta["val"] for node in program.graph.nodes if node.op == "call_function")
        for node in program.graph.nodes:
            node.meta["val"] = tree_map(partial(moved, device=like.device), node.meta.get("val"))
    found = cuda_graphs.why_not_captured(program)
    assert why in found if why else not found
