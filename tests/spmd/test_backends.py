"""Backends that take regions: torch's, and one of one's own. All that goes around regions stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import passes
import spmd
from passes.ir.effects import is_functional
from passes.ir.region import Region, regions
from tests.harness.cases import MLP, clipped, make_optimizer
from tests.harness.messages import messages
from tests.harness.oracle import all_unequal, compiled_run, plain_run, snapshot
from tests.harness.pool import Ranks
from tests.harness.structure import compile_on_fake_ranks

Backend = Callable[..., Any]


@dataclass(frozen=True)
class Normed(MLP):
    """A norm and a GELU between two layers, clipped. The rate changes in each step, and the fourth batch is short.

    ``fewer``: rows that each rank has less than the one before.
    """

    sizes: tuple[int, ...] = (6, 8, 3)
    rows: int = 5
    fewer: int = 1

    def build(self) -> tuple[Any, ...]:
        model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)).double()
        return model, make_optimizer(self.optimizer, model.parameters())

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        return tuple(x[: (3 if step == 3 else self.rows) - self.fewer * rank] for x in super().part(rank, step))

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        objects[1].param_groups[0]["lr"] *= 0.5

    step = staticmethod(clipped)


class Counting:
    """Runs a region op by op, and counts the modules that it was given and the calls of them."""

    def __init__(self) -> None:
        self.modules: list[fx.GraphModule] = []
        self.calls = 0

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Tensor]) -> Backend:
        vals = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        assert all(x is val for x, val in zip(example_inputs, vals, strict=True))
        assert all(is_functional(node) for node in gm.graph.nodes if node.op not in ("placeholder", "output"))
        self.modules.append(gm)

        def run(*operands: Tensor) -> Any:
            self.calls += 1
            return gm(*operands)

        return run


def eager(**options: Any) -> Backend:
    return partial(torch.compile, backend="eager", fullgraph=True, **options)


def aot_eager(gm: fx.GraphModule, example_inputs: list[Tensor]) -> Backend:
    return torch.compile(gm, backend="aot_eager", fullgraph=True)  # type: ignore[no-any-return]


BACKENDS: dict[str, Callable[[], Backend]] = {"mine": Counting, "eager": eager, "aot_eager": lambda: aot_eager}


def trained(rank: int, world: int, case: MLP, name: str, mode: dict[str, Any]) -> list[str]:
    """What differs from the plain step after each of five calls."""
    backend = BACKENDS[name]()
    parallel_mode = spmd.DataParallel(**mode)
    compiled, got = compiled_run(rank, case, 5, parallel_mode=parallel_mode, backend=backend)
    assert len(compiled.programs) >= 2
    for program in compiled.programs:
        assert len(regions(program.graph)) >= 2 and program.collectives()
    if isinstance(backend, Counting):
        assert backend.calls >= 5 * 2 > len(backend.modules) / 2
    return all_unequal(plain_run(case, world, 5), got, rank, world)


def between_calls(rank: int, world: int, mode: dict[str, Any]) -> tuple[list[str], str]:
    """What differs after five calls of a step that leaves something in flight, and the program that it ran last."""
    case, backend = Normed(optimizer="SGD momentum", rows=3, fewer=0), Counting()
    with messages(rank):
        torch.manual_seed(0)
        objects = case.build()
        step = spmd.compile(parallel_mode=spmd.DataParallel(**mode), backend=backend)(case.step)
        for k in range(5):
            if k:
                case.after(objects, k - 1)
            result = step(*objects, *case.part(rank, k))
        ran = step.program.name.rpartition("-")[2]
        step.flush()
    assert regions(step.program.graph) and backend.calls
    expected = plain_run(case, world, 5)[-1:]
    return all_unequal(expected, [snapshot(result, objects)], rank, world), ran


def test_what_is_left_for_the_next_call_goes_around_regions(ranks: Ranks) -> None:
    assert ranks.run(2, between_calls, {"defer_updates": True}) == [([], "steady")] * 2


@pytest.mark.parametrize(
    "name, optimizer, style",
    [
        ("mine", "AdamW", "fully_shard"),
        pytest.param("mine", "SGD momentum", "default", marks=pytest.mark.exhaustive),
        pytest.param("eager", "SGD", "fully_shard", marks=pytest.mark.exhaustive),
        pytest.param("aot_eager", "SGD", "replicate", marks=pytest.mark.exhaustive),
    ],
)
def test_the_numbers_are_those_of_the_plain_step(ranks: Ranks, name: str, optimizer: str, style: str) -> None:
    mode = {"parallel_style": style}
    assert ranks.run(2, trained, Normed(optimizer=optimizer), name, mode) == [[]] * 2


def small() -> tuple[Any, ...]:
    """Model, optimizer, batch."""
    case = MLP(sizes=(4, 5, 2), rows=4)
    torch.manual_seed(0)
    return *case.build(), *case.part(0, 0)


def trains_as_plain(backend: Backend, calls: int = 2, **options: Any) -> spmd.CompiledStep:
    """Compare a step on one rank with the plain one; returns it."""
    step = spmd.compile(backend=backend, **options)(MLP.step)
    expected, got = small(), small()
    for _ in range(calls):
        torch.testing.assert_close(step(*got), MLP.step(*expected), rtol=1e-9, atol=1e-10)
    for one, other in zip(expected[0].parameters(), got[0].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
    return step  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("module, name", [("torch", "compile"), ("torch._inductor.compile_fx", "compile_fx")])
def test_inductor_computes_the_same(module: str, name: str) -> None:
    trains_as_plain(getattr(import_module(module), name))  # imported here, since that takes its time


@pytest.mark.usefixtures("alone")
def test_without_passes_a_backend_takes_all_there_is() -> None:
    counting = Counting()
    trains_as_plain(counting, passes=())
    assert counting.calls == 3 * len(counting.modules) > 0  # at first twice, to see whether memory comes twice


class Careless(Counting):
    """Gives results that lie otherwise than planned: one in memory of an operand, equal ones in the same memory."""

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Tensor]) -> Backend:
        run = super().__call__(gm, example_inputs)

        def careless(*operands: Tensor) -> list[Tensor]:
            results = list(run(*operands))
            for k, result in enumerate(results):
                if result.ndim == 2:
                    results[k] = result.t().contiguous().t()
                same = [x for x in operands if x.shape == result.shape and torch.equal(x, result)]
                results[k] = same[0] if same else results[k]
            return results

        return careless


@pytest.mark.usefixtures("alone")
def test_results_are_laid_out_as_planned() -> None:
    layout = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
        return MLP.step(model, optimizer, x, y), x * 1.0 + 0.0, model[0](x).exp().sin()

    compiled = spmd.compile(backend=Careless())(step)
    objects = small()
    for _ in range(2):
        _, copy, computed = compiled(*objects)
        layout.append((computed.is_contiguous(), copy.data_ptr() == objects[2].data_ptr()))
        torch.testing.assert_close(copy, objects[2], rtol=0, atol=0)
    assert layout == [(True, False)] * 2


class Static(Counting):
    """Gives results in the same memory at each call, as a captured graph does."""

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Tensor]) -> Backend:
        run, kept = super().__call__(gm, example_inputs), list[Tensor]()

        def static(*operands: Tensor) -> list[Tensor]:
            results = run(*operands)
            kept.extend(map(torch.empty_like, results[len(kept) :]))
            return [memory.copy_(result) for memory, result in zip(kept, results, strict=True)]

        return static


@pytest.mark.usefixtures("alone")
def test_results_of_earlier_calls_stay() -> None:
    step = spmd.compile(backend=Static())(MLP.step)
    plain, got = small(), small()
    expected, losses = [MLP.step(*plain) for _ in range(3)], [step(*got) for _ in range(3)]
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-10)


def fails(*operands: Tensor) -> Any:
    raise ArithmeticError("not today")


def raises(gm: fx.GraphModule, example_inputs: list[Tensor]) -> Any:
    raise ArithmeticError("not today")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "backend, kind, why",
    [
        (raises, ArithmeticError, "not today"),
        (lambda gm, examples: fails, ArithmeticError, "not today"),
        (lambda gm, examples: None, passes.PassError, "expected the backend to return a callable, got None"),
        (
            lambda gm, examples: lambda *_: [torch.ones(3)],
            passes.PassError,
            r"expected a tuple of torch.float64\[\] on cpu",
        ),
        (
            lambda gm, examples: lambda *x: [y.add_(1) for y in x] and gm(*x),
            passes.PassError,
            "to leave the operands of",
        ),
    ],
)
def test_an_error_of_a_backend_names_the_region_and_leaves_state(backend: Backend, kind: Any, why: str) -> None:
    objects = small()
    before = [p.detach().clone() for p in objects[0].parameters()]
    with pytest.raises(kind, match=why) as caught:
        spmd.compile(backend=backend)(MLP.step)(*objects)
    message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert kind is passes.PassError or ("forward_0, " in message and "cases.py" in message), message
    if "operands" not in why:
        assert all(torch.equal(p, q) for p, q in zip(objects[0].parameters(), before, strict=True))


def test_what_is_no_backend_is_refused_where_it_is_given() -> None:
    with pytest.raises(TypeError, match=r"callable\(gm\), got .* which takes \(a, b, c\)"):
        spmd.compile(backend=lambda a, b, c: None)


@pytest.mark.usefixtures("alone")
def test_regions_are_measured_and_recorded(tmp_path: Path) -> None:
    step, objects = spmd.compile(backend=Counting())(MLP.step), small()
    step(*objects)
    step.profile(steps=2)
    step.record(tmp_path, last=2)
    for _ in range(2):
        step(*objects)
    measured = step.report().measured
    assert measured is not None and {"forward_0_out"} <= measured.nodes.keys()
    assert list(tmp_path.rglob("*"))


def test_equal_regions_are_compiled_once() -> None:
    """Layers that are gathered one by one: of six, the four in the middle are the same."""
    counting, model = Counting(), nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())])
    for layer in model[::2]:
        spmd.fully_shard(layer)
    objects = model, torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile_on_fake_ranks(2, MLP.step, objects, torch.ones(4, 8), torch.ones(4, 8), backend=counting)
    found = regions(step.program.graph)
    assert len(counting.modules) < len(found) - 6, (len(counting.modules), len(found))
    assert {node.name.partition("_")[0] for node in found} == {"forward", "backward", "update"}


@dataclass(frozen=True)
class WrongInside(passes.Pass):
    """Adds where a region multiplies, once, by an op of the same type."""

    def rewrite(self, program: passes.Program) -> int:
        for node, region in regions(program.graph).items():
            graph, changed = fx.Graph(), False
            returned: Any = graph.graph_copy(region.graph, {})
            for inside in graph.nodes:
                if inside.target is torch.ops.aten.mul.Tensor and isinstance(inside.args[1], fx.Node):
                    inside.target, changed = torch.ops.aten.add.Tensor, True
                    break
            graph.output(returned)
            if changed:
                node.target = Region(region.name, graph)
                return 1
        return 0


def test_what_is_wrong_in_a_region_is_found() -> None:
    model, optimizer, x, y = small()
    pipeline = passes.with_regions(passes.default())
    right = spmd.compile(MLP.step, backend=raises)  # simulated ranks need no backend
    assert spmd.verify(right, model, optimizer, x, y, world=2, steps=2)
    assert spmd.certify(right, model, optimizer, x, y, world=2)
    at = next(k for k, each in enumerate(pipeline) if isinstance(each, passes.FormRegions)) + 1
    wrong = spmd.compile(MLP.step, passes=[*pipeline[:at], WrongInside(), *pipeline[at:]])
    verdict = spmd.verify(wrong, model, optimizer, x, y, world=2, steps=1)
    assert not verdict and (verdict.stage, verdict.node[:3]) == ("WrongInside", "mul"), verdict
    certificate = spmd.certify(wrong, model, optimizer, x, y, world=2)
    assert not certificate and certificate.node == "mm", certificate  # which reads what is wrong
