"""The default pipeline on random programs: whatever the graph, each pass leaves the same bits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from passes import Program, Role, default, run

from .programs import all_gather, all_reduce, assert_same_bits, f64, make_program, reduce_scatter

aten = torch.ops.aten

UNARY = [
    lambda x: aten.neg.default(x),
    lambda x: aten.sin.default(x),
    lambda x: aten.t.default(x),
    lambda x: aten.t.default(aten.t.default(x)),
    lambda x: aten.detach.default(x),
    lambda x: aten.clone.default(x),
    lambda x: aten._to_copy.default(x),
    lambda x: aten.reshape.default(aten.reshape.default(x, [2, 8]), [4, 4]),
    lambda x: aten.mul.Tensor(x, 0.5),
    lambda x: aten.cat.default([aten.split.Tensor(x, 2)[1], aten.split.Tensor(x, 2)[0]]),
    lambda x: all_reduce(x),
    lambda x: aten.slice.Tensor(all_gather(aten.contiguous.default(x)), 0, 2, 6),
    lambda x: all_gather(reduce_scatter(aten.contiguous.default(x))),
]
BINARY = [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.maximum.default, aten.mm.default]


def random_program(seed: int) -> Program:
    """Inputs of shape [4, 4], about 30 ops, every input updated by something, two results."""
    choose = random.Random(seed)

    def step(a: Any, b: Any, c: Any, d: Any) -> Any:
        values = [a, b, c, d]
        for _ in range(choose.randint(5, 30)):
            one, other = choose.choice(values), choose.choice(values[-6:])
            values.append(choose.choice(UNARY)(one) if choose.random() < 0.6 else choose.choice(BINARY)(one, other))
        updates = [aten.add.Tensor(aten.mul.Tensor(x, 0.5), choose.choice(values)) for x in (a, b)]
        returned = [*updates, choose.choice(values), choose.choice(values), values[-1], choose.choice(values)]
        return tuple(returned)

    program = make_program(step, dict(enumerate("abcd")), a=f64(4, 4), b=f64(4, 4), c=f64(4, 4), d=f64(4, 4))
    return program


@pytest.mark.parametrize("seed", range(60))
def test_random_programs(seed: int) -> None:
    program = random_program(seed)
    roles = random.Random(seed)
    for node in program.collectives():
        collective = node.meta["collective"]
        role = roles.choice([Role.GRADIENT, Role.GRADIENT, Role.ACTIVATION, Role.UNKNOWN])
        node.meta["collective"] = type(collective)(collective.kind, collective.axis, collective.reduction, role)
    pipeline = default(bucket_bytes=roles.choice([300, 1000, 25_000_000]))
    for length in (len(pipeline), roles.randrange(len(pipeline))):
        assert_same_bits(program, run(program, pipeline[:length]))
