"""The layouts of a bucket: what one function builds, the one beside it recognises, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx

from passes import Program, fill_vals
from passes.communication.packed import (
    UnpackedColumns,
    is_unpacked,
    pack_columns,
    pack_flat,
    packed_columns,
    packed_flat,
    unpack_columns,
    unpack_flat,
)
from passes.ir.collectives import operands
from passes.ir.edit import insert_before

from ..programs import all_gather, all_reduce, f64, make_program, reduce_scatter

aten = torch.ops.aten


def on_both(collective: Callable[[Any], Any], x: torch.Tensor, y: torch.Tensor) -> Program:
    return make_program(lambda x, y: (collective(x), collective(y)), x=x, y=y)


def caller(program: Program) -> Callable[..., fx.Node]:
    return partial(insert_before, program.output_node, like=None)


@pytest.mark.parametrize("collective", [all_reduce, all_gather])
def test_flat_operands(collective: Callable[[Any], Any]) -> None:
    program = on_both(collective, f64(2, 3), f64(4))
    bucket = program.collectives()
    packed = pack_flat(caller(program), bucket)
    fill_vals(program)
    x, y = program.placeholders
    assert packed.meta["val"].shape == (10,)
    assert packed_flat(packed, {x, y}) == [operands(member)[0] for member in bucket] == [x, y]
    assert packed_flat(packed, {x}) == []


def test_flat_results() -> None:
    program = on_both(all_reduce, f64(6), f64(4))
    call, (one, other) = caller(program), program.collectives()
    (wait,) = one.users
    results = unpack_flat(call, call(aten.reshape.default, wait, [-1]), [one])
    assert not is_unpacked(results[0])  # a reshape may copy
    (result,) = unpack_flat(call, wait, [one])
    fill_vals(program)
    assert is_unpacked(result) and is_unpacked(wait) and not is_unpacked(operands(other)[0])
    assert result.meta["val"].shape == (6,)


def test_columns_of_operands() -> None:
    program = on_both(reduce_scatter, f64(2, 3), f64(4))
    packed = pack_columns(caller(program), program.collectives())
    fill_vals(program)
    assert packed.meta["val"].shape == (2, 5)
    assert [member.meta["val"].shape for member in packed_columns(packed, 2)] == [(2, 3), (2, 2)]
    assert not packed_columns(packed, 4) and not packed_columns(program.placeholders[0], 2)


def test_columns_of_results() -> None:
    program = on_both(all_gather, f64(2, 3), f64(4))
    call, bucket = caller(program), program.collectives()
    gather = call(bucket[0].target, pack_flat(call, bucket), *bucket[0].args[1:])
    assert UnpackedColumns.of(gather, 2) is None
    results = unpack_columns(call, call(next(iter(bucket[0].users)).target, gather), bucket)
    fill_vals(program)
    found = UnpackedColumns.of(gather, 2)
    assert found is not None and found.sizes == [6, 4]
    assert [result.args[0] for result in results] == found.members
    assert [tuple(result.meta["val"].shape) for result in results] == [(4, 3), (8,)]
    assert UnpackedColumns.of(gather, 4) is None
    call(aten.neg.default, found.rows)
    assert UnpackedColumns.of(gather, 2) is None  # another reader needs the rows
