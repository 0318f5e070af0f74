"""Machines that were measured: the figures of a table, as ``spmd calibrate`` writes it, in the place of published ones.

What a table does not say, such as how much slower compute is beside collectives, stays as it was fitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from passes import Table
from passes.analysis.collective_algorithms import BUILT_IN, Link
from passes.ir.program import Axis
from passes.schedule.gpus import GPUS, Gpu
from passes.schedule.rates import BUILT_IN_CPU

from .machine import Machine

HOST = "CPU"
KINDS: Mapping[str, Gpu] = GPUS | {
    # Ranks on a core each of a server of 2023, which was measured; hosts with 10 Gb/s Ethernet for all of their ranks.
    HOST: Gpu({"bfloat16": 0.027, "float32": 0.153, "float64": 0.062}, 0.012, 1.0, 1.25 / 8, 12, 6, 1, has_tf32=False)
}
"""What a plan knows figures of: GPUs, and ranks of gloo on hosts without any."""


def measured(machine: Machine, table: Table | None) -> Machine:
    """The machine by a table; by default as it is, or for ``"CPU"`` by the built-in one.

    A link belongs to a host where all of its ranks are in one, with those of later axes between them, or else to the
    network. Raises ``ValueError`` for a table without rates of compute.
    """
    if machine.name == HOST:
        machine = _sequential(machine)
        table = table or replace(BUILT_IN, compute=BUILT_IN_CPU)
    if table is None:
        return machine
    if "memory" not in table.compute or "launches" not in table.compute:
        raise ValueError(f"expected a table with rates of compute, as spmd calibrate measures them, got {table!r}")
    for k, link in enumerate(table.links):
        machine = _linked(machine, link, math.prod(each.ranks for each in table.links[k + 1 :]))
    gpu, letter, constants = machine.gpu, machine.generation, machine.constants
    rates = {name.split()[1]: 0.0 for name in table.compute if name.startswith("matmul ")}
    for name in rates:  # at the size at which it is highest
        rates[name] = max(rate for key, rate in table.compute.items() if key.split()[:2] == ["matmul", name]) / 1e12
    known = "bfloat16" if "bfloat16" in rates else "float32"
    part = rates.get(known, gpu.tflops[known] * constants.matmul[letter]) / gpu.tflops[known]
    gpu = replace(
        gpu,
        tflops={name: rates.get(name, part * peak) for name, peak in gpu.tflops.items()},
        memory=table.compute["memory"] / 1e12,
        power=1.0,
    )
    attention = constants.attention[letter] / constants.matmul[letter]
    constants = replace(
        constants,
        matmul={**constants.matmul, letter: 1.0},
        attention={**constants.attention, letter: attention},
        memory=1.0,
    )
    launch = 1 / table.compute["launches"] + (1 / table.compute["views"] if "views" in table.compute else 0.0)
    return replace(machine, gpu=gpu, constants=constants, software=replace(machine.software, launch=launch), known={})


def _linked(machine: Machine, link: Link, stride: int) -> Machine:
    """The machine with the latency and the bandwidth of one of its links."""
    rate = link.rate(Axis(link.axis, link.ranks, "", backend=link.backend, shared=True))
    if rate is None:
        return machine
    constants, (on_host, hosts) = machine.constants, machine.hosts(link.ranks, stride)
    reached = 1e-9 / rate.per_byte
    if hosts == 1:
        latency = max(0.0, rate.latency - (on_host - 1) * constants.hop)
        constants = replace(constants, latency=latency, nvlink=1.0)
        return replace(machine, gpu=replace(machine.gpu, nvlink=reached), constants=constants)
    far = reached / on_host * (1 + constants.spread * math.log2(hosts))
    return replace(machine, network=far / constants.network)


def _sequential(machine: Machine) -> Machine:
    """A machine whose ranks launch, compute and communicate on one core: nothing runs beside anything else."""
    constants, letter = machine.constants, machine.generation
    constants = replace(
        constants,
        matmul={**constants.matmul, letter: 1.0},
        attention={**constants.attention, letter: 1.0},
        kernel=0.0,
        knee=1.0,
        contention=1.0,
    )
    return replace(machine, constants=constants, software=replace(machine.software, hides=0.0, per_step=0.0))
