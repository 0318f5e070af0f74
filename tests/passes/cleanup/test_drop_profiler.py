"""DropProfiler."""

from __future__ import annotations

from typing import Any

import torch

from passes import DeadCode, DropProfiler, Program, run

from ..programs import assert_same_bits, before_and_after, f64, make_program, targets

profiler = torch.ops.profiler


def profiled() -> Program:
    program = make_program(lambda x: (torch.ops.aten.neg.default(x),), x=f64(3))
    graph = program.graph
    with graph.inserting_after(program.placeholders[0]):
        opened = graph.call_function(profiler._record_function_enter_new.default, ("Optimizer.step",))
    with graph.inserting_before(program.output_node):
        graph.call_function(profiler._record_function_exit._RecordFunction, (opened,))
    return program


def test_drop_profiler(golden: Any) -> None:
    after, text = before_and_after(profiled(), DropProfiler())
    golden(text)
    assert targets(after) == ["neg.default"]


def test_ranges_go() -> None:
    program = profiled()
    after = run(program, [DropProfiler()])
    assert targets(after) == ["neg.default"]
    assert after.history == ["02 DropProfiler: 2 edits"]
    assert len(targets(program)) == 3, "the program given stays as it is"


def test_dead_code_leaves_them_alone() -> None:
    assert targets(run(profiled(), [DeadCode()])) == targets(profiled())


def test_nothing_to_do() -> None:
    program = make_program(lambda x: (torch.ops.aten.neg.default(x),), x=f64(3))
    after = run(program, [DropProfiler()])
    assert after.history == ["02 DropProfiler: nothing to do"]
    assert_same_bits(program, after)
