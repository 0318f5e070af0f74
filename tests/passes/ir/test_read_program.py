"""A program is read back from its text, edited or not; what does not fit is refused with its line."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from passes import Kind, PassError, Phase, Program, Role, interpret, print_program
from passes.ir.read_program import read_program

from ..programs import all_reduce, f64, make_program, simulate

aten = torch.ops.aten


def every_kind_of_argument() -> Program:
    def step(x: Any, lr: Any) -> Any:
        parts = aten.split_with_sizes.default(x, [1, 2])
        tail = aten.slice.Tensor(parts[1], 0, 0, sys.maxsize)
        ones = aten.new_full.default(x, [2, 4], -math.inf, dtype=torch.float64, device=torch.device("cpu"))
        scaled = aten.mul.Tensor(aten.maximum.default(tail, ones), operator.mul(lr, 2.0))
        picked = aten.index.Tensor(x, [None, aten.argsort.default(aten.select.int(x, 0, 0))])
        values = torch.nn.functional.gelu(x).clamp(min=0.5)
        return scaled, picked, values[0:2, ..., None], values[:, 1], abs(values), math.sqrt(4.0), None, 3

    return make_program(step, x=f64(3, 4), lr=0.5)


def two_sums() -> Program:
    def step(w: Any, x: Any) -> Any:
        product = aten.mm.default(x, w)
        return all_reduce(aten.sum.default(product)), aten.relu.default(product)

    program = make_program(step, {}, [Role.RESULT], w=f64(4, 2), x=f64(3, 4))
    for node in program.graph.nodes:
        if node.op == "call_function":
            node.meta |= {"phase": Phase.FORWARD, "module": "model.0"}
    return program


def edited(program: Program, *changes: tuple[str, str]) -> tuple[Program, int]:
    text = print_program(program)
    for old, new in changes:
        assert text.count(old) == 1, text
        text = text.replace(old, new)
    return read_program(text, program)


@pytest.mark.parametrize("make", [every_kind_of_argument, two_sums])
def test_unchanged_text_is_the_same_program(make: Any) -> None:
    program = make()
    read, count = edited(program)
    assert count == 0 and print_program(read) == print_program(program)
    assert [node.meta for node in read.graph.nodes] == [node.meta for node in program.graph.nodes]
    assert read.graph is not program.graph


def test_a_changed_line_a_new_one_and_all_that_read_them_are_inferred_anew() -> None:
    program = two_sums()
    line = '    mm: "f64[3, 2]" = aten.mm.default(x, w)\n'
    read, count = edited(
        program,
        (line, f"{line}    more = aten.cat.default([mm, mm], 1)\n"),
        ("aten.relu.default(mm)", "aten.tanh.default(mm)"),
        ("aten.sum.default(mm)", "aten.sum.default(more)"),
    )
    assert count == 3
    nodes = {node.name: node for node in read.graph.nodes}
    assert nodes["more"].meta["val"].shape == (3, 4) and nodes["more"].meta["phase"] is Phase.FORWARD
    assert nodes["more"].meta["module"] == "model.0"
    assert nodes["all_reduce"].meta["collective"] == program.collectives()[0].meta["collective"]
    x, w = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    step, _ = simulate(read, [(w, x), (w, x)])
    assert torch.allclose(step.results["result.0"], 4 * (x @ w).sum())
    assert torch.equal(step.results["result.1"], torch.tanh(x @ w))


def test_a_collective_that_somebody_adds_is_described_by_its_op() -> None:
    program = two_sums()
    read, _ = edited(
        program,
        (
            '    relu: "f64[3, 2]" = aten.relu.default(mm)\n',
            "    maxima = c10d.all_reduce.default(mm, 'max', dp)\n    relu = c10d.wait_tensor.default(maxima)\n",
        ),
    )
    described = read.collectives()[-1].meta["collective"]
    assert (described.kind, described.axis, described.reduction) == (Kind.ALL_REDUCE, "dp", "max")


REFUSED: dict[str, tuple[Sequence[tuple[str, str]], str]] = {
    "no Python": (
        (("aten.relu.default(mm)", "aten.relu.default(mm"),),
        r"the text is no program: line \d+ is no statement of",
    ),
    "unknown op": ((("aten.relu.", "aten.relux."),), r"line \d+: relu: .*\n    AttributeError: .*relux"),
    "unknown name": ((("relu.default(mm)", "relu.default(nn)"),), r"line \d+: relu: .*\n    NameError: .*nn"),
    "two ops in a line": ((("relu.default(mm)", "relu.default(aten.neg.default(mm))"),), "a line of its own"),
    "no op": ((("aten.relu.default(mm)", "mm + mm"),), "a line of a program calls one op"),
    "a star": ((("relu.default(mm)", "relu.default(*mm)"),), r"write out the arguments instead of \*"),
    "twice": ((("    relu: ", "    mm: "), ("        relu,", "        mm,")), "mm is computed twice"),
    "shapes": ((("mm.default(x, w)", "mm.default(w, x)"),), "does not fit its arguments"),
    "no wait": ((("c10d.wait_tensor.default(all_reduce)", "aten.neg.default(all_reduce)"),), "before a wait"),
    "input": ((('x: "f64[3, 4]"', 'x: "f64[5, 4]"'),), r"inputs of the text are not .*\n.*expected: x: \"f64\[3, 4"),
    "output": ((("  # result result.1", "  # result result.2"),), r"outputs of the text are not those of this call"),
    "mesh": ((("mesh: dp=2", "mesh: dp=4"),), "a program for the mesh dp=4, and this call's mesh is dp=2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_and_changes_nothing(name: str) -> None:
    changes, message = REFUSED[name]
    program = two_sums()
    before = print_program(program)
    with pytest.raises(PassError, match=message):
        edited(program, *changes)
    assert print_program(program) == before


def test_the_result_is_interpreted_as_the_text_says() -> None:
    program = every_kind_of_argument()
    x = torch.randn(3, 4, dtype=torch.float64)
    read, count = edited(program, ("clamp(min=0.5)", "clamp(min=0.25)"))
    got, plain = interpret(read, x, 0.25), interpret(program, x, 0.25)
    assert count == 1 and torch.equal(got[0], plain[0]) and torch.equal(got[4], torch.nn.functional.gelu(x).clamp(0.25))
