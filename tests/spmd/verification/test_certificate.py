"""Certificates: clean programs are shown, wrong ones never are, and no clean one is accused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import passes
import spmd
from passes import Kind, Program, ReduceInPlace
from passes.ir.collectives import group_of
from passes.runtime.arena import reserve, view_at
from spmd.fuzzing import search
from spmd.fuzzing.outcome import Outcome
from spmd.verification.certificate import Certificate, certify_programs
from spmd.verification.compared_stages import after_each
from tests.mutants.manifest import PUBLISHED
from tests.mutants.published import dropped, reduced_by

from .prepared import MODES, Edit, Mutant, mutated, prepared
from .test_verify import arguments, train_step

pytestmark = pytest.mark.slow


def certificate(base: str, pipeline: list[passes.Pass] | None = None) -> Certificate:
    given = prepared(base)
    final = [each.final for each in given.programs]
    if pipeline is not None:
        final = [after_each(each.transformed, pipeline)[1] for each in given.programs]
    with torch.no_grad():
        return certify_programs(given.captured, final)


REST = ("zero", "fully_shard", "odd")  # what they have, others below have, too


@pytest.mark.parametrize("base", [pytest.param(b, marks=pytest.mark.exhaustive) if b in REST else b for b in MODES])
def test_a_clean_program_is_shown(base: str) -> None:
    found = certificate(base)
    assert found, found
    assert found.outputs >= 25


@pytest.mark.parametrize("planned", [
    True, pytest.param(False, marks=pytest.mark.exhaustive),
], ids=["planned memory", "results of their own"])  # fmt: skip
def test_gradients_that_are_reduced_in_place_are_shown_and_verified(planned: bool) -> None:
    pipeline = [
        ReduceInPlace(min_bytes=1) if isinstance(each, ReduceInPlace) else each
        for each in passes.default()
        if planned or not isinstance(each, passes.ReuseMemory)
    ]
    step = spmd.compile(train_step, passes=pipeline)
    found = spmd.certify(step, *arguments(), world=2)
    assert found, found
    assert spmd.verify(step, *arguments(), world=2, steps=1)


@cache
def of_mutant(name: str) -> Certificate:
    base, edit, behind = PUBLISHED[name]
    return certificate(base, mutated(edit, behind))


def cases() -> list[Any]:
    """Every twelfth mutant, and the one whose nodes declare another dtype than they compute; all with --exhaustive."""
    always = {"a gradient in a narrower dtype", *list(PUBLISHED)[::12]}
    return [name if name in always else pytest.param(name, marks=pytest.mark.exhaustive) for name in PUBLISHED]


@pytest.mark.parametrize("name", cases())
def test_a_wrong_program_is_never_shown(name: str) -> None:
    found = of_mutant(name)
    assert not found
    assert found.node and found.why


@pytest.mark.exhaustive
def test_most_wrong_programs_are_shown_to_be_wrong() -> None:
    outcomes = [of_mutant(name).outcome for name in PUBLISHED]
    assert outcomes.count("wrong") >= 34 and set(outcomes) == {"wrong", "cannot show"}


@pytest.mark.parametrize("name", ["an update is lost", "updates change places", "reduction 7 is dropped"])
def test_what_is_wrong_is_distinguished_from_what_cannot_be_shown(name: str) -> None:
    assert of_mutant(name).outcome == "wrong"


def test_the_node_is_named() -> None:
    found = certificate("replicate", mutated(reduced_by(Kind.ALL_REDUCE, "max", 2)))
    assert found.outcome == "wrong" and "max" in found.why and "loss.backward()" in found.line


@dataclass(frozen=True)
class Forgets(passes.Pass):
    """A pass that leaves master copies as they were."""

    def rewrite(self, program: Program) -> int:
        nodes = {declared.name: node for declared, node in program.values().values()}
        pairs = zip(program.outputs, program.output_values(), strict=True)
        values = [nodes[out.name] if out.role is passes.Role.MASTER else value for out, value in pairs]
        program.set_outputs(values, program.outputs)
        return 1


@pytest.mark.parametrize("pipeline", [None, (Forgets(),)])
def test_exact_parts_are_shown_beside_what_ranks_hold(pipeline: Any) -> None:
    mode = spmd.DataParallel(shard_optimizer=True, gather_dtype=torch.float32)
    found = spmd.certify(spmd.compile(train_step, parallel_mode=mode, passes=pipeline), *arguments(), world=2)
    assert bool(found) is (pipeline is None) and found.what.startswith("master[" if pipeline else "")


def adds(constant: Tensor, lies_in: torch.dtype | None = None) -> Program:
    """A program that adds a constant, in planned memory of a dtype that its nodes do not declare."""
    graph, shape = fx.Graph(), list(constant.shape)
    x, given = graph.placeholder("x"), graph.get_attr("constant")
    if lies_in is None:
        total = graph.call_function(torch.ops.aten.add.Tensor, (x, given))
    else:
        arena = graph.call_function(reserve, (64, torch.device("cpu")))
        view = graph.call_function(view_at, (arena, 0, shape, [1], lies_in))
        total = graph.call_function(torch.ops.aten.add.out, (x, given), {"out": view})
    graph.output((total,))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(shape, dtype=constant.dtype, device="meta")
    return Program.from_graph(fx.GraphModule({"constant": constant}, graph))


def test_constants_are_compared_by_value() -> None:
    one, same, other = (adds(torch.tensor([1.0, 2.0, last])) for last in (0.5, 0.5, 0.25))
    assert certify_programs(one, [same])
    assert certify_programs(one, [other]).outcome == "wrong"


def test_dtypes_are_derived_and_not_believed() -> None:
    constant = torch.ones(3, dtype=torch.bfloat16)
    assert certify_programs(adds(constant), [adds(constant, torch.bfloat16)])
    assert not certify_programs(adds(constant), [adds(constant, torch.float16)])


def on_many(edit: Edit | None, kind: str = "fully_shard", world: int = 1024, **options: Any) -> Certificate:
    """The certificate of a step on many ranks, with a wrong pass that stands first."""
    pipeline = passes.default() if edit is None else (Mutant(edit), *passes.default())
    step = spmd.compile(train_step, parallel_mode=spmd.DataParallel(kind, **options), passes=pipeline)
    return spmd.certify(step, *arguments(world, "SGD"), world=world)


@pytest.mark.parametrize("kind", ["replicate", pytest.param("fully_shard", marks=pytest.mark.exhaustive)])
def test_of_many_ranks_some_are_looked_at(kind: str) -> None:
    found = on_many(None, kind)
    assert found and found.ranks == 3, found
    with pytest.raises(ValueError, match="1024 ranks"):
        on_many(None, kind, 1025)


@pytest.mark.parametrize(
    "kind, edit",
    [
        pytest.param("replicate", dropped(Kind.ALL_REDUCE, 2), marks=pytest.mark.exhaustive),
        ("fully_shard", reduced_by(Kind.REDUCE_SCATTER, "avg")),
    ],
)
def test_a_wrong_program_of_many_ranks_is_not_shown(kind: str, edit: Edit) -> None:
    found = on_many(edit, kind)
    assert found.outcome == "wrong", found


def within_groups(program: Program) -> int:
    """What is to be summed over all ranks is summed over groups of two."""
    start = next(node for node in program.collectives() if node.meta["collective"].kind is Kind.ALL_REDUCE)
    assert group_of(start) == program.mesh.axes[0].group
    start.args = (*start.args[:-1], program.mesh.subgroups[0].group)
    return 1


@pytest.mark.parametrize("kind, lost", [
    ("replicate", dropped(Kind.ALL_REDUCE, 2)),
    ("fully_shard", dropped(Kind.REDUCE_SCATTER, 1)),
])  # fmt: skip
def test_what_the_user_lets_ranks_send_rounded_is_shown_but_for_that(kind: str, lost: Edit) -> None:
    found = on_many(None, kind, 2, reduce_dtype=torch.bfloat16)
    assert found and found.rounded == ("torch.bfloat16",) and "but for rounding to torch.bfloat16" in str(found), found
    assert on_many(lost, kind, 2, reduce_dtype=torch.bfloat16).outcome == "wrong"


@pytest.mark.parametrize("edit", [None, within_groups])
def test_groups_are_parts_of_an_axis(edit: Edit | None) -> None:
    found = on_many(edit, world=4, reshard_after_forward=2)
    assert bool(found) is (edit is None), found
    assert edit is None or "a part of the axis" in found.why


def test_a_step_is_certified() -> None:
    step = spmd.compile(train_step, parallel_mode=spmd.DataParallel("fully_shard"))
    found = spmd.certify(step, *arguments(), world=3)
    assert found and "3 ranks" in str(found)


@pytest.mark.exhaustive
def test_no_clean_step_is_accused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps of the fuzzer: most are shown, and none is called wrong."""
    outcomes: list[str] = []

    def certified(path: Path) -> Outcome:
        text = re.sub(r"spmd\.verify\((.*), steps=\d+, ", r"spmd.certify(\1, ", path.read_text())
        path.write_text(text.replace("assert verdict\n", ""))
        return run(path)

    run = search.run
    monkeypatch.setattr(spmd, "certify", noted(spmd.certify, outcomes))
    monkeypatch.setattr(search, "run", certified)
    found = search.fuzz(60, 11, tmp_path)
    assert not found.failures and len(outcomes) >= 40
    assert "wrong" not in outcomes and outcomes.count("shown") >= 0.85 * len(outcomes)


def noted(certify: Callable[..., Certificate], outcomes: list[str]) -> Callable[..., Certificate]:
    def call(*args: Any, **kwargs: Any) -> Certificate:
        made = certify(*args, **kwargs)
        outcomes.append(made.outcome)
        return made

    return call
