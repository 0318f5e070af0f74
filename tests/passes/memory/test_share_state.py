"""ShareState."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from passes import (
    BucketAllGather,
    BucketReduceScatter,
    Input,
    Kind,
    OneStorage,
    Part,
    Pass,
    Program,
    Realise,
    ReuseMemory,
    Role,
    ShareState,
    StartEarly,
    UpdateInPlace,
    WaitLate,
    run,
)
from passes.analysis.costs import Algorithm
from passes.ir.collectives import WAIT, operands
from passes.runtime.shared_memory_collectives import shared_all_gather, shared_all_reduce

from ..communication.test_realise import only
from ..communication.test_realise_shared_memory import on_one_host
from ..programs import (
    GROUP,
    all_gather,
    all_reduce,
    assert_same_bits,
    before_and_after,
    f64,
    make_program,
    reduce_scatter,
)

aten = torch.ops.aten

SHARED: list[Pass] = [
    *(BucketAllGather(), BucketReduceScatter(), OneStorage(), Realise(only(Algorithm.SHARED, Algorithm.NATIVE))),
    *(StartEarly(), WaitLate(), UpdateInPlace()),
]


def gathered_and_updated(w: Any, v: Any, x: Any) -> Any:
    """Two split parameters, a forward and a backward."""
    whole, other = all_gather(w), all_gather(v)
    h = aten.mm.default(x, whole)
    y = aten.mm.default(h, other)
    grad_w = reduce_scatter(aten.mm.default(aten.t.default(x), h))
    grad_v = reduce_scatter(aten.mm.default(aten.t.default(h), y))
    return aten.sub.Tensor(w, grad_w), aten.sub.Tensor(v, grad_v)


def evaluated(w: Any, v: Any, x: Any) -> Any:
    """A forward only, and an update that does not wait for the other ranks."""
    y = aten.mm.default(aten.mm.default(x, all_gather(w)), all_gather(v))
    return aten.mul.Tensor(w, 0.5), aten.mul.Tensor(v, 0.5), y


def updated_early(w: Any, v: Any, x: Any) -> Any:
    """The same, and a sum over ranks, which shows that all have read the parameters, but after their updates."""
    a, b, y = evaluated(w, v, x)
    return a, b, all_reduce(aten.sum.dim_IntList(y, [0]))


def stored(function: Any) -> Program:
    """A program of two parameters in one flat storage."""
    roles = [Role.PARAMETER, Role.PARAMETER, Role.GRADIENT, Role.GRADIENT]
    inputs = {"w": f64(2, 4), "v": f64(2, 4), "x": f64(3, 4)}
    program = on_one_host(make_program(function, {0: "w", 1: "v"}, roles, **inputs))
    program.inputs = [replace(i, role=Role.PARAMETER) if i.name in ("w", "v") else i for i in program.inputs]
    program.units = (("w", "v"),)
    return program


def test_share_state(golden: Any) -> None:
    """The sum that is waited for after the gather shows that all ranks have read the flat parameter."""

    def step(flat: Any, x: Any) -> Any:
        whole = WAIT(shared_all_gather.default(aten.cat.default([flat]), [6], 2, GROUP))
        total = WAIT(shared_all_reduce.default(aten.cat.default([aten.mul.Tensor(whole, x)]), None, "sum", GROUP))
        return aten.sum.default(whole), aten.sum.default(total)

    program = make_program(step, {}, [Role.PARAMETER, Role.GRADIENT], flat=f64(6), x=f64(12))
    parts = tuple(Part(Input(Role.PARAMETER, name, (3,), torch.float64), k, (3,)) for name, k in (("w", 0), ("v", 3)))
    program.inputs[0] = Input(Role.PARAMETER, "unit 0", (6,), torch.float64, parts=parts)
    golden(before_and_after(program, ShareState())[1])


@pytest.mark.parametrize("planned", [[], [ReuseMemory()]], ids=["allocated", "planned"])
def test_state_is_read_without_a_copy(planned: list[Pass]) -> None:
    before = stored(gathered_and_updated)
    after = run(before, [*SHARED, ShareState(), *planned])
    gather = next(node for node in after.collectives() if node.meta["collective"].kind is Kind.ALL_GATHER)
    (flat,) = [i for i in after.inputs if i.parts]
    assert flat.shared and operands(gather)[0] is after.placeholders[after.inputs.index(flat)]
    assert_same_bits(before, after)


@pytest.mark.parametrize("function", [evaluated, updated_early])
def test_state_that_may_be_written_to_before_all_have_read_it_is_copied(function: Any) -> None:
    before = stored(function)
    after = run(before, [*SHARED, ShareState(), ReuseMemory()])
    assert [i.shared for i in after.inputs if i.parts] == [True]  # another program may read it where it lies
    assert all(operands(node)[0].op != "placeholder" for node in after.collectives())
    assert_same_bits(before, after)


def test_without_it_state_is_copied() -> None:
    before = stored(gathered_and_updated)
    after = run(before, [*SHARED, ReuseMemory()])
    assert not any(i.shared for i in after.inputs)
    assert all(operands(node)[0].op != "placeholder" for node in after.collectives())
    assert_same_bits(before, after)


def test_state_that_is_sent_by_messages_is_not_shared() -> None:
    program = stored(gathered_and_updated)
    by_messages = [each for each in SHARED if not isinstance(each, Realise)]
    after = run(program, [*by_messages, ShareState()])
    assert after.history[-1] == "08 ShareState: nothing to do" and not any(i.shared for i in after.inputs)


def test_it_needs_the_final_order() -> None:
    with pytest.raises(ValueError, match="ShareState must come after UpdateInPlace"):
        run(stored(gathered_and_updated), [ShareState(), UpdateInPlace()])
    with pytest.raises(ValueError, match="ShareState must be the last pass, but StartEarly comes after it"):
        run(stored(gathered_and_updated), [ShareState(), StartEarly()])
