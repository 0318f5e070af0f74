"""The alias analysis: who may share memory with whom, and for how long memory is read."""

from __future__ import annotations

from typing import Any

import torch

from passes.analysis.aliases import escaping, last_reads, of_each_result, storages
from passes.ir.collectives import WAIT, c10d

from ..programs import f64, make_program

aten = torch.ops.aten


def shared_with(op: Any) -> set[str]:
    """The memory that the result of ``op`` on the input ``x`` may lie in; "own" is its own."""
    program = make_program(lambda x: (op(x),), x=f64(4, 4))
    (result,) = program.output_values()
    return {"own" if storage is result else storage.name for storage in storages(program.graph)[result]}


def test_views_share_and_computed_values_do_not() -> None:
    assert shared_with(lambda x: aten.t.default(x)) == {"x"}
    assert shared_with(lambda x: aten.split.Tensor(x, 2)[1]) == {"x"}
    assert shared_with(lambda x: aten._unsafe_view.default(x, [16])) >= {"x"}
    assert shared_with(lambda x: aten.add.Tensor(x, aten.t.default(x))) == {"own"}
    assert shared_with(lambda x: aten.clone.default(x)) == {"own"}


def test_what_may_be_a_view_counts_as_both() -> None:
    assert shared_with(lambda x: aten.reshape.default(x, [16])) == {"x", "own"}
    assert shared_with(lambda x: aten.contiguous.default(x)) == {"x", "own"}
    assert shared_with(lambda x: torch.nn.functional.relu(x)) == {"x", "own"}, "Python code may return anything"


def test_each_result_of_an_op_has_memory_of_its_own_unless_it_may_lie_in_an_argument() -> None:
    def results(op: Any) -> list[set[str]]:
        program = make_program(lambda x: (lambda made: (made[0], made[1], aten.t.default(made[0])))(op(x)), x=f64(4, 4))
        found = storages(program.graph, of_each_result(program.graph))
        return [{storage.name for storage in found[each]} for each in program.output_values()]

    one, other, view = results(lambda x: aten.max.dim(x, 0, True))
    assert len(one) == len(other) == 1 and one != other and view == one
    assert results(lambda x: aten.split.Tensor(x, 2)) == [{"x"}] * 3


def test_a_wait_returns_the_memory_of_its_collective() -> None:
    program = make_program(lambda x: (WAIT(c10d.all_reduce.default(x, "sum", "0")),), x=f64(2))
    found = storages(program.graph)
    (wait,) = program.output_values()
    assert found[wait] == {wait.args[0]}
    assert escaping(program.graph, found) == {program.placeholders[0], wait.args[0]}


def test_memory_is_read_until_the_last_reader_of_any_view() -> None:
    def step(x: Any, y: Any) -> Any:
        turned = aten.t.default(x)
        started = c10d.all_gather_into_tensor.default(y, 2, "0")
        late = aten.neg.default(turned)
        return late, WAIT(started)

    program = make_program(step, x=f64(2, 2), y=f64(2))
    names = [node.name for node in program.graph.nodes]
    last = {node.name: names[k] for node, k in last_reads(program.graph, storages(program.graph)).items()}
    assert last["x"] == "neg"
    assert last["y"] == "wait_tensor", "the collective reads its operand until somebody has waited"
    assert last["neg"] == "output"
