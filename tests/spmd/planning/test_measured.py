"""Machines by a table that was measured: products, memory, launches, and links within a host and between hosts."""

from __future__ import annotations

import pytest

from passes import Axis, Kind, Table
from passes.analysis.collective_algorithms import BUILT_IN, Algorithm, Link, Point
from passes.schedule.op_work import OpClass
from spmd.planning.fitted import CONSTANTS
from spmd.planning.kernels import Amount, Kernel
from spmd.planning.machine import Machine, Software
from spmd.planning.measured import HOST, KINDS, measured

COMPUTE = {
    "matmul float32": 5e13,
    "matmul bfloat16 1024": 2e14,
    "matmul bfloat16 4096": 6e14,
    "memory": 3e12,
    "launches": 2e5,
    "views": 1e6,
}


def link(axis: str, ranks: int, latency: float, rate: float) -> Link:
    """What all-reduces take that begin within ``latency`` seconds, and send ``rate`` bytes a second."""
    sizes = (4096, 1 << 30)
    sent = [2 * size * (ranks - 1) / ranks for size in sizes]
    points = tuple(Point(size, latency + (n - sent[0]) / rate, 0.0) for size, n in zip(sizes, sent, strict=True))
    return Link("nccl", axis, ranks, {(Kind.ALL_REDUCE, Algorithm.NATIVE): points})


def machine(gpu: str = "H100") -> Machine:
    return Machine(KINDS[gpu], gpu, 8, Software(), CONSTANTS)


def test_a_table_replaces_published_figures() -> None:
    found = measured(machine(), Table("costs.json", (), COMPUTE))
    assert found.peak("bfloat16") * found.constants.matmul["H"] == 6e14
    assert found.peak("float64") / found.peak("bfloat16") == pytest.approx(66.9 / 989.4)  # of what was not measured
    assert found.bandwidth == 3e12
    assert found.software.launch == pytest.approx(1 / 2e5 + 1 / 1e6)
    half = Kernel(OpClass.ATTENTION, Amount(), Amount(1e12))
    by_products = CONSTANTS.matmul["H"] * 989.4e12 / 6e14
    before, after = (each.kernel(half, 1) - CONSTANTS.kernel for each in (machine(), found))
    assert after == pytest.approx(before * by_products)


def test_links_belong_to_a_host_or_to_the_network_by_the_ranks_between_theirs() -> None:
    links = link("dp", 4, 5e-5, 40e9), link("tp", 8, 4e-5, 300e9)
    found = measured(machine(), Table("costs.json", links, COMPUTE))
    assert found.collective(Kind.ALL_REDUCE, 1 << 30, 8) == pytest.approx(links[1].curves[_KEY][1].seconds, rel=0.01)
    took = found.collective(Kind.ALL_REDUCE, 1 << 30, 4, stride=8)
    assert took == pytest.approx(links[0].curves[_KEY][1].seconds, rel=0.01)


_KEY = Kind.ALL_REDUCE, Algorithm.NATIVE


def test_without_a_table_only_hosts_without_gpus_are_measured() -> None:
    assert measured(machine(), None) == machine()
    host = measured(machine(HOST), None)
    product = Kernel(OpClass.MATMUL, Amount(), Amount(1e9), dtype="float32")
    assert host.kernel(product, 1) == pytest.approx(1e9 / 1.53e11)
    rate = BUILT_IN.links[0].rate(Axis("dp", 2, "", backend="gloo", shared=True))
    assert rate is not None
    assert host.collective(Kind.ALL_REDUCE, 1 << 24, 2) == pytest.approx(rate.seconds(1 << 24), rel=0.01)


def test_a_table_without_compute_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a table with rates of compute"):
        measured(machine(), Table("links alone", ()))
