"""The checker: each rule, broken once."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from passes import Axis, Mesh, OutputKind, PassError, Program, Role, check
from passes.ir.collectives import WAIT, c10d
from passes.ir.program import MicroBatches

from ..programs import all_reduce, f64, make_program

aten = torch.ops.aten


def program() -> Program:
    def step(p: Any, x: Any) -> Any:
        return aten.sum.default(x), aten.add.Tensor(p, all_reduce(aten.neg.default(x)))

    return make_program(step, {1: "p"}, [Role.GRADIENT], p=f64(3), x=f64(3))


def node(program: Program, name: str) -> torch.fx.Node:
    return next(node for node in program.graph.nodes if node.name == name)


def swap(p: Program) -> None:
    p.placeholders[0].append(node(p, "add"))


def write(p: Program) -> None:
    node(p, "neg").target = aten.neg_.default


def write_by_method(p: Program) -> None:
    node(p, "neg").op, node(p, "neg").target = "call_method", "neg_"


def write_statistics(p: Program) -> None:
    mean, x = p.placeholders
    with p.graph.inserting_before(p.output_node):
        arguments = (x, None, None, mean, mean, True, 0.1, 1e-5)
        p.graph.call_function(aten.native_batch_norm.default, arguments).meta["val"] = ()


def read_memory(p: Program) -> None:
    node(p, "neg").target, node(p, "neg").args = aten.as_strided.default, (p.placeholders[1], [2], [1], 0)


def update(**changes: Any) -> Callable[[Program], None]:
    def apply(p: Program) -> None:
        p.outputs[1] = replace(p.outputs[1], **changes)

    return apply


def read_too_early(p: Program) -> None:
    node(p, "add").update_arg(1, node(p, "all_reduce"))


def wait_for_nothing(p: Program) -> None:
    node(p, "wait_tensor").update_arg(0, node(p, "neg"))


def of_other_ranks(p: Program) -> None:
    start = node(p, "all_reduce")
    start.target, start.args = c10d.all_gather_into_tensor.default, (start.args[0], 3, start.args[2])


BROKEN: dict[str, tuple[Callable[[Program], Any], str]] = {
    "memory": (read_memory, r"neg \(aten.as_strided.default\) depends on where its operand lies in memory"),
    "ranks": (of_other_ranks, "all_reduce expects 3 ranks, but dp has 2: its result has their rows"),
    "order": (swap, "the graph of program is broken"),
    "inputs": (lambda p: p.inputs.pop(), "describes 1 inputs, but its graph has 2 placeholders: p, x"),
    "input names": (lambda p: p.inputs.__setitem__(1, p.inputs[0]), r"inputs need names of their own.*\['p'\]"),
    "outputs": (lambda p: p.outputs.pop(), "describes 1 outputs, but its graph returns 2 values"),
    "update of nothing": (update(name="q"), "an output updates 'q', but program has no input of that name"),
    "two updates": (
        lambda p: p.outputs.__setitem__(0, p.outputs[1]),
        r"update outputs need names of their own.*\['p'\]",
    ),
    "shape of update": (
        lambda p: node(p, "add").meta.update(val=f64(4)),
        r"the update of 'p' must be torch.float64\[3\], as the input is, but it is torch.float64\[4\]",
    ),
    "updated twice": (lambda p: p.inputs.__setitem__(0, replace(p.inputs[0], in_place=True)), "leave out one of them"),
    "val": (lambda p: node(p, "neg").meta.pop("val"), r"neg \(aten.neg.default\) has no meta\['val'\]"),
    "write": (write, "writes to its argument, but the program is functional"),
    "write by method": (write_by_method, "writes to its argument"),
    "write statistics": (write_statistics, "writes to its argument"),
    "description": (lambda p: node(p, "all_reduce").meta.pop("collective"), r"has no meta\['collective'\]"),
    "group": (
        lambda p: setattr(p, "mesh", Mesh((Axis("dp", 2, "7"),))),
        r"communicates in group '0' over axis 'dp', but the mesh has dp \(group '7'\)",
    ),
    "undeclared key": (
        lambda p: node(p, "neg").meta.update(cost=3),
        r"neg \(aten.neg.default\) has meta\['cost'\].*KEYS in passes/ir/meta.py, or.*'mypackage.cost'",
    ),
    "no wait": (read_too_early, "add reads the result of all_reduce before a wait"),
    "wait": (wait_for_nothing, "wait_tensor waits for neg, which is no collective"),
}


def test_a_program_that_is_well_formed() -> None:
    check(program(), program())


@pytest.mark.parametrize("what", BROKEN)
def test_each_rule(what: str) -> None:
    broken = program()
    breaks, sentence = BROKEN[what]
    breaks(broken)
    with pytest.raises(PassError, match=sentence):
        check(broken)


def test_a_key_with_a_dot_is_the_users_own() -> None:
    own = program()
    node(own, "neg").meta["mypackage.cost"] = 3
    check(own)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (update(kind=OutputKind.RESULT), "the result outputs were"),
        (lambda p: p.outputs.__setitem__(0, replace(p.outputs[0], name="other")), "the result outputs were"),
        (lambda p: p.set_outputs(p.output_values()[:1], p.outputs[:1]), r"does not for \['p'\]"),
    ],
)
def test_what_was_promised_before(change: Any, sentence: str) -> None:
    after = program()
    change(after)
    check(after)
    with pytest.raises(PassError, match=sentence):
        check(after, program())


def test_coalesced_collectives_are_waited_for_one_by_one() -> None:
    def step(x: Any, y: Any) -> Any:
        both = c10d.all_reduce_coalesced.default([x, y], "sum", "0")
        return WAIT(operator.getitem(both, 0)), WAIT(operator.getitem(both, 1))

    check(make_program(step, x=f64(3), y=f64(2)))


def test_an_earlier_program_writes_what_it_declares() -> None:
    """The declared updates are all of its updates; other programs may write anything."""
    last = replace(program(), earlier={"first": replace(program(), name="first", writes=frozenset({"p"}))})
    check(last)
    for names in (set(), {"p", "q"}):
        last.earlier["first"].writes = frozenset(names)  # type: ignore[arg-type]
        with pytest.raises(PassError, match=r"first is declared to write .*, but writes \['p'\]"):
            check(last)


def test_inputs_of_runs_stay() -> None:
    """An input under another name would be whole in each run of a call."""
    cut = replace(program(), micro_batches=MicroBatches(2, {"x": 0}))
    after = replace(cut, inputs=[cut.inputs[0], replace(cut.inputs[1], name="y")])
    check(after, replace(cut, micro_batches=None))
    with pytest.raises(PassError, match=r"each run takes its own \['x'\]"):
        check(after, cut)
