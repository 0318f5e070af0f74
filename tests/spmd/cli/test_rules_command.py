"""``spmd rules``: the table of sharding rules, and one rule in detail."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from spmd.cli.commands import main
from spmd.rules import RULES, user_rules

ROOT = Path(__file__).parents[3]
OF_A_USER = """
import torch
from torch.distributed.tensor import Replicate, Shard
import spmd

@spmd.register_rule(torch.ops.tests_rules_command.scale_rows.default)
def scale_rows(x, scale):
    '''Rows of both, or columns of x.'''
    return [([Shard(0)], [Shard(0), Shard(0)]), ([Shard(1)], [Shard(1), Replicate()])]
"""


def run(*argv: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["rules", *map(str, argv)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")


@pytest.fixture
def rules_kept() -> Iterator[None]:
    before, registered = dict(RULES), [*user_rules.registered]
    yield
    RULES.clear()
    RULES.update(before)
    user_rules.registered[:] = registered


def test_the_table_has_every_rule_by_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    at = lines.index("spmd/rules/matmul.py")
    assert lines[at + 1].split() == ["aten.mm,", "aten.mm.dtype", "mk,kn->mn", "The", "dims", "as", "labelled."]
    assert run("--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {op.name().replace("::", ".") for op in RULES} <= {name for row in rows for name in row["ops"]}


def test_a_pattern_of_several_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("*layer_norm*", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["rule"] for row in rows] == ["row_norm", "row_norm_backward"]


def test_one_rule_in_detail(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("aten.convolution") == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {
        "aten.convolution",
        "input f32[4, 6, 5, 5] n i . .",
        "weight f32[8, 6, 3, 3] o i . .",
        "bias f32[8] o",
        "result f32[4, 8, 5, 5] n o . .",
        "option input weight bias -> result",
        "split n S(0) R R -> S(0)",
        "split i S(1) S(1) P -> P",
        "split o R S(0) S(0) -> S(1)",
        "partial input + bias P R P -> P",
        "always R R R -> R",
        "refused: dims with a dot (input, weight, result), which the op needs whole",
        "sizes among the arguments: The arguments with the number of groups.",
    } <= {*shown}


def test_a_call_along_an_axis_of_so_many_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    call = "aten.convolution(f32[4, 6, 5], f32[8, 6, 3], None, [1], [1], [1], False, [0], 1)"
    assert run(call, "--ranks", 4) == 0
    out = capsys.readouterr().out
    assert "refused: i, since 6 rows do not split evenly over 4 ranks" in out and "split i" not in out
    assert run(call, "--ranks", 3, "--json") == 0
    claims = json.loads(capsys.readouterr().out)["claims"]
    assert {each["what"] for each in claims["claims"]} >= {"split i"} and claims["refused"].keys() == {"n", "o"}


def test_the_page_shows_what_is_printed_today(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    command, *shown = text.partition("```text\n$ ")[2].partition("```")[0].splitlines()
    assert run(*shlex.split(command)[2:]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert len(shown) > 10 and shown[1].endswith(" ...")  # the file's line moves, and is too long for a page
    assert [*shown[:1], *shown[2:]] == [*printed[:1], *printed[2:]]


def test_what_else_becomes_of_an_op(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("aten._softmax") == 0
    assert "where dim 1 of the first operand is split" in capsys.readouterr().out
    assert run("aten.nonzero") == 0
    assert "every rank runs the op on whole operands" in capsys.readouterr().out
    assert run("aten.cosh_") == 1
    assert "aten.cosh_ has no rule: it writes to its inputs" in capsys.readouterr().out
    assert run("aten.matmul") == 1
    assert "aten.matmul has no rule: where it can be decomposed" in capsys.readouterr().out


@pytest.mark.usefixtures("rules_kept")
def test_a_rule_of_a_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = torch.library.Library("tests_rules_command", "DEF")
    library.define("scale_rows(Tensor x, Tensor scale) -> Tensor")
    library.impl("scale_rows", lambda x, scale: x * scale[:, None], "CompositeExplicitAutograd")
    script = tmp_path / "rules_of_a_user.py"
    script.write_text(OF_A_USER)
    try:
        call = "tests_rules_command.scale_rows(f32[4, 6], f32[4])"
        assert run(call, "--file", script) == 0
        shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
        assert f"{script}:6, scale_rows: Rows of both, or columns of x." in shown
        assert {"split a S(0) S(0) -> S(0)", "split b S(1) R -> S(1)"} <= {*shown}
        assert run("tests_rules_command.scale_rows") == 0
        assert "No example of it is known" in capsys.readouterr().out
    finally:
        library._destroy()


@pytest.mark.parametrize("argv, expected", [
    (["aten.layer_nrm"], "close to it are"),
    (["aten.mm(f32[4, 8])"], "does not take these arguments"),
    (["aten.mm", "--ranks", "0"], "expected at least one rank"),
    (["aten.mm", "--file", "no_such_file.py"], "there is no file"),
])  # fmt: skip
def test_what_is_no_op_or_call(argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 2
    assert expected in capsys.readouterr().err
