"""The table of rules: every rule has an example that shows it, and a sample by which the engine runs its claims."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch

from spmd.rules import rule_of
from spmd.rules.einsum_labels import dims_read
from spmd.rules.registry import is_whole
from spmd.rules.table.claims import Claims, claims_of
from spmd.rules.table.example_call import call_of
from spmd.rules.table.examples import EXAMPLES
from spmd.rules.table.names import is_there, op_called, ops_like, ruled_ops
from spmd.rules.table.rows import EXAMPLE_OF, Row, example_of, row_of, rows
from spmd.rules.user_rules import _rule

from .test_rules import SAMPLES, UNTRIED

# Of a library that may be absent.
NAMED = "transformers."


@pytest.fixture(scope="module")
def table() -> list[Row]:
    return rows()


def claims(text: str, ranks: int = 2) -> Claims:
    rule = rule_of(op_called(text.partition("(")[0]))
    assert rule is not None
    return claims_of(rule, call_of(text, ranks))


def test_every_rule_has_an_example_of_which_it_claims_something(table: list[Row]) -> None:
    assert len(table) > 80
    for row in table:
        if not row.whole and not (row.ops[0].startswith(NAMED) and not is_there(row.ops[0])):
            assert row.example is not None and row.claims is not None, f"spmd/rules/table/examples.py lacks {row.ops}"
            assert row.claims.claims, f"the rule of {row.example} claims nothing"
            assert row.summary.endswith("."), f"{row.file}:{row.line} has no docstring"


def test_every_rule_of_the_table_is_run_by_the_engine(table: list[Row]) -> None:
    """Each row that is printed has a sample, whose options ``test_rules.py`` runs on shards against the whole."""
    tried = {rule_of(sample.op) for sample in SAMPLES}
    untried = [row for row in table if row.rule not in tried and not row.whole]
    assert [row.ops for row in untried if not row.ops[0].startswith(NAMED)] == []
    by_op = {sample.op for sample in SAMPLES}
    shown = [op_called(name) for name in EXAMPLE_OF if is_there(name)]
    without = {op.name().removeprefix("aten::") for op in shown if op not in by_op}
    assert {name for name in without if not name.startswith("transformers")} <= UNTRIED, "an example without a sample"


def test_each_example_is_of_another_op_that_has_a_rule() -> None:
    names = [text.partition("(")[0] for text in EXAMPLES]
    assert len(names) == len({*names})
    assert {name for name in names if is_there(name)} <= ruled_ops().keys()


def test_letters_are_those_of_the_rule() -> None:
    found = claims("aten.mm(f32[4, 8], f32[8, 6])")
    assert found.notation == "mk,kn->mn" and found.labelled
    assert [(each.what, each.operands, each.results) for each in found.claims] == [
        ("split m", ("S(0)", "R"), ("S(0)",)),
        ("split k", ("S(1)", "S(0)"), ("P",)),
        ("split n", ("R", "S(1)"), ("S(1)",)),
        ("partial self", ("P", "R"), ("P",)),
        ("partial mat2", ("R", "P"), ("P",)),
    ]
    assert found.limits == ("sum over k", "sums pass through self, or mat2")


def test_letters_of_a_rule_that_lists_its_options_are_read_off_these() -> None:
    found = claims("aten.view(f32[4, 6], [4, 2, 3])")
    assert found.notation == "ab->ab." and not found.labelled
    assert [each.what for each in found.claims] == ["split a", "split b", *["partial self"] * 3]


@pytest.mark.parametrize("text, ranks, letter, reason", [
    ("aten.convolution(f32[4, 6, 5], f32[8, 6, 3], None, [1], [1], [1], False, [0], 1)", 4, "i", "evenly over 4 ranks"),
    ("aten.native_layer_norm(f32[3, 6], [6], None, None, 1e-5)", 4, "a", "some of 4 ranks would have none"),
])  # fmt: skip
def test_a_letter_that_is_not_split_has_a_reason(text: str, ranks: int, letter: str, reason: str) -> None:
    found = claims(text, ranks)
    assert reason in found.refused[letter]
    assert f"split {letter}" not in [each.what for each in found.claims]


def test_every_letter_of_every_example_is_split_or_refused(table: list[Row]) -> None:
    for row in table:
        if row.claims is not None and row.claims.labelled:
            letters = {c for each in (*row.claims.operands, *row.claims.results) for c in each.letters if c != "."}
            split = {each.what.removeprefix("split ") for each in row.claims.claims if each.what.startswith("split ")}
            assert letters <= split | row.claims.refused.keys(), row.example


def test_a_call_is_read_as_dumps_write_it() -> None:
    call = call_of("aten.index_put(f32[10, 6], [None, i64[4]], bf16[], True)", 2)
    assert call.args[0].shape == (10, 6) and call.args[1][0] is None and call.args[1][1].dtype is torch.int64
    assert call.args[2].shape == () and call.args[2].dtype is torch.bfloat16 and call.args[3] is True
    assert [each and each.shape for each in call.results] == [(10, 6)]
    assert call_of("sum.dim_IntList(f32[4, 6], [-1], dtype=f64)", 2).results[0].dtype is torch.float64  # type: ignore[union-attr]


@pytest.mark.parametrize("text, expected", [
    ("aten.mm", "expected a call such as"),
    ("aten.mm(f32[4, 8)", "expected arguments such as"),
    ("aten.mm(f32[4, 8], f33[8, 6])", "expected a dtype such as f32"),
    ("aten.mm(f32[4, 8], f32[9, 6])", "does not take these arguments"),
    ("aten.mm(f32[4, 8], 2 + x)", "expected a tensor's type such as"),
    ("aten.sum_of(f32[4])", "there is no op 'aten.sum_of'"),
    ("aten.sum.dim(f32[4])", "aten.sum.dim_IntList"),
])  # fmt: skip
def test_what_is_no_call_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        call_of(text, 2)


def test_names_and_patterns() -> None:
    assert list(ops_like("mm")) == ["aten.mm", "aten.mm.dtype"] == list(ops_like("torch.ops.aten.mm"))
    assert list(ops_like("aten.mm.default")) == ["aten.mm"] and list(ops_like("sum.dim_IntList")) == [
        "aten.sum.dim_IntList"
    ]
    assert {"aten.native_layer_norm", "aten.native_batch_norm"} <= ops_like("*norm*").keys()
    assert not ops_like("aten.cosh_") and ops_like("aten.cosh")


def test_an_op_without_an_example_is_shown_on_one_of_its_rule() -> None:
    rule = rule_of(torch.ops.aten.cummax.default)
    assert rule is not None
    assert example_of("aten.cummax", rule) == "aten.cummax(f32[4, 6], 1)"
    whole = rule_of(torch.ops.aten.nonzero.default)
    assert whole is not None and is_whole(whole) and example_of("aten.nonzero", whole) is None


def test_labels_are_read_only_meanwhile() -> None:
    """What a rule reads is not kept after it, nor that of another call."""
    with dims_read() as first:
        rule_of(torch.ops.aten.t.default)(call_of("aten.t(f32[4, 6])", 2))  # type: ignore[misc]
    assert len(first) == 1
    with dims_read() as second:
        claims("aten.mm(f32[4, 8], f32[8, 6])")
    claims("aten.t(f32[4, 6])")
    assert (len(first), len(second)) == (1, 0), "the inner reader has them"


class Whole:
    """No part of anything."""

    def __call__(self, *args: Any) -> list[Any]:
        return []


@pytest.mark.parametrize("function", [Whole(), partial(Whole().__call__, 1), max], ids=["object", "partial", "builtin"])
def test_a_rule_of_a_user_may_be_any_callable(function: Any) -> None:
    row = row_of(_rule(function), ["mylib.op"])
    assert row.claims is None and not row.whole and row.letters == ""
    assert row.file in ("tests/spmd/rules/test_table.py", "") and (row.line > 0) == bool(row.file)
