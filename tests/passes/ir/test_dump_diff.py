"""The difference of two printed programs: values are matched by what they are."""

from __future__ import annotations

import pytest

from passes import Diff
from passes.ir.dump_text import read_statements

BEFORE = """# toy/program-0
import torch

aten = torch.ops.aten

def program(
    w: "f32[4]",  # parameter w
    x: "f32[2, 4]",  # batch x
    *,
    dp: str,
):

    # ---- forward ----
    # model.0
    mul: "f32[2, 4]" = aten.mul.Tensor(x, w)  # a.py:1: y = x * w
    sum_1: "f32[4]" = aten.sum.dim_IntList(mul, [0])

    # ---- backward ----
    neg: "f32[4]" = aten.neg.default(sum_1)
    all_reduce: "f32[4]" = c10d.all_reduce.default(neg, 'sum', dp)  # gradient: sum over dp
    wait_tensor: "f32[4]" = c10d.wait_tensor.default(all_reduce)
    add: "f32[4]" = aten.add.Tensor(w, wait_tensor, alpha=-0.1)
    return (
        sum_1,  # result result.0
        add,  # update of w
    )
"""


def changed(*pairs: tuple[str, str]) -> str:
    """``BEFORE`` with each of these texts, which occur once, replaced."""
    text = BEFORE
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def kinds(diff: Diff) -> list[tuple[str, str]]:
    return [(change.kind, change.statement.name) for change in diff.changes]


def line(name: str) -> str:
    """The whole line of a value of ``BEFORE``."""
    return next(f"{each}\n" for each in BEFORE.splitlines() if each.strip().startswith(f"{name}: "))


def test_a_program_is_read_with_inputs_places_and_outputs() -> None:
    statements = {each.name: each for each in read_statements(BEFORE)}
    assert list(statements) == [
        "w", "x", "mul", "sum_1", "neg", "all_reduce", "wait_tensor", "add", "result result.0", "update of w",
    ]  # fmt: skip
    assert statements["add"].reads == ("w", "wait_tensor") and "alpha=-0.1" in statements["add"].computes
    assert statements["mul"].where == "forward, model.0" and statements["neg"].phase == "backward"
    assert statements["update of w"].reads == ("add",)


def test_equal_programs_have_no_difference() -> None:
    diff = Diff.of_texts(BEFORE, BEFORE)
    assert not diff and diff.kept == 10
    assert str(diff) == "before -> after: nothing differs, 10 as before"


def test_what_runs_down_from_a_new_value_is_not_listed() -> None:
    after = changed((line("neg"), line("neg") + '    detach: "f32[4]" = aten.detach.default(neg)\n'),
                    ("all_reduce.default(neg,", "all_reduce.default(detach,"))  # fmt: skip
    diff = Diff.of_texts(BEFORE, after)
    assert kinds(diff) == [("added", "detach"), ("changed", "all_reduce")]
    assert diff.changes[1].note == "reads detach instead of neg"
    assert diff.kept == 9


def test_a_value_of_another_name_is_the_same_one() -> None:
    renamed = BEFORE.replace("sum_1", "total")
    assert not [change for change in Diff.of_texts(BEFORE, renamed).changes if change.kind in ("added", "removed")]


def test_one_name_for_another_value_is_a_change() -> None:
    diff = Diff.of_texts(BEFORE, changed(("aten.neg.default(sum_1)", "aten.exp.default(sum_1)")))
    assert kinds(diff) == [("changed", "neg")] and diff.changes[0].note == ""
    assert "- neg:" in str(diff) and "+ neg:" in str(diff)


def test_equal_values_are_matched_by_name_first() -> None:
    twice = changed((line("neg"), line("neg") + line("neg").replace("neg:", "neg_1:")))
    assert kinds(Diff.of_texts(twice, BEFORE)) == [("removed", "neg_1")]
    kept = twice.replace(line("neg"), "").replace("all_reduce.default(neg,", "all_reduce.default(neg_1,")
    assert ("removed", "neg") in kinds(Diff.of_texts(twice, kept))


def test_a_move_is_shown_once_with_what_it_follows() -> None:
    text = BEFORE.replace(line("wait_tensor"), "").replace(line("add"), line("wait_tensor") + line("add"))
    assert not Diff.of_texts(BEFORE, text)
    first = BEFORE.replace(line("mul"), "").replace(line("sum_1"), "")
    one = first.replace(
        line("neg"), line("mul") + line("sum_1") + '    late: "f32[]" = aten.ones.default([])\n' + line("neg")
    )
    other = first.replace(
        line("neg"), '    late: "f32[]" = aten.ones.default([])\n' + line("mul") + line("sum_1") + line("neg")
    )
    diff = Diff.of_texts(one, other)
    assert kinds(diff) == [("moved", "late")] and diff.changes[0].note == "now follows x"


def test_outputs_go_by_what_they_are_for() -> None:
    diff = Diff.of_texts(BEFORE, changed(("        add,  # update of w\n", "")))
    assert kinds(diff) == [("removed", "update of w")]
    diff = Diff.of_texts(BEFORE, changed(("        add,  #", "        wait_tensor,  #")))
    assert kinds(diff) == [("changed", "update of w")]
    assert diff.changes[0].note == "reads wait_tensor instead of add"


@pytest.mark.parametrize("text, why", [
    ("def program(:", "no Python text"),
    ("x = 3", "no function called program"),
    ("def program(\n    x,\n):\n    import os\n    return ()", "line 4 is no statement of a printed program"),
    ("def program(\n    x,\n):\n    y = x\n", "it has no return"),
], ids=["syntax", "function", "statement", "return"])  # fmt: skip
def test_a_text_that_is_no_program_is_named(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"06_x is no printed program: .*{why}"):
        Diff.of_texts(BEFORE, text, ("05_y", "06_x"))
