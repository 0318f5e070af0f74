"""Inserting and replacing nodes: what the meta of the old node says, and where it goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from passes import Phase, Program, fill_vals
from passes.ir.edit import insert_before, replace
from passes.ir.meta import Relation

from ..programs import f64, make_program

aten = torch.ops.aten

META: dict[str, Any] = {
    "phase": Phase.UPDATE,
    "module": "model",
    "source": "train.py:1: f(x)",
    "recompute_of": "neg",
    "grad_of": "w",
    "draw": 3,
    "uneven": "",
    "live_bytes": 8,
    "mypackage.cost": 5,
}
CARRIED = {
    Relation.HELPER: {"phase", "module"},
    Relation.STEP: {"phase", "module", "source", "recompute_of"},
    Relation.SHARE: {"phase", "module", "source", "recompute_of", "grad_of", "draw"},
    Relation.REPLACEMENT: {*META} - {"live_bytes"},
}


def program() -> Program:
    return make_program(lambda x: (aten.neg.default(x),), x=f64(3))


def negation(program: Program) -> fx.Node:
    (node,) = program.graph.find_nodes(op="call_function", target=aten.neg.default)
    node.meta |= META
    return node


@pytest.mark.parametrize("relation", Relation)
def test_what_a_new_node_takes_over(relation: Relation) -> None:
    node = negation(program())
    added = insert_before(node, aten.clone.default, node.args[0], like=node, relation=relation)
    assert added.next is node and added.name == "clone"
    assert added.meta == {key: META[key] for key in CARRIED[relation]}


def test_a_node_that_belongs_to_no_part_of_the_step() -> None:
    node, val = negation(program()), f64(3)
    options = {"dtype": torch.float64}
    added = insert_before(node, aten.ones.default, [3], like=None, kwargs=options, name="ones_here", val=val)
    assert (added.name, added.args, added.kwargs, added.meta) == ("ones_here", ([3],), options, {"val": val})


def test_a_replacement_takes_the_readers_and_all_but_the_val() -> None:
    changed = program()
    node = negation(changed)
    new = insert_before(node, aten.mul.Tensor, node.args[0], -1, like=None)
    replace(node, new)
    assert changed.output_values() == (new,) and not node.users
    assert new.meta == {key: META[key] for key in CARRIED[Relation.REPLACEMENT]}
    fill_vals(changed)
    assert new.meta["val"].shape == (3,)


def test_a_replacement_keeps_what_is_true_of_it_alone() -> None:
    node = negation(program())
    new = insert_before(node, aten.clone.default, node.args[0], like=None)
    new.meta["live_bytes"] = 4
    replace(node, new, val=node.meta["val"])
    assert new.meta["live_bytes"] == 4 and new.meta["val"] is node.meta["val"]
