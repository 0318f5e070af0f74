"""DeviceNumbers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from passes import DeviceNumbers, Program, Role, default, interpret, run, with_numbers_on_device
from passes.ir.numbers import pack
from passes.runtime.random import draw
from passes.update.device_numbers import host_numbers

from ..programs import before_and_after, f64, make_program

aten = torch.ops.aten
VALUES = {"n": 0.37, "m": 1.7, "k": 3, "seed": 12345}


def program_of(function: Callable[..., Any], updates: dict[int, str] | None = None, **inputs: Any) -> Program:
    """Inputs that are no tensors are numbers of a call."""
    program = make_program(function, updates, **inputs)
    roles = {name: Role.SEED if name == "seed" else Role.HYPER_PARAMETER for name in VALUES}
    program.inputs = [replace(each, role=roles.get(each.name, each.role)) for each in program.inputs]
    return program


def results(program: Program, tensors: dict[str, Any]) -> tuple[Any, ...]:
    """What it computes of these tensors and of ``VALUES``."""
    values = VALUES | tensors
    given = [pack(each, VALUES) if each.numbers else values[each.name] for each in program.inputs]
    return interpret(program, *given)


def test_device_numbers(golden: Any) -> None:
    def step(w: Any, b: Any, x: Any, n: Any, m: Any) -> Any:
        momentum = aten.add.Tensor(aten.mul.Tensor(b, m), x)
        return aten.add.Tensor(w, momentum, alpha=-n), momentum

    tensors = {name: torch.rand(3, dtype=torch.float64) for name in "wbx"}
    program = program_of(step, {0: "w", 1: "b"}, **{name: f64(3) for name in "wbx"}, n=0.1, m=0.9)
    after, text = before_and_after(program, DeviceNumbers())
    golden(text)
    assert host_numbers(after) == []
    torch.testing.assert_close(results(after, tensors), results(program, tensors))


OPS = [
    lambda x, y, n, m, k: aten.add.Tensor(x, n),
    lambda x, y, n, m, k: aten.add.Tensor(x, y, alpha=n),
    lambda x, y, n, m, k: aten.sub.Tensor(x, y, alpha=n),
    lambda x, y, n, m, k: aten.rsub.Scalar(x, n),
    lambda x, y, n, m, k: aten.mul.Tensor(x, n * m),
    lambda x, y, n, m, k: aten.mul.Tensor(x, k),
    lambda x, y, n, m, k: aten.div.Tensor(x, 1 - n),
    lambda x, y, n, m, k: aten.pow.Scalar(n, x),
    lambda x, y, n, m, k: aten.pow.Tensor_Scalar(x, n),
    lambda x, y, n, m, k: aten.addcmul.default(x, y, y, value=-n),
    lambda x, y, n, m, k: aten.addcdiv.default(x, y, x, value=n / m),
    lambda x, y, n, m, k: aten.lerp.Scalar(x, y, n),
    lambda x, y, n, m, k: aten.lt.Scalar(x, n),
    lambda x, y, n, m, k: aten.clamp_min.default(x, n),
    lambda x, y, n, m, k: aten.mul.Tensor(x, (n + k) * 2 - k / 7),
    lambda x, y, n, m, k: aten.mul.Tensor(x, m**k),
    lambda x, y, n, m, k: aten.mul.Tensor(x, k // 2 + k % 2),
    lambda x, y, n, m, k: aten.add.Tensor(x, aten.full.default([3], n, dtype=torch.float32)),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3,), ()], ids=["dims", "no dims"])
def test_ops_compute_what_they_do_with_numbers(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """To the order of rounding; in bf16 as computed in fp64 and rounded once, where torch's kernels round numbers."""
    torch.manual_seed(0)
    tensors = {name: (torch.rand(shape) + 0.1).to(dtype) for name in "xy"}
    program = program_of(lambda x, y, n, m, k: tuple(op(x, y, n, m, k) for op in OPS), **tensors, n=0.37, m=1.7, k=3)
    after = run(program, [DeviceNumbers()])
    assert host_numbers(after) == []
    wide = results(program, {name: x.double() for name, x in tensors.items()})
    tolerance = {torch.float64: 1e-15, torch.float32: 2e-7, torch.bfloat16: 2**-8}[dtype]  # sums of numbers below 2
    for expected, exact, got in zip(results(program, tensors), wide, results(after, tensors), strict=True):
        assert got.dtype is expected.dtype and got.shape == expected.shape
        truth = exact.to(got.dtype) if dtype is torch.bfloat16 else expected
        torch.testing.assert_close(got, truth, rtol=tolerance, atol=tolerance)


def test_an_int_tensor_keeps_its_dtype_or_becomes_fp32() -> None:
    tensors = {"x": torch.arange(4, dtype=torch.int32)}
    step = lambda x, n, k: (aten.mul.Tensor(x, n), aten.mul.Tensor(x, k), aten.gt.Scalar(x, n))  # noqa: E731
    program = program_of(step, **tensors, n=0.37, k=3)
    expected, got = results(program, tensors), results(run(program, [DeviceNumbers()]), tensors)
    assert [each.dtype for each in got] == [torch.float32, torch.int32, torch.bool]
    assert all(map(torch.equal, got, expected))


def test_a_value_that_is_read_from_a_tensor_stays_there() -> None:
    tensors = {"x": torch.rand(3), "c": torch.tensor(1.5)}
    program = make_program(lambda x, c, n: (aten.mul.Tensor(x, n),), x=torch.empty(3), c=torch.empty(()), n=0.1)
    (mul,) = program.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    with program.graph.inserting_before(mul):
        read = program.graph.call_function(aten._local_scalar_dense.default, (program.placeholders[1],))
        product = program.graph.call_function(operator.mul, (read, program.placeholders[2]))
    read.meta["val"] = product.meta["val"] = 1.5
    mul.update_arg(1, product)
    program.inputs[2] = replace(program.inputs[2], role=Role.HYPER_PARAMETER)
    program.graph_module.recompile()
    after = run(program, [DeviceNumbers()])
    assert not after.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default)
    assert torch.equal(*results(after, tensors), tensors["x"] * (1.5 * VALUES["n"]))


def test_what_must_be_a_number_stays_one() -> None:
    """An output, an op that the pass does not know, and what its names leave out."""
    step = lambda x, n, m, k: (aten.mul.Tensor(x, n * m), n * 2, aten.slice.Tensor(x, 0, 0, k))  # noqa: E731
    tensors = {"x": torch.rand(5)}
    program = program_of(step, **tensors, n=0.37, m=1.7, k=3)
    everything, some = (run(program, [DeviceNumbers(names)]) for names in (("*",), ("m",)))
    assert host_numbers(everything) == ["n", "k"] and host_numbers(some) == ["n", "k"]
    assert run(program, [DeviceNumbers(("seed",))]).inputs == program.inputs
    for after in (everything, some):
        torch.testing.assert_close(results(after, tensors), results(program, tensors))


def test_the_seed_of_a_draw_is_a_tensor() -> None:
    program = program_of(lambda x, seed: (aten.clone.default(x),), x=f64(4), seed=0)
    (clone,) = program.graph.find_nodes(op="call_function", target=aten.clone.default)
    x, seed = program.placeholders
    clone.target, clone.args, clone.kwargs = draw, (aten.rand_like.default, seed, 7, ((0, 4, 4),), x), {}
    after = run(program, [DeviceNumbers()])
    assert after.draws and host_numbers(after) == []
    tensors = {"x": torch.zeros(4, dtype=torch.float64)}
    assert torch.equal(*results(after, tensors), *results(program, tensors))


def test_it_stands_behind_kernels_that_read_the_host() -> None:
    names = [type(each).__name__ for each in with_numbers_on_device(default(), on_host=("*.eps",))]
    assert names.index("FuseUpdate") + 1 == names.index("DeviceNumbers") == names.index("FuseForeach") - 1
    names = [type(each).__name__ for each in with_numbers_on_device(default())]
    assert names.index("DeviceNumbers") + 1 == names.index("FuseUpdate")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge", "remainder"])
def test_a_number_is_compared_as_torch_rounds_it(name: str, dtype: torch.dtype) -> None:
    """Of the two values beside the number in a dtype one is below it, and it rounds to one of them."""
    x = torch.tensor([VALUES["n"], VALUES["n"] * 1.004, VALUES["n"] * 0.996, 1.0]).to(dtype)
    program = program_of(lambda x, n: (getattr(aten, name).Scalar(x, n),), x=x, n=VALUES["n"])
    after = run(program, [DeviceNumbers()])
    assert host_numbers(after) == []
    assert torch.equal(*(results(each, {"x": x})[0] for each in (program, after)))


def test_a_number_that_is_read_in_two_dtypes_is_there_before_both() -> None:
    def step(x: Any, n: Any, m: Any, k: Any) -> Any:
        late = m * k
        return (aten.mul.Tensor(aten.mul.Tensor(x, k * n), late),)

    program = program_of(step, x=f64(3), **{name: VALUES[name] for name in "nmk"})
    after, x = run(program, [DeviceNumbers()]), torch.rand(3, dtype=torch.float64)
    torch.testing.assert_close(results(after, {"x": x}), results(program, {"x": x}))
