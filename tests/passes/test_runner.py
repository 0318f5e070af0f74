"""The runner: order, history, failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from passes import (
    BucketAllReduce,
    DeadCode,
    DropDetach,
    FormIslands,
    MergeEqual,
    Pass,
    PassError,
    Program,
    Role,
    StartEarly,
    WaitLate,
    print_program,
    run,
)
from passes.base import Numerics

from .programs import all_reduce, f64, make_program, targets

aten = torch.ops.aten


@dataclass(frozen=True)
class Break(Pass):
    """Does something wrong."""

    how: str

    def rewrite(self, program: Program) -> int:
        node = program.graph.find_nodes(op="call_function", target=aten.neg.default)[0]
        if self.how == "raise":
            raise RuntimeError("no idea")
        if self.how == "drop":
            program.set_outputs(program.output_values()[:1], program.outputs[:1])
        if self.how == "write":
            node.target = aten.neg_.default
        if self.how == "return":
            return None  # type: ignore[return-value]
        return 1


@dataclass(frozen=True)
class Needy(Pass):
    """Cannot do without DeadCode."""

    needs: ClassVar[tuple[type[Pass], ...]] = (DeadCode,)

    def rewrite(self, program: Program) -> int:
        return 0


@dataclass(frozen=True)
class DropSecond(Pass):
    """Loses an output where there are two."""

    def rewrite(self, program: Program) -> int:
        program.set_outputs(program.output_values()[:1], program.outputs[:1])
        return 1


def program() -> Program:
    return make_program(lambda x: (aten.neg.default(x), aten.detach.default(x)), x=f64(3))


def test_history_stages_and_copy() -> None:
    stages: list[Any] = []
    given = program()
    after = run(given, [DropDetach(), MergeEqual()], on_stage=lambda *stage: stages.append(stage))
    assert after.history == ["02 DropDetach: 1 edit", "03 MergeEqual: nothing to do"]
    assert [(number, str(each)) for number, each, _, _ in stages] == [(2, "DropDetach"), (3, "MergeEqual")]
    assert all(seconds >= 0 for *_, seconds in stages)
    assert given.history == [] and targets(given) == ["neg.default", "detach.default"]


def test_without_passes_the_program_is_a_copy() -> None:
    given = program()
    after = run(given, [])
    assert after is not given and after.graph is not given.graph and targets(after) == targets(given)


def test_history_counts_collectives_where_they_change() -> None:
    given = make_program(lambda x: (all_reduce(x), all_reduce(x)), x=f64(3))
    given.set_outputs([given.output_values()[0]], given.outputs[:1])
    assert run(given, [DeadCode()]).history == ["02 DeadCode: 2 -> 1 collectives"]


@dataclass(frozen=True)
class Negate(Pass):
    """Twice where ``often`` says so, which changes no number."""

    numerics: ClassVar[Numerics] = "approximate"
    often: bool = True

    def rewrite(self, program: Program) -> int:
        for node in program.graph.find_nodes(op="call_function", target=aten.neg.default) if self.often else ():
            with program.graph.inserting_before(node):
                node.args = (program.graph.call_function(aten.neg.default, node.args),)
        return int(self.often)


def test_history_says_what_may_change_numbers() -> None:
    assert run(program(), [Negate()]).history == ["02 Negate(often=True): 1 edit, approximate"]
    assert run(program(), [Negate(False)]).history == ["02 Negate(often=False): nothing to do"]
    given = make_program(lambda x, y: (all_reduce(x), all_reduce(y)), {}, [Role.GRADIENT], x=f64(3), y=f64(2))
    (line,) = run(given, [BucketAllReduce()]).history
    assert line.endswith(": 2 -> 1 collectives, reassociates")


def test_dumps_say_what_may_change_numbers() -> None:
    assert "# 02 Negate(often=True): 1 edit, approximate\n" in print_program(run(program(), [Negate()]))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "RuntimeError: no idea"),
        ("drop", "the result outputs were .* and are now .*"),
        ("write", "neg .* writes to its argument"),
        ("return", "rewrite must return the number of its edits, got None"),
    ],
)
def test_a_pass_that_fails(how: str, reason: str) -> None:
    given = program()
    with pytest.raises(
        PassError, match=f"pass Break\\(how='{how}'\\), stage 03 of program, failed: {reason}"
    ) as caught:
        run(given, [DropDetach(), Break(how)])
    assert caught.value.__notes__ == ["before it: 02 DropDetach: 1 edit"]
    assert targets(given) == ["neg.default", "detach.default"] and given.history == []


def test_a_pass_of_ours_that_breaks_a_program_is_named_though_only_the_last_check_finds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DropDetach, "rewrite", lambda self, program: Break("write").rewrite(program))
    with pytest.raises(PassError, match=r"pass DropDetach, stage 03 of program, failed: neg .* writes") as caught:
        run(program(), [MergeEqual(), DropDetach(), DeadCode(), StartEarly()])
    assert caught.value.__notes__ == ["before it: 02 MergeEqual: nothing to do"]


def test_other_ranks_are_asked_once_though_passes_run_again_to_find_the_first_that_is_broken() -> None:
    asked: list[int] = []

    def choose(found: Sequence[Any]) -> list[bool]:
        asked.append(len(found))
        return [False] * len(found)

    with pytest.raises(PassError, match=r"pass Break.*no idea"):
        run(program(), [FormIslands(min_ops=1, choose=choose), Break("raise")])
    assert asked == [1]


def test_checks_can_be_left_out() -> None:
    assert targets(run(program(), [Break("write")], check=False))[0] == "neg_.default"


def test_a_pass_may_leave_out_vals_and_descriptions() -> None:
    @dataclass(frozen=True)
    class Add(Pass):
        def rewrite(self, program: Program) -> int:
            with program.graph.inserting_before(program.output_node):
                values = [program.graph.call_function(torch.add, (value, 1)) for value in program.output_values()]
            program.set_outputs(values, program.outputs)
            return len(values)

    after = run(program(), [Add()])
    assert after.output_values()[0].meta["val"].shape == (3,)


@pytest.mark.parametrize("wrong", [DropDetach, "DropDetach", None])
def test_what_is_no_pass(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"expected instances of passes\.Pass in the pipeline, got"):
        run(program(), [wrong])


def test_order() -> None:
    with pytest.raises(ValueError, match="WaitLate must come after StartEarly, but stands before it"):
        run(program(), [WaitLate(), StartEarly()])
    with pytest.raises(ValueError, match="Needy needs DeadCode before it"):
        run(program(), [Needy(), DeadCode()])
    run(program(), [WaitLate()])
    run(program(), [DeadCode(), Needy()])


def test_earlier_programs_are_rewritten_and_checked() -> None:
    """Each pass rewrites all that a call runs, on copies; the history counts the edits of the last program."""
    given = replace(program(), earlier={"first": program()})
    done = run(given, [DropDetach()])
    assert [targets(each) for each in done.members().values()] == [["neg.default"]] * 2
    assert targets(given.earlier["first"]) == ["neg.default", "detach.default"]
    assert done.history[-1] == "02 DropDetach: 1 edit"
    first = make_program(lambda x: (aten.neg.default(x), aten.neg.default(x)), x=f64(3))
    last = make_program(lambda x: (aten.sin.default(x),), x=f64(3))
    with pytest.raises(PassError, match="result outputs were"):
        run(replace(last, earlier={"first": first}), [DropSecond()])
