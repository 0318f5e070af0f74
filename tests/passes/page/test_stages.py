"""The stages on the page: each statement once, details by stage, changes with their positions."""

from __future__ import annotations

import json
from typing import Any

import torch

from passes import Program, print_program
from passes.page.dumped_stages import StageTables
from passes.page.node_details import NodeDetails, read_details
from tests.passes.programs import f64, make_program

aten = torch.ops.aten
BEFORE = """def program(
    x: "f32[2]",  # batch x
):

    # ---- forward ----
    # model.0
    neg: "f32[2]" = aten.neg.default(x)  # a.py:1: y = -x
    abs_1: "f32[2]" = aten.abs.default(neg)
    exp: "f32[2]" = aten.exp.default(abs_1)
    sin: "f32[2]" = aten.sin.default(exp)
    return (
        sin,  # result result.0
    )
"""
AFTER = BEFORE.replace("    abs_1", "    cos", 1).replace("aten.abs", "aten.cos").replace("(abs_1)", "(cos)")


def tables(*texts: str, details: str = "") -> dict[str, Any]:
    stages = {f"{k:02}_stage": text for k, text in enumerate(texts)}
    return StageTables(stages, details, {"01": "1 edit"}).to_dict()


def codes(made: dict[str, Any], stage: int) -> list[str]:
    numbers = [first + k for first, count in made["stages"][stage]["runs"] for k in range(count)]
    return [made["statements"][number][0] for number in numbers]


def test_every_stage_has_its_statements_and_shares_them() -> None:
    made = tables(BEFORE, AFTER)
    assert [code.partition(":")[0] for code in codes(made, 0)] == ["x", "neg", "abs_1", "exp", "sin", "sin,"]
    assert [code.partition(":")[0] for code in codes(made, 1)] == ["x", "neg", "cos", "exp", "sin", "sin,"]
    assert len(made["statements"]) == 8  # two are new
    assert made["stages"][1]["did"] == "1 edit" and made["stages"][0]["changes"] == []


def test_changes_have_marks_and_positions() -> None:
    made = tables(BEFORE, AFTER)
    texts, statements = made["texts"], made["statements"]
    changes = [
        (mark, statements[before][0].partition(":")[0] if before >= 0 else "", position, texts[note])
        for mark, before, position, note in made["stages"][1]["changes"]
    ]
    assert sorted(changes) == [("+", "", 2, ""), ("-", "abs_1", 2, ""), ("~", "exp", 3, "reads cos instead of abs_1")]


def test_the_source_line_is_no_part_of_the_comment_where_it_is_known() -> None:
    tables_of = {"lines": ["", "a.py:1: y = -x"], "placements": ["", "Shard(dim=0)"]}
    details = json.dumps({**tables_of, "stages": {"00_stage": {"neg": [1, 1]}}})
    made = tables(BEFORE, details=details)
    code, comment, phase, module, line, placement, _ = next(each for each in made["statements"] if each[0][:3] == "neg")
    shown = [made["texts"][k] for k in (comment, phase, module, line, placement)]
    assert code == 'neg: "f32[2]" = aten.neg.default(x)'
    assert shown == ["", "forward", "model.0", "a.py:1: y = -x", "Shard(dim=0)"]


def program() -> Program:
    made: Program = make_program(lambda x: (aten.neg.default(aten.exp.default(x)),), {}, [], x=f64(2))
    return made


def test_details_of_a_stage_are_what_it_changed() -> None:
    details, made = NodeDetails(), program()
    exp, neg = (node for node in made.graph.nodes if node.op == "call_function")
    exp.meta["source"], neg.meta["source"] = "a.py:1: x", "a.py:2: y"
    details.note("00_capture", made)
    neg.meta["source"] = "a.py:3: z"
    details.note("01_partition", made)
    assert list(details.stages["01_partition"]) == [neg.name]
    first, second, third = map(dict, read_details(details.to_text(), ["00_capture", "01_partition", "02_other"]))
    assert first[exp.name] == second[exp.name] == ("a.py:1: x", "")
    assert (first[neg.name], second[neg.name]) == (("a.py:2: y", ""), ("a.py:3: z", ""))
    assert third == second


def test_a_printed_program_is_read() -> None:
    text = print_program(program())
    assert len(codes(tables(text), 0)) == 4
