"""OneStorage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from passes import (
    BucketAllGather,
    BucketAllReduce,
    BucketReduceScatter,
    FormUnits,
    OneStorage,
    Pass,
    PassError,
    Program,
    Role,
    UpdateInPlace,
    check,
    print_program,
    run,
)

from ..programs import all_gather, all_reduce, assert_same_bits, before_and_after, f64, make_program, targets

aten = torch.ops.aten


def described(program: Program, **inputs: tuple[Role, str | None]) -> Program:
    """The program with the roles of some inputs, and the parameters that they are state of."""
    program.inputs = [
        replace(i, role=inputs[i.name][0], of=inputs[i.name][1]) if i.name in inputs else i for i in program.inputs
    ]
    for name, (role, of) in inputs.items():
        if role is Role.OPTIMIZER_STATE:
            rename = {name: f"optimizer.m[{of}]"}
            program.inputs = [replace(i, name=rename.get(i.name, i.name)) for i in program.inputs]
            program.outputs = [replace(o, name=rename.get(o.name, o.name)) for o in program.outputs]
    return program


def momentum_step(w: Any, b: Any, mw: Any, mb: Any, x: Any) -> Any:
    """Two layers' worth: gradients are reduced, momentum and parameters are updated."""
    total = aten.sum.default(w)
    grad_w, grad_b = all_reduce(aten.mm.default(aten.t.default(x), x)), all_reduce(aten.sum.dim_IntList(x, [0]))
    new_mw, new_mb = (aten.add.Tensor(aten.mul.Tensor(m, 0.9), g) for m, g in ((mw, grad_w), (mb, grad_b)))
    return aten.sub.Tensor(w, new_mw), aten.sub.Tensor(b, new_mb), new_mw, new_mb, total


def momentum() -> Program:
    inputs = {"w": f64(3, 3), "b": f64(3), "mw": f64(3, 3), "mb": f64(3), "x": f64(5, 3)}
    program = make_program(momentum_step, {0: "w", 1: "b", 2: "mw", 3: "mb"}, [Role.GRADIENT], **inputs)
    for node, name in zip(program.collectives(), "wb", strict=True):
        node.meta["collective"] = replace(node.meta["collective"], of=(name,))
    state = {"mw": (Role.OPTIMIZER_STATE, "w"), "mb": (Role.OPTIMIZER_STATE, "b")}
    return described(program, w=(Role.PARAMETER, None), b=(Role.PARAMETER, None), **state)


def gathers(program: Program) -> Program:
    for node in program.collectives():
        node.meta["collective"] = replace(node.meta["collective"], role=Role.PARAMETER)
    return program


def gathered() -> Program:
    def step(w: Any, v: Any, x: Any) -> Any:
        w_sent = aten.contiguous.default(w)  # as the partitioner writes it
        h = aten.mm.default(aten.mm.default(x, all_gather(w_sent)), all_gather(v))
        return h, aten.sub.Tensor(w, 1), aten.sub.Tensor(v, 1)

    inputs = {"w": f64(2, 6), "v": f64(3, 5), "x": f64(7, 4)}
    program = gathers(make_program(step, {1: "w", 2: "v"}, [Role.PARAMETER], **inputs))
    return described(program, w=(Role.PARAMETER, None), v=(Role.PARAMETER, None))


def flats(program: Program, *passes: Pass) -> list[tuple[str, ...]]:
    """The parts of each flat input after the passes, which must leave the same bits."""
    after = run(program, passes)
    assert_same_bits(program, after)
    return [tuple(part.input.name for part in i.parts) for i in after.inputs if i.parts]


def test_one_storage(golden: Any) -> None:
    after, text = before_and_after(momentum(), FormUnits(), OneStorage(), UpdateInPlace())
    golden(text)
    assert_same_bits(momentum(), after)
    assert "copy_.default" not in targets(after) and "clone.default" not in targets(after)


def test_a_gather_takes_the_flat_storage_itself() -> None:
    program = gathered()
    after = run(program, [BucketAllGather(), OneStorage()])
    assert_same_bits(program, after)
    assert "cat.default" not in targets(after) and "reshape.default" not in targets(after)
    (gather,) = after.collectives()
    assert gather.args[0] is after.placeholders[0]


def test_each_kind_of_state_of_a_unit_is_stored_in_the_order_of_the_parameters() -> None:
    assert flats(momentum(), FormUnits(), OneStorage()) == [("w", "b"), ("optimizer.m[w]", "optimizer.m[b]")]
    assert flats(momentum(), OneStorage()) == []
    assert flats(gathered(), OneStorage()) == []
    assert flats(gathered(), BucketAllGather(), OneStorage()) == [("w", "v")]


def test_what_is_stored_flat_already_is_left() -> None:
    assert flats(momentum(), FormUnits(), OneStorage(), OneStorage()) == flats(momentum(), FormUnits(), OneStorage())


def flat(value: Any) -> Any:
    return aten.reshape.default(value, [-1])


def concatenating(join: Callable[..., list[Any]], role: Role = Role.PARAMETER) -> Program:
    """``join`` chooses what is concatenated: of ``a`` and ``b``, and of ``x``, an input between them."""

    def step(a: Any, x: Any, b: Any) -> Any:
        return aten.neg.default(x), aten.exp.default(x), aten.neg.default(aten.cat.default(join(a, x, b)))

    program = make_program(step, {0: "a", 1: "b"}, a=f64(3, 2), x=f64(3, 2), b=f64(3, 2))
    return described(program, a=(role, None), b=(role, None))


CONCATENATIONS: dict[str, tuple[Callable[..., list[Any]], bool]] = {
    "all": (lambda a, x, b: [flat(a), flat(aten.contiguous.default(b))], True),
    "another order": (lambda a, x, b: [flat(b), flat(a)], False),
    "a part": (lambda a, x, b: [flat(a), flat(a)], False),
    "more": (lambda a, x, b: [flat(a), flat(b), flat(x)], False),
    "columns first": (lambda a, x, b: [flat(aten.t.default(a)), flat(b)], False),
    "rows": (lambda a, x, b: [a, b], False),
}


@pytest.mark.parametrize("name", CONCATENATIONS)
def test_a_concatenation_of_all_in_order_is_the_storage(name: str) -> None:
    join, is_storage = CONCATENATIONS[name]
    program = concatenating(join)
    program.units = (("a", "b"),)
    assert flats(program, OneStorage()) == [("a", "b")]
    assert ("cat.default" not in targets(run(program, [OneStorage()]))) is is_storage


@pytest.mark.parametrize("name, found", [
    ("all", [("a", "b")]), ("another order", [("b", "a")]), ("a part", []), ("more", []), ("columns first", []),
    ("rows", []),
])  # fmt: skip
def test_what_is_concatenated_whole_is_stored_in_that_order(name: str, found: list[tuple[str, ...]]) -> None:
    assert flats(concatenating(CONCATENATIONS[name][0]), OneStorage()) == found


def test_only_parameters_and_optimizer_state_are_joined() -> None:
    assert flats(concatenating(CONCATENATIONS["all"][0], Role.BUFFER), OneStorage()) == []


def test_state_of_another_shape_than_its_parameter_is_not_joined() -> None:
    def step(a: Any, b: Any, ma: Any, mb: Any) -> Any:
        return tuple(aten.neg.default(each) for each in (a, b, ma, mb))

    program = make_program(step, dict(enumerate(["a", "b", "ma", "mb"])), a=f64(3), b=f64(3), ma=f64(3), mb=f64(1))
    state = {"ma": (Role.OPTIMIZER_STATE, "a"), "mb": (Role.OPTIMIZER_STATE, "b")}
    program = described(program, a=(Role.PARAMETER, None), b=(Role.PARAMETER, None), **state)
    assert flats(program, FormUnits(), OneStorage()) == [("a", "b")]


def test_a_part_can_be_written_while_others_are_read() -> None:
    def step(a: Any, b: Any, x: Any) -> Any:
        new_a = aten.add.Tensor(a, x)
        total = aten.sum.default(b)
        return new_a, aten.mul.Tensor(b, new_a), total

    program = make_program(step, {0: "a", 1: "b"}, a=f64(3), b=f64(3), x=f64(3))
    program = described(program, a=(Role.PARAMETER, None), b=(Role.PARAMETER, None))
    after = run(program, [FormUnits(), OneStorage(), UpdateInPlace()])
    assert_same_bits(program, after)
    assert {"add_.Tensor", "mul_.Tensor"} <= set(targets(after)) and "copy_.default" not in targets(after)
    assert [part.input.in_place for part in after.inputs[0].parts] == [True, True]


def test_a_part_is_not_written_while_all_of_them_are_read() -> None:
    program = gathered()
    after = run(program, [BucketAllGather(), OneStorage(), UpdateInPlace()])
    assert_same_bits(program, after)
    assert targets(after).index("wait_tensor.default") < targets(after).index("sub_.Tensor")


def test_parts_that_swap_values_are_copied_first() -> None:
    def step(a: Any, b: Any) -> Any:
        return b, a, aten.cat.default([aten.reshape.default(a, [-1]), aten.reshape.default(b, [-1])])

    program = make_program(step, {0: "a", 1: "b"}, a=f64(3), b=f64(3))
    program = described(program, a=(Role.PARAMETER, None), b=(Role.PARAMETER, None))
    assert flats(program, FormUnits(), OneStorage(), UpdateInPlace()) == [("a", "b")]
    assert flats(program, FormUnits(), OneStorage()) == [("a", "b")]


def test_state_that_is_fixed_stays_where_it_is() -> None:
    program = momentum()
    program.fixed = frozenset({"b"})
    assert flats(program, FormUnits(), OneStorage()) == [("optimizer.m[w]", "optimizer.m[b]")]
    program = momentum()
    program.stored = (("w", "b"),)
    assert flats(program, FormUnits(), OneStorage())[0] == ("w", "b")
    program.stored = (("b", "w"),)
    assert flats(program, FormUnits(), OneStorage()) == [("optimizer.m[w]", "optimizer.m[b]")]


@pytest.mark.parametrize("placement, even", [(Shard(0), False), (Shard(1), True), (Replicate(), True)])
def test_only_equal_parts_are_joined(placement: Any, even: bool) -> None:
    program = gathered()  # a rank's shapes are [2, 6] and [3, 5]
    wholes = {"w": (3, 6), "v": (3, 10)}
    program.inputs = [replace(i, shape=wholes.get(i.name, i.shape), placement=(placement,)) for i in program.inputs]
    assert bool(flats(program, BucketAllGather(), OneStorage())) is even


def test_other_dtypes_and_layouts_are_not_joined() -> None:
    for b in (torch.empty(3), torch.empty(3, 2, dtype=torch.float64).t(), f64(0)):
        program = make_program(lambda a, b: (aten.neg.default(a), aten.neg.default(b)), {0: "a", 1: "b"}, a=f64(3), b=b)
        program = described(program, a=(Role.PARAMETER, None), b=(Role.PARAMETER, None))
        program.units = (("a", "b"),)
        assert flats(program, OneStorage()) == []


def test_a_unit_whose_members_have_other_kinds_of_state_keeps_that_apart() -> None:
    program = momentum()
    program.inputs = [replace(i, role=Role.BUFFER) if i.name == "optimizer.m[b]" else i for i in program.inputs]
    assert flats(program, FormUnits(), OneStorage()) == [("w", "b")]


def test_a_lost_part_is_an_error() -> None:
    after = run(momentum(), [FormUnits(), OneStorage()])
    split = next(iter(after.placeholders[0].users))
    next(iter(split.users)).args = (split, 7)
    with pytest.raises(PassError, match=r"holds \['w'\], but its graph does not show"):
        check(after)


@pytest.mark.parametrize("other", [FormUnits, BucketAllGather, BucketReduceScatter, BucketAllReduce])
def test_it_comes_after_the_passes_that_group(other: type[Pass]) -> None:
    with pytest.raises(ValueError, match=f"must come after {other.__name__}"):
        run(momentum(), [OneStorage(), other()])


def test_its_text_runs() -> None:
    compile(print_program(run(momentum(), [FormUnits(), OneStorage(), UpdateInPlace()])), "text", "exec")
