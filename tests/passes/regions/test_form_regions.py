"""FormRegions: what is in a region, what stays outside, and that printer, reader, checker and diff look inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from passes import Diff, FormRegions, PassError, Program, Role, UpdateInPlace, check, interpret, print_program, run
from passes.ir.collectives import WAIT, is_wait
from passes.ir.inline import inlined
from passes.ir.read_program import read_program
from passes.ir.region import Region, regions
from passes.ir.saved_program import load_program, save_program

from ..programs import all_gather, all_reduce, assert_same_bits, before_and_after, f64, make_program

aten = torch.ops.aten


def train_step() -> Program:
    """Loss and update of one weight, by the rate that a call brings; the product is returned transposed, too."""

    def step(w: Any, x: Any, lr: Any) -> Any:
        product = aten.mm.default(x, aten.t.default(w))
        hidden = aten.gelu.default(product)
        loss = all_reduce(aten.sum.default(hidden))
        slope = aten.gelu_backward.default(aten.ones_like.default(hidden), product)
        gradient = all_reduce(aten.mm.default(aten.t.default(slope), x))
        decayed = aten.mul.Tensor(w, 0.5)
        return loss, aten.t.default(hidden), aten.add.Tensor(decayed, gradient, alpha=-lr)

    return make_program(step, {2: "w"}, [Role.RESULT, Role.GRADIENT], w=f64(2, 4), x=f64(3, 4), lr=0.1)


def two_updates() -> Program:
    """Two weights, whose gradients come one after the other, and then a product of both that is returned."""

    def step(v: Any, w: Any) -> Any:
        first, second = all_reduce(aten.exp.default(v)), all_reduce(aten.exp.default(w))
        new = [aten.sub.Tensor(p, aten.mul.Tensor(g, 0.1)) for p, g in ((v, first), (w, second))]
        return *new, aten.mul.Tensor(*new)

    return make_program(step, {0: "v", 1: "w"}, [Role.GRADIENT], v=f64(3), w=f64(3))


def inside(program: Program) -> list[list[str]]:
    """The ops of each region, by name."""
    return [[node.name for node in region.nodes] for region in regions(program.graph).values()]


def test_a_train_step(golden: Callable[[str], None]) -> None:
    program = train_step()
    _, text = before_and_after(program, FormRegions(), UpdateInPlace())
    golden(text)
    w, x = torch.randn(2, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    formed = run(program, [FormRegions()])
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops._c10d_functional.all_reduce.default, "_op", lambda x, *_: x.clone())
        patch.setattr(torch.ops._c10d_functional.wait_tensor.default, "_op", lambda x: x)
        expected, got = (interpret(each, w, x, 0.3) for each in (program, formed))
    torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-15)  # a small difference of numbers near 1
    assert all(not each._is_view() or each.shape == (2, 3) for each in got)


def test_a_diff_looks_inside() -> None:
    """All that is new are the ops that take a number as a tensor."""
    program = two_updates()
    assert not Diff.of_texts(print_program(program), print_program(run(program, [FormRegions()])))
    before, after = train_step(), run(train_step(), [FormRegions()])
    found = Diff.of_texts(print_program(before), print_program(after))
    changed = {change.statement.name for change in found.changes if change.kind != "moved"}
    assert changed == {"scalar_tensor", "add_by_tensors", "add"}


def test_inlined_it_is_the_program_before() -> None:
    program = two_updates()
    after = inlined(run(program, [FormRegions()]))
    assert not regions(after.graph)
    assert sorted(n.name for n in after.graph.nodes) == sorted(n.name for n in program.graph.nodes)
    assert_same_bits(program, after)


def test_the_bits_stay_the_same() -> None:
    program = two_updates()
    assert_same_bits(program, run(program, [FormRegions(min_ops=1)]))
    assert_same_bits(program, run(program, [FormRegions(), UpdateInPlace()]))


@pytest.mark.parametrize("make", [train_step, two_updates])
def test_the_text_is_read_back(make: Callable[[], Program]) -> None:
    program = run(make(), [FormRegions()])
    text = print_program(program)
    read, count = read_program(text, program)
    assert count == 0 and print_program(read) == text
    assert list(regions(read.graph).values()) == list(regions(program.graph).values())
    other = load_program(save_program(program))
    assert [[n.name for n in r.nodes] for r in regions(other.graph).values()] == inside(program)


def test_an_edit_in_a_region_is_read() -> None:
    program = run(two_updates(), [FormRegions()])
    text = print_program(program)
    assert text.count("aten.mul.Tensor(wait_tensor, 0.1)") == 1
    read, count = read_program(text.replace("(wait_tensor, 0.1)", "(wait_tensor, 0.2)"), program)
    assert count == 1
    check(read, program)
    (edited,) = [node for r in regions(read.graph).values() for node in r.nodes if 0.2 in node.args]
    assert edited.meta["val"].shape == (3,)
    with pytest.raises(PassError, match=r"wait_tensor_2"):
        read_program(text.replace("(wait_tensor, 0.1)", "(wait_tensor_2, 0.1)"), program)


def test_what_waits_for_other_collectives_is_another_region() -> None:
    """The update of the first weight need not wait for the second gradient, if the graph is cut there."""
    program = run(
        make_program(
            lambda v, w: tuple(aten.exp.default(aten.mul.Tensor(g, 0.1)) for g in (all_reduce(v), all_reduce(w))),
            roles=[Role.GRADIENT],
            v=f64(3),
            w=f64(3),
        ),
        [FormRegions()],
    )
    assert inside(program) == [["mul", "exp"], ["mul_1", "exp_1"]]
    assert inside(run(two_updates(), [FormRegions()])) == [["mul", "sub", "mul_1", "sub_1", "mul_2"]]


def test_what_another_op_has_to_run_in_between_is_divided() -> None:
    def by_hand(x: Any) -> Any:
        small = aten.exp.default(aten.neg.default(x))
        found = aten.bernoulli.p(small, 0.5)
        aside = aten.sin.default(aten.cos.default(x))
        return aten.tanh.default(aten.mul.Tensor(found, small)), aten.mul.Tensor(aside, small)

    program = run(make_program(by_hand, x=f64(3)), [FormRegions()])
    assert inside(program) == [["neg", "exp", "cos", "sin", "mul_1"], ["mul", "tanh"]]
    order = [node.name for node in program.graph.nodes]
    assert order.index("region_0_out") < order.index("bernoulli") < order.index("region_1_out")


def test_views_of_other_values_and_single_ops_stay_outside() -> None:
    def step(w: Any, x: Any) -> Any:
        whole = all_gather(w)
        part = aten.view.default(whole, [4, 2])
        base = aten.sin.default(aten.exp.default(x))
        halves = aten.split_with_sizes.default(base, [1, 2], 1)
        return aten.mm.default(part, base), halves[0], halves[1], aten.t.default(halves[1])

    program = run(make_program(step, roles=[Role.PARAMETER], w=f64(2, 2), x=f64(2, 3)), [FormRegions()])
    (names,) = inside(program)
    assert names == ["exp", "sin", "mm"]
    assert not any(node.name == "view" for node in program.graph.nodes if isinstance(node.target, Region))
    (call,) = regions(program.graph)
    assert [node.name for node in call.args] == ["x", "view"]  # type: ignore[union-attr]


def test_nothing_crosses_a_start_or_a_wait() -> None:
    program = run(train_step(), [FormRegions()])
    before, after = train_step(), inlined(program)
    fixed = [[n.name for n in p.graph.nodes if is_wait(n) or n in p.collectives()] for p in (before, after)]
    assert fixed[0] == fixed[1]


def broken(change: Callable[[Region], Any]) -> Program:
    program = run(two_updates(), [FormRegions()])
    change(next(iter(regions(program.graph).values())))
    return program


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda r: setattr(r.nodes[0], "target", aten.mul_.Tensor), "holds functional ops of aten alone"),
        (
            lambda r: setattr(r.nodes[0], "target", WAIT),
            "functional ops of aten",
        ),
        (lambda r: r.nodes[0].meta.pop("val"), r"has no meta\['val'\]"),
        (lambda r: r.nodes[0].meta.update(unknown=1), "which is not declared"),
        (lambda r: r.placeholders[0].meta.update(val=torch.empty(5)), r"takes torch.float32\[5\]"),
        (lambda r: r.results[0].meta.update(val=torch.empty(5)), r"returns torch.float32\[5\]"),
    ],
)
def test_a_region_is_checked_inside(change: Callable[[Region], Any], why: str) -> None:
    with pytest.raises(PassError, match=why):
        check(broken(change))
