"""The two halves of a step, captured once as lists of ops on fixed memory and replayed, as a CUDA graph would be."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

import passes
import spmd
from passes._torch import OpOverload
from passes.update.device_numbers import host_numbers
from spmd.lowering import codegen
from spmd.lowering.codegen import Bound, writes_to_inputs
from tests.harness.cases import mlp
from tests.harness.oracle import Case, Snapshot, all_unequal, plain_run, random_generator, snapshot
from tests.harness.pool import Ranks

STEPS, CAPTURED = 6, 2  # the calls there are, and the one that is captured
DEVICE = passes.with_numbers_on_device(passes.default())


@dataclass(frozen=True)
class Scheduled(Case):
    """Three optimizers, all of whose numbers are others in each call; the step also returns what it draws."""

    def build(self) -> tuple[Any, ...]:
        model = mlp(7, 6, 5, 3)
        first, second, third = (list(layer.parameters()) for layer in model if isinstance(layer, nn.Linear))
        sgd = torch.optim.SGD(first, lr=0.05, momentum=0.9, weight_decay=0.01)
        return model, sgd, torch.optim.AdamW(second, lr=0.01), torch.optim.RMSprop(third, lr=0.01, momentum=0.5)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        generator = random_generator(rank, step)
        return tuple(torch.rand(4, size, generator=generator, dtype=torch.float64) for size in (7, 3))

    @staticmethod
    def step(model: nn.Module, sgd: Any, adamw: Any, rmsprop: Any, x: Tensor, y: Tensor) -> Any:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for optimizer in (sgd, adamw, rmsprop):
            optimizer.step()
            optimizer.zero_grad()
        return loss, F.dropout(torch.ones_like(x))

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        for optimizer in objects[1:]:
            for name, value in optimizer.param_groups[0].items():
                if name == "betas":
                    optimizer.param_groups[0][name] = (0.8 + 0.01 * step, 0.9 + 0.01 * step)
                elif isinstance(value, float):
                    optimizer.param_groups[0][name] = value * 0.75


@dataclass
class Tape:
    """The calls of one half: function, arguments, result; each result keeps its memory."""

    calls: list[tuple[Any, Any, Any, Any]] = field(default_factory=list)

    def replay(self) -> None:
        for function, args, kwargs, result in self.calls:
            if isinstance(function, partial):  # a collective, which writes into memory that it is given
                function.args[0](*args, out=result)
                continue
            for new, fixed in zip(tree_leaves(function(*args, **kwargs)), tree_leaves(result), strict=True):
                if isinstance(new, Tensor) and new.untyped_storage().data_ptr() != fixed.untyped_storage().data_ptr():
                    fixed.copy_(new)


class Recorder:
    """Stands in the scope of generated code for each function that the code calls."""

    def __init__(self) -> None:
        self.tape: Tape | None = None

    @contextmanager
    def recording(self) -> Iterator[Tape]:
        self.tape = tape = Tape()
        yield tape
        self.tape = None

    def compile(self, text: str, scope: dict[str, Any]) -> Any:
        called = {name for name in scope if re.search(rf"\b{name}\(", text)}
        return _compile(text, {k: partial(self.call, v) if k in called else v for k, v in scope.items()})

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(arg.args[0] if isinstance(arg, partial) else arg for arg in args)
        result = function(*args, **kwargs)
        if self.tape is not None:
            self.tape.calls.append((function, args, kwargs, result))
        return Work(self, result) if hasattr(result, "start") else result


class Work:
    """A collective that is made once."""

    def __init__(self, recorder: Recorder, work: Any) -> None:
        self.start, self.wait = partial(recorder.call, work.start), partial(recorder.call, work.wait)


_compile = codegen._compiled


class Captured:
    """Runs a program by its two tapes, on inputs that are copied to fixed memory."""

    def __init__(self, bound: Bound, recorder: Recorder) -> None:
        self.bound, self.recorder = bound, recorder
        self.halves: Any = None

    def __call__(self, *inputs: Any) -> Any:
        given = self.bound.given(*inputs)
        assert all(isinstance(each, Tensor) for each in given), "no number of the host is left"
        if self.halves is None:
            self.halves = gradients, update = self.bound.halves(*inputs)
            self.static = [each.clone() for each in given]
            with self.recorder.recording() as self.first:
                handed = gradients(*self.static)
            self.bound.before_update(*inputs)
            with self.recorder.recording() as self.second:
                self.outputs = update(list(handed))
        else:
            assert self.bound.halves(*inputs) is self.halves, "state keeps its addresses"
            for to, value in zip(self.static, given, strict=True):
                to.copy_(value)
            self.first.replay()
            self.bound.before_update(*inputs)
            self.second.replay()
        return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, self.outputs)


def is_op(function: Any) -> bool:
    """Whether a half may call a function: torch's, or what a graph of ours calls."""
    if isinstance(function, partial):
        return function.func is codegen._into_new and is_op(function.args[0])
    if isinstance(function, types.MethodType):  # of a collective that is made once
        function = type(function.__self__)
    bindings = (types.BuiltinFunctionType, types.MethodDescriptorType, OpOverload)
    return isinstance(function, bindings) or function.__module__.startswith("passes.runtime.")


def run(rank: int, case: Case, passes: Any, style: str, recorder: Recorder | None = None) -> Any:
    """Snapshots after each call, and the step; with a recorder all calls from that on are replayed."""
    torch.manual_seed(0)
    spmd.seed(3)
    objects, mode = case.build(), spmd.DataParallel(style)  # type: ignore[arg-type]
    step = spmd.compile(case.step, parallel_mode=mode, passes=passes, gm_transformation=lambda gm: gm)
    seen, sources = [], []
    for k in range(STEPS):
        if k == CAPTURED and recorder is not None:
            executable = step._dispatch.programs.last.executable
            executable.function = Captured(executable.function, recorder)
        result = step(*objects, *case.part(rank, k))
        seen.append(snapshot(result, objects))
        sources.append(next(codegen._number))
        case.after(objects, k)
    spmd.seed(None)
    assert sources[CAPTURED:] == list(range(sources[CAPTURED], sources[CAPTURED] + STEPS - CAPTURED)), "no new code"
    return seen, step


def replayed(rank: int, world: int, style: str) -> list[str]:
    """What differs from the plain step, and from what the default program draws; and what is no op."""
    case, recorder = Scheduled(), Recorder()
    codegen._compiled = recorder.compile
    try:
        got, step = run(rank, case, DEVICE, style, recorder)
    finally:
        codegen._compiled = _compile
    assert host_numbers(step.program) == []
    captured = step._dispatch.programs.last.executable.function
    assert captured.first.calls and captured.second.calls
    strange = [str(each[0]) for tape in (captured.first, captured.second) for each in tape.calls if not is_op(each[0])]
    default, _ = run(rank, case, None, style)
    drawn, expected = (taken(each) for each in (got, default))
    assert all(torch.equal(one, other) for one, other in zip(drawn, expected, strict=True))
    assert len({str(each.tolist()) for each in drawn}) == STEPS, "each call has a mask of its own"
    plain = plain_run(case, world, STEPS)
    taken(plain)
    return [*strange, *all_unequal(plain, got, rank, world)]


def taken(snapshots: Sequence[Snapshot]) -> list[Tensor]:
    return [each.pop("result[1]") for each in snapshots]


@pytest.mark.parametrize("style", [pytest.param("replicate", marks=pytest.mark.exhaustive), "fully_shard"])
def test_captured_halves_read_the_numbers_of_each_call(ranks: Ranks, style: str) -> None:
    found = [line for lines in ranks.run(2, replayed, style) for line in lines]
    assert not found, "\n".join(found[:20])


@pytest.mark.usefixtures("alone")
def test_kernels_take_the_learning_rate_as_a_tensor() -> None:
    """The other numbers stay on the host, where the kernels read them."""
    case = Scheduled()
    torch.manual_seed(0)
    pipeline = passes.with_numbers_on_device(passes.default(), ("*.lr", "seed"), ("*.betas.*",))
    objects, step = case.build(), spmd.compile(case.step, passes=pipeline)
    spmd.seed(3)
    got = []
    for k in range(4):
        got.append(snapshot(step(*objects, *case.part(0, k)), objects))
        case.after(objects, k)
    spmd.seed(None)
    kernels = {str(node.target) for node in step.program.graph.nodes if "_fused_" in str(node.target)}
    assert {"aten._fused_adamw_.tensor_lr", "aten._fused_sgd_.tensor_lr"} <= kernels
    left = host_numbers(step.program)
    assert "adamw.0.betas.0" in left and not [name for name in left if name.endswith("lr") or name == "seed"]
    plain = plain_run(case, 1, 4)
    taken(plain), taken(got)
    assert all_unequal(plain, got, 0, 1) == []


@pytest.mark.usefixtures("alone")
def test_statistics_are_written_behind_forward_and_backward() -> None:
    """Also on one rank, so that the first half ends with the last gradient."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @spmd.compile
    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step(model, optimizer, torch.rand(8, 4, dtype=torch.float64))
    nodes = list(step.program.graph.nodes)
    second = nodes[nodes.index(next(iter(writes_to_inputs(step.program)))) :]
    assert not [node for node in second if node.meta.get("phase") is passes.Phase.BACKWARD]
    assert len([node for node in second if node.target is torch.ops.aten.copy_.default]) == 2, (
        "the running mean and variance"
    )
