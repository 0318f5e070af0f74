"""Programs and captures as data: all that they have is written, and what is read back runs no text."""

from __future__ import annotations

import dataclasses
import inspect
import json
from typing import Any

import pytest
import torch

import passes
import spmd
from passes import Program, print_program
from passes.ir.region import islands
from spmd.cache.captured_data import captured_from_data
from spmd.cache.not_cached import NotCachedError
from spmd.cache.program_data import printed, program_from_data, program_to_data, scalar_from_data, target_of
from spmd.capture.captured import Captured
from tests.harness.cases import MLP
from tests.harness.fake import fake_world
from tests.harness.oracle import compiled_run

# Fields of programs and captures that are no part of an entry, since no call with an entry has them.
NOT_WRITTEN = {
    Program: {
        *("graph_module", "mesh", "annotations", "same_bits", "stages", "schedules"),
    },
    Captured: {"sizes", "fixed_sizes", "returns_loss"},
}
READERS: dict[type, Any] = {Program: program_from_data, Captured: captured_from_data}


@pytest.mark.parametrize("cls", NOT_WRITTEN)
def test_a_field_that_is_added_is_read_or_is_named_here(cls: type) -> None:
    source = inspect.getsource(READERS[cls])
    names = {each.name for each in dataclasses.fields(cls) if each.name not in NOT_WRITTEN[cls]}
    assert [name for name in names if f"{name}=" not in source and f'data["{name}"]' not in source] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("style", "options", "pipeline"),
    [
        ("replicate", {}, passes.default()),
        ("replicate", {"shard_optimizer": True, "gather_dtype": torch.float32}, passes.default()),
        ("fully_shard", {}, passes.with_islands(passes.default())),
        ("replicate", {"micro_batches": 3}, passes.default()),  # of 128 rows, so that parts have two lengths
    ],
    ids=["replicate", "rounded", "fully_shard", "micro-batches"],
)
def test_programs_are_read_back_as_they_are(style: Any, options: dict[str, Any], pipeline: Any) -> None:
    with fake_world(2):
        mode = spmd.DataParallel(style, **options)
        step, _ = compiled_run(0, MLP(optimizer="AdamW"), 1, parallel_mode=mode, passes=pipeline)
        assert bool(islands(step.program.graph)) is (style == "fully_shard")
        for compiled in step._dispatch.programs.all:
            read = [_read_back(program) for program in compiled.graphs]
            for program, again in zip(compiled.graphs, read, strict=True):
                assert print_program(again) == print_program(program)
                assert (again.inputs, again.outputs) == (program.inputs, program.outputs)
                assert again.assignment == program.assignment
                assert (again.micro_batches is None) is (program.micro_batches is None)
                assert printed(again) == printed(program)
                assert printed(program).count("\ndef program(") == 1 + len(program.earlier)
                for first, same in zip(program.earlier.values(), again.earlier.values(), strict=True):
                    assert print_program(same) == print_program(first) and same.inputs == first.inputs
            assert print_program(passes.run(read[1], compiled.pipeline)) == print_program(compiled.program)


def _read_back(program: Program) -> Program:
    return program_from_data(json.loads(json.dumps(program_to_data(program))), program.mesh)


@pytest.mark.parametrize("world", [2, 3])
def test_programs_of_one_rank_alone_are_no_data(world: int) -> None:
    """Of three ranks each has other runs, and gathers rows in a group of its process, which stands in no graph."""
    with fake_world(world):
        mode = spmd.DataParallel(bits="same", virtual=4)
        step, _ = compiled_run(0, MLP(sizes=(6, 4), rows=4), 1, parallel_mode=mode)
        with pytest.raises(NotCachedError, match=r"sums have an order|a Spread"):
            program_to_data(step.program)


@pytest.mark.parametrize("text", ["op:os.system.default", "function:os.system", "function:builtins.eval", "eval", ""])
def test_only_known_functions_are_called(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no (function|op)"):
        target_of(text)


def test_only_settings_of_torch_are_values() -> None:
    with pytest.raises(ValueError, match="no value"):
        scalar_from_data({"dtype": "load"})
