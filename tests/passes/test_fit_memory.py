"""``fit`` on a program by hand: what it leaves alone, whose figures decide, and that more memory is never slower."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from passes import MemoryBudgetError, PassError, Phase, Program, Recompute, Role, default, estimate, fit_memory, run
from passes.fit_memory import Fitted, fit, refusal
from passes.memory.peak_memory import planned_memory
from passes.schedule.gpus import published
from passes.schedule.happens_before import check_streams
from passes.schedule.streams import assign_streams

from .programs import f64, make_program, moved_to_cuda

aten = torch.ops.aten
LAYERS, ROWS = 8, 4096


def alone(text: str) -> list[str]:
    return [text]


def step(w: Any, x: Any) -> Any:
    """A chain of products and functions, and a backward that reads all of these, the last one first."""
    kept, value = [], x
    for _ in range(LAYERS):
        value = aten.tanh.default(aten.mm.default(value, w))
        kept.append(aten.exp.default(value))
    gradient = aten.expand.default(aten.sum.default(kept[-1]), [ROWS, 16])
    for each in reversed(kept):
        gradient = aten.mm.default(aten.mul.Tensor(gradient, each), w)
    return (gradient,)


@pytest.fixture
def program() -> Program:
    made = make_program(step, {}, [Role.ACTIVATION], w=f64(16, 16), x=f64(ROWS, 16))
    phase = Phase.FORWARD
    for node in made.graph.nodes:
        if node.op == "call_function":
            node.meta["phase"] = phase
            phase = Phase.BACKWARD if node.target is aten.sum.default else phase
    return made


def figures(fitted: Fitted) -> tuple[int, float]:
    """The planned peak, and the estimated seconds."""
    final = run(fitted.program, fitted.pipeline)
    found = estimate(final)
    assert found is not None
    return sum(each.peak for each in planned_memory(final).values()), found.seconds


def most(program: Program) -> int:
    """What a budget has to be for all of it: values, and graphs."""
    return fit(program, default(), 1 << 40, alone).peak


def activations(program: Program) -> int:
    """The bytes that recomputation could save, and a few others."""
    return figures(fit(program, default(), 1 << 40, alone))[0]


def test_a_program_that_fits_stays_as_it_is(program: Program) -> None:
    peak = most(program)
    fitted = fit(program, default(), peak, alone)
    assert fitted.program is program and fitted.pipeline == default()
    assert fit(program, default(), peak - 1, alone).peak < peak


def test_more_memory_is_never_slower(program: Program) -> None:
    peak, before = most(program), 0.0
    found = list[float]()
    for budget in range(peak, 0, -activations(program) // 40):
        try:
            fitted = fit(program, default(), budget, alone)
        except MemoryBudgetError:
            break
        _, seconds = figures(fitted)
        assert fitted.peak <= budget and seconds >= before
        before = seconds
        found.append(seconds)
    assert len(set(found)) >= 3


def test_the_least_budget_that_is_named_fits_and_less_does_not(program: Program) -> None:
    with pytest.raises(MemoryBudgetError, match=r"at least ([\d.]+) MB") as refused:
        fit(program, default(), 1, alone)
    least = round(float(str(refused.value).partition("at least ")[2].partition(" MB")[0]) * 1e6)
    assert fit(program, default(), least, alone).peak <= least
    with pytest.raises(MemoryBudgetError):
        fit(program, default(), least - 20_000, alone)  # the sentence rounds up to 10 kB


def test_what_is_too_little_does_not_read_as_enough() -> None:
    assert "at least 1.01 MB per rank, with which this step runs, got 1.00 MB; it" in refusal(
        1_004_000, 1_005_000, "it"
    )


def test_few_of_the_candidates_are_made(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    budget, runs = most(program) - activations(program) // 5, list[int]()
    monkeypatch.setattr(fit_memory, "run", lambda *args, **kwargs: (runs.append(0), run(*args, **kwargs))[1])
    assert fit(program, default(), budget, alone).pipeline != default()
    assert len(runs) == 3  # the passes before it, the plain program, and the one that was expected to fit


def test_the_largest_figure_of_all_ranks_decides(program: Program) -> None:
    def beside_a_larger_one(text: str) -> list[str]:
        own = json.loads(text)
        other = [2 * each for each in own] if isinstance(own[0], (int, float)) else own
        return [text, json.dumps(other)]

    peak = most(program)
    assert fit(program, default(), 2 * peak - 1, beside_a_larger_one).pipeline != default()
    assert fit(program, default(), 2 * peak, beside_a_larger_one).pipeline == default()


def test_the_first_rank_says_what_is_computed_again(program: Program) -> None:
    others = list[list[list[str]]]()

    def with_another_first(text: str) -> list[str]:
        own = json.loads(text)
        if not isinstance(own[0], list):
            return [text, text]
        ops, offloaded = own[-1]
        others.append([[ops[k:], offloaded] for k in range(len(ops), -1, -1)])
        return [json.dumps(others[0]), text]

    fitted = fit(program, default(), most(program) - activations(program) // 10, with_another_first)
    (again,) = [each for each in fitted.pipeline if isinstance(each, Recompute)]
    assert again.ops and [list(again.ops), []] in others[0]


def test_on_a_gpu_values_wait_in_host_memory_while_copies_are_hidden(program: Program) -> None:
    """By the published figures of an H100; without such a link they are computed again."""
    for node in program.graph.nodes:
        node.meta["val"] = tree_map(moved_to_cuda, node.meta.get("val"))
    table = published("H100", program.mesh)
    pipeline = default(table=table)
    plain = fit(program, pipeline, 1 << 40, alone)
    least = plain.peak - 3 * 8 * 16 * ROWS
    fitted = fit(program, pipeline, least, alone)
    (recompute,) = [each for each in fitted.pipeline if isinstance(each, Recompute)]
    assert not recompute.ops and len(recompute.offloaded) >= 3
    assert "wait in host memory (0% more time" in fitted.note
    final = run(fitted.program, fitted.pipeline)
    assert planned_memory(final)["cuda:0"].peak <= least
    check_streams(final, assign_streams(final))
    without = {name: rate for name, rate in table.compute.items() if name != "host link"}
    fitted = fit(program, default(table=replace(table, compute=without)), least, alone)
    (recompute,) = [each for each in fitted.pipeline if isinstance(each, Recompute)]
    assert recompute.ops and not recompute.offloaded


def test_a_pipeline_in_which_nothing_can_be_chosen_is_refused(program: Program) -> None:
    with pytest.raises(PassError, match="the pipeline has neither"):
        fit(program, (), 1, alone)
