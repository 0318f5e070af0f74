"""Tables from published figures: rings within a host and between hosts, by hand; compute at what is achieved."""

from __future__ import annotations

import pytest
import torch

from passes import Axis, Kind, Mesh
from passes.analysis.collective_algorithms import Algorithm
from passes.schedule.gpus import ACHIEVED, GPUS, published
from passes.schedule.rates import rates_of

LARGE = 1 << 30


def seconds(gpu: str, mesh: Mesh, axis: int, size: int, kind: Kind = Kind.ALL_GATHER) -> float:
    point = published(gpu, mesh).links[axis].point(kind, Algorithm.NATIVE, size)
    assert point is not None and point.cpu == 0.0
    return point.seconds


def test_within_a_host_nvlink_counts() -> None:
    mesh = Mesh((Axis("dp", 8, "0"),))
    sent = LARGE * 7 / 8
    assert seconds("H100", mesh, 0, LARGE) == pytest.approx((8.4 + 7 * 3.4) * 1e-6 + sent / (0.8 * 450e9))
    twice = seconds("H100", mesh, 0, LARGE, Kind.ALL_REDUCE)
    assert twice == pytest.approx((8.4 + 14 * 3.4) * 1e-6 + 2 * sent / (0.8 * 450e9))


def test_between_hosts_all_network_cards_of_a_host_count() -> None:
    mesh = Mesh((Axis("dp", 16, "0"),))
    latency = (8.4 + 14 * 3.4 + 1 * 9.6) * 1e-6
    assert seconds("A100", mesh, 0, LARGE) == pytest.approx(latency + LARGE * 15 / 16 / (0.9 * 8 * 25e9))


def test_an_outer_axis_has_one_rank_on_each_host() -> None:
    mesh = Mesh((Axis("replicate", 64, "0"), Axis("shard", 8, "1")))
    outer, inner = (seconds("H100", mesh, axis, LARGE) for axis in (0, 1))
    assert outer == pytest.approx((8.4 + 63 * 9.6) * 1e-6 + LARGE * 63 / 64 / (0.9 * 50e9))
    assert inner == seconds("H100", Mesh((Axis("dp", 8, "0"),)), 0, LARGE)


def test_a_small_message_takes_the_quickest_protocol() -> None:
    mesh = Mesh((Axis("dp", 8, "0"),))
    assert seconds("H100", mesh, 0, 4096) == pytest.approx(
        (3.6 + 7 * 0.47 * 1.8) * 1e-6 + 4096 * 7 / 8 / (0.25 * 0.8 * 450e9)
    )


@pytest.mark.parametrize("gpu", GPUS)
def test_compute_is_what_is_achieved_of_the_peak(gpu: str) -> None:
    rates = rates_of(published(gpu, Mesh()), torch.device("cpu"), Mesh())
    assert rates is not None and rates.is_asynchronous and rates.transcendental(10**9) == 0.0
    flops = 10**15
    assert rates.products(torch.bfloat16, flops, flops) == pytest.approx(
        flops / (ACHIEVED["matmul"] * GPUS[gpu].tflops["bfloat16"] * 1e12)
    )
    assert rates.memory(10**12) == pytest.approx(1 / (ACHIEVED["memory"] * GPUS[gpu].memory))


def test_a_gpu_without_figures_is_named() -> None:
    with pytest.raises(ValueError, match=r"one of V100, A100, .*, got 'P100'"):
        published("P100", Mesh())
