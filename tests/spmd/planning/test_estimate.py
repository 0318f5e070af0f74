"""Estimates of layouts: what they are made of adds up, and follows from formulas where there are some."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from passes import Kind, Phase
from passes.schedule.gpus import GPUS, TF32
from passes.schedule.op_work import OpClass
from spmd.planning.estimate import Estimate, State, Work, _Time, estimate
from spmd.planning.fitted import CONSTANTS
from spmd.planning.kernels import Amount, Kernel, Section
from spmd.planning.layout import Layout
from spmd.planning.machine import Constants, Machine, Software

IDEAL = Constants(
    matmul={"H": 1.0},
    attention={"H": 1.0},
    memory=1.0,
    nvlink=1.0,
    network=1.0,
    message=1.0,
    inner=0.0,
    tile=0.0,
    kernel=0.0,
    latency=0.0,
    hop=0.0,
    far_hop=0.0,
    spread=0.0,
    contention=0.0,
    knee=1000.0,
    reserved=0.0,
)
FREE = Software(launch=0.0, per_step=0.0, adds=False)


def machine(**software: Any) -> Machine:
    return Machine(GPUS["H100"], "H100", 8, replace(FREE, **software), IDEAL)


def section(name: str, count: int, numbers: float, flops: float = 1e12) -> Section:
    def kernels(times: float) -> list[Kernel]:
        return [Kernel(OpClass.MATMUL, Amount(), Amount(0.0, times * flops))]

    work = {Phase.FORWARD: kernels(1), Phase.BACKWARD: kernels(2)}
    none = {Phase.FORWARD: [], Phase.BACKWARD: []}
    return Section(name, count, work, none, numbers, Amount(0.0, 1e6), Amount(0.0, 1e5))


def work(count: int = 4, numbers: float = 1e8, ends: float = 0.0) -> Work:
    made = [section("first", 1, ends, 0.0), section("block", count, numbers), section("last", 1, ends, 0.0)]
    return Work(made, made, State(2, 2, 8))


def step(layout: Layout, count: int = 4, numbers: float = 1e8, **software: float) -> Estimate:
    return estimate(work(count, numbers), layout, machine(**software))


BLOCK = 3e12 / 989.4e12  # seconds of a row


def test_causes_add_up_to_the_step_and_roles_to_the_peak() -> None:
    for style in ("replicate", "shard_optimizer", "fully_shard"):
        found = estimate(work(), Layout(16, style, 2, 2), Machine(GPUS["A100"], "A100", 8, Software(), CONSTANTS))
        assert sum(found.causes.values()) == pytest.approx(found.seconds)
        assert sum(found.memory.values()) == found.peak
        assert all(took >= 0 for took in found.causes.values()), found.causes


def test_one_rank_computes_and_updates_and_does_nothing_else() -> None:
    found = step(Layout(1, rows=2, micro_batches=3))
    assert found.causes["compute"] == pytest.approx(2 * 3 * 4 * BLOCK)
    assert found.causes["update"] == pytest.approx(4e8 * (2 * 2 + 2 + 2 * 8) / 3.35e12)
    assert found.seconds == pytest.approx(found.causes["compute"] + found.causes["update"])


def test_gradients_are_reduced_once_a_step_by_a_ring() -> None:
    found = step(Layout(8, micro_batches=5))
    assert found.causes["reduction"] == pytest.approx(2 * 4e8 * 2 * 7 / 8 / 450e9)
    far = step(Layout(64, micro_batches=5))  # eight cards of a host serve one ring
    assert far.causes["reduction"] == pytest.approx(2 * 4e8 * 2 * 63 / 64 / 400e9)


def test_each_bucket_of_gradients_has_the_latency_of_a_collective() -> None:
    slow = replace(machine(bucket=1e8), constants=replace(IDEAL, latency=1e-3))
    found = estimate(work(), Layout(8), slow).causes["reduction"]
    assert found == pytest.approx(step(Layout(8)).causes["reduction"] + 8e-3)  # 8e8 bytes


def test_gradients_are_added_once_for_each_of_several_micro_batches() -> None:
    one, several = (step(Layout(1, micro_batches=n), adds=True).causes["compute"] for n in (1, 3))
    assert one == pytest.approx(4 * BLOCK)
    assert several == pytest.approx(3 * (4 * BLOCK + 4e8 * 3 * 2 / 3.35e12))  # two are read, one is written


def test_units_are_gathered_beside_compute() -> None:
    gather = 1e8 * 2 * 7 / 8 / 450e9
    assert gather < BLOCK / 3, "or it would be exposed"
    assert step(Layout(8, "fully_shard")).causes["gathers"] == 0
    slow = step(Layout(8, "fully_shard"), numbers=1e10)
    unit = 100 * gather
    assert slow.causes["gathers"] == pytest.approx(4 * (unit - BLOCK / 3 + 2 * unit - 2 * BLOCK / 3))
    kept = step(Layout(8, "fully_shard", keeps_gathered=True), numbers=1e10)
    assert kept.causes["gathers"] == pytest.approx(4 * (unit - BLOCK / 3 + max(0, unit - 2 * BLOCK / 3)))


def test_stages_idle_as_in_1f1b() -> None:
    one, staged = step(Layout(1, micro_batches=8)), step(Layout(4, micro_batches=8, stages=4))
    messages = staged.causes["messages"] * (1 + 3 / 8)
    whole = one.causes["compute"]
    assert staged.causes["compute"] == pytest.approx(whole / 4)
    assert staged.causes["compute"] + staged.causes["pipeline"] == pytest.approx(
        whole / 4 * (1 + 3 / 8) + messages - staged.causes["messages"]
    )
    chunks = step(Layout(4, micro_batches=8, stages=4, chunks=2))
    assert chunks.causes["pipeline"] < staged.causes["pipeline"]


def test_recomputation_trades_time_for_memory() -> None:
    kept, again = (step(Layout(8, rows=8, recompute=each)) for each in ("none", "full"))
    assert again.causes["compute"] == pytest.approx(kept.causes["compute"] * 4 / 3)
    assert again.memory["activations"] < kept.memory["activations"]


def test_state_is_divided_as_the_style_says() -> None:
    memory = {style: step(Layout(8, style)).memory for style in ("replicate", "shard_optimizer", "fully_shard")}
    assert [memory[s]["optimizer"] for s in memory] == [4e8 * 8, 4e8, 4e8]
    assert [memory[s]["parameters"] for s in memory] == [4e8 * 2, 4e8 * 2, 1e8]
    assert [memory[s]["gradients"] for s in memory] == [4e8 * 2, 4e8 * 2, 1e8]
    once = step(Layout(8, "fully_shard", micro_batches=2, reduces_once=True)).memory
    assert once["gradients"] == 4e8 * 2


def test_ranks_that_hold_what_was_sent_keep_their_exact_parts() -> None:
    rounded = replace(work(), state=replace(work().state, gathered=1, master=2))
    found = [
        estimate(rounded, Layout(8, style), machine()) for style in ("replicate", "shard_optimizer", "fully_shard")
    ]
    assert [each.memory["optimizer"] for each in found] == [4e8 * 8, 4e8 + 4e8 * 2 / 8, 4e8]


def test_a_host_that_launches_slowly_bounds_small_kernels() -> None:
    found = step(Layout(1), launch=1.0)
    assert found.causes["compute"] == pytest.approx(4 * 2 + 2 * 2)  # two launches of each block, and of each end


@pytest.mark.parametrize("kind, times", [(Kind.ALL_REDUCE, 2), (Kind.ALL_GATHER, 1), (Kind.REDUCE_SCATTER, 1)])
def test_collectives_by_ring(kind: Kind, times: int) -> None:
    ideal = machine()
    assert ideal.collective(kind, 8e9, 1) == 0
    assert ideal.collective(kind, 8e9, 4) == pytest.approx(times * 8e9 * 3 / 4 / 450e9)
    assert ideal.collective(kind, 8e9, 4, stride=8) == pytest.approx(times * 8e9 * 3 / 4 / 50e9)
    assert ideal.collective(kind, 8e9, 16, stride=4) == pytest.approx(times * 8e9 * 15 / 16 / 100e9)


def test_tokens_go_to_other_hosts_over_the_network_once_a_host() -> None:
    ideal = machine()
    assert ideal.all_to_all(8e9, 1) == 0
    assert ideal.all_to_all(8e9, 8) == pytest.approx(8e9 * 7 / 8 / 450e9)
    assert ideal.all_to_all(8e9, 16) == pytest.approx(8e9 / 2 / 50e9)
    both = 8e9 / 8 * (1 - 1 / 2**8)  # of 8 copies, almost always one or more go to the other host
    assert ideal.all_to_all(8e9, 16, copies=8) == pytest.approx(both / 50e9)


def test_host_and_device_bound_a_step_together_where_they_are_close() -> None:
    found = {knee: _Time(3.0, 4.0, 0.5, knee).seconds for knee in (2.0, 1000.0)}
    assert found == {2.0: pytest.approx(5.5), 1000.0: pytest.approx(4.5)}


def test_float32_is_computed_as_tf32_where_that_is_allowed() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert GPUS["H100"].peak("float32") == pytest.approx(66.9e12)
        torch.set_float32_matmul_precision("high")
        assert GPUS["H100"].peak("float32") == 989.4e12 / 2 * TF32
        assert GPUS["V100"].peak("float32") == pytest.approx(15.7e12)  # which has none
    finally:
        torch.set_float32_matmul_precision(before)


def test_stages_share_the_ends_of_a_model_where_blocks_are_balanced() -> None:
    ends = work(ends=1e3)
    ends = replace(ends, plain=[*ends.plain[:2], section("last", 1, 1e3)])
    layout = Layout(2, micro_batches=8, stages=2)
    took = [estimate(ends, layout, machine(balances=each)).seconds for each in (False, True)]
    assert took[0] - took[1] == pytest.approx(8 * BLOCK / 2 - BLOCK / 2)


def test_fitted_constants_are_possible() -> None:
    fractions = [*CONSTANTS.matmul.values(), *CONSTANTS.attention.values(), CONSTANTS.memory, CONSTANTS.nvlink]
    assert all(0 < each < 1 for each in [*fractions, CONSTANTS.network, CONSTANTS.message, CONSTANTS.float8])
