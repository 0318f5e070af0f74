"""Canonicalize."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from passes import Canonicalize, Program, ReuseMemory, UpdateInPlace, run

from ..programs import all_gather, assert_same_bits, before_and_after, f64, make_program, targets

aten = torch.ops.aten


def rewritten(program: Program) -> list[str]:
    """The ops after the pass, which must leave the same bits."""
    after = run(program, [Canonicalize()])
    assert_same_bits(program, after)
    return targets(after)


def equivalents() -> Program:
    """A lookup, a relu, fills, copies, reshapes that copy and reshapes that do not."""

    def step(w: Any, rows: Any) -> Any:
        looked = aten.embedding.default(w, aten.mul.Tensor(rows, 0))
        zeros = aten.zeros_like.default(looked)
        moved = aten.reshape.default(aten.transpose.int(looked, 0, 1), [-1])
        flat = aten.reshape.default(aten.relu.default(aten.mul.Tensor(zeros, 1)), [-1])
        cast = aten._to_copy.default(aten.clone.default(moved), dtype=torch.float32)
        return aten.sum.default(aten.add.Tensor(moved, flat)), aten.sum.default(cast)

    return make_program(step, w=f64(5, 4), rows=torch.zeros(2, 3, dtype=torch.int64))


def test_canonicalize(golden: Any) -> None:
    after, text = before_and_after(equivalents(), Canonicalize())
    golden(text)
    assert_same_bits(equivalents(), after)


def test_all_of_them_write_into_planned_memory() -> None:
    after = run(equivalents(), [UpdateInPlace(), Canonicalize(), ReuseMemory()])
    assert_same_bits(equivalents(), after)
    ops = targets(after)
    assert "index_select.out" in ops and "embedding.default" not in ops and "reshape.default" not in ops
    assert "clamp_min.out" in ops


def test_planned_memory_does_without() -> None:
    after = run(equivalents(), [UpdateInPlace(), ReuseMemory()])
    assert_same_bits(equivalents(), after)
    assert {"embedding.default", "relu.default", "reshape.default", "mul.out"} <= set(targets(after))


@pytest.mark.parametrize("value, dropped", [
    (lambda x, w: aten.mul.Tensor(x, 2), True),
    (lambda x, w: aten.view.default(aten.mul.Tensor(x, 2), [2, 6]), True),
    (lambda x, w: aten.t.default(aten.mul.Tensor(x, 2)), False),
    (lambda x, w: aten.native_layer_norm.default(x, [4], None, None, 1e-5)[0], False),  # it allocates as it likes
    (lambda x, w: w, False),
])  # fmt: skip
def test_a_contiguous_that_surely_copies_nothing_is_dropped(value: Any, dropped: bool) -> None:
    def step(x: Any, w: Any) -> Any:
        return (all_gather(aten.contiguous.default(value(x, w))),)

    assert ("contiguous.default" not in rewritten(make_program(step, x=f64(3, 4), w=f64(3, 4)))) is dropped


@pytest.mark.parametrize("uneven, op", [(None, "view.default"), ("rows", "reshape.default")])
def test_a_reshape_that_only_some_ranks_could_view_stays(uneven: str | None, op: str) -> None:
    program = make_program(lambda x: (aten.neg.default(aten.reshape.default(aten.t.default(x), [12])),), x=f64(3, 4))
    if uneven:
        program.placeholders[0].meta["uneven"] = uneven
    assert targets(run(program, [Canonicalize()]))[-2] == op


def test_fills_that_read_a_number_or_nothing_stay() -> None:
    def step(x: Any, n: Any) -> Any:
        return aten.mul.Tensor(aten.full_like.default(x, n), 2), aten.add.Tensor(aten.zeros.default([3]), 1)

    program = make_program(step, x=f64(3), n=0.5)
    assert rewritten(program) == targets(program)


def test_nodes_are_described_as_those_they_serve() -> None:
    program = equivalents()
    for node in program.graph.nodes:
        node.meta["module"] = "model.embedding"
    added = [node for node in run(program, [Canonicalize()]).graph.nodes if node.name.startswith("index_select")]
    assert [node.meta["module"] for node in added] == ["model.embedding"]
