"""``backend="inductor"``: the numbers of the plain step, islands shared by layers, and one choice on all ranks."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import passes
import spmd
from passes.ir.region import islands
from spmd.lowering import island_code, island_library
from spmd.lowering import islands as compiled_islands
from spmd.lowering.islands import CompiledIslands
from tests.harness.cases import MLP, clipped, make_optimizer
from tests.harness.oracle import Later, all_unequal, compiled_run, plain_run
from tests.harness.pool import Ranks
from tests.harness.structure import compile_on_fake_ranks
from tests.passes.programs import f64, make_program
from tests.passes.regions.test_form_islands import gated, rotated

aten = torch.ops.aten


class Block(nn.Module):
    """A norm and a gate, as in Llama, and a norm and a GELU, as in GPT, each with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.scale
        x = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


@dataclass(frozen=True)
class Blocks(MLP):
    """Such blocks, clipped; the rate changes in each step."""

    sizes: tuple[int, ...] = (8, 8)
    rows: int = 6
    optimizer: str = "SGD momentum"
    dtype: torch.dtype = torch.float64

    def build(self) -> tuple[Any, ...]:
        model = nn.Sequential(Block(8)).to(self.dtype)
        return model, make_optimizer(self.optimizer, model.parameters())

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        return tuple(each.to(self.dtype) for each in super().part(rank, step))

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        objects[1].param_groups[0]["lr"] *= 0.5

    step = staticmethod(clipped)


class Gated(Blocks):
    """Few kernels: one in forward, and one in backward."""

    def build(self) -> tuple[Any, ...]:
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).to(self.dtype)
        return model, make_optimizer(self.optimizer, model.parameters())


def takes_all(patch: pytest.MonkeyPatch) -> None:
    """Take islands that are slower, too: at these sizes, and on a loaded machine, many are."""
    patch.setattr(compiled_islands, "_LEAST_GAIN", 0.0)


def trained(rank: int, world: int, case: Any, mode: dict[str, Any], **options: Any) -> tuple[list[str], int]:
    """What differs from the plain step after each of five calls, and the number of islands called in the last."""
    with pytest.MonkeyPatch.context() as patch:
        takes_all(patch)
        step, got = compiled_run(rank, case, 5, parallel_mode=spmd.DataParallel(**mode), backend="inductor", **options)
    for program in step.programs:
        assert islands(program.graph), program.name
    bounds = () if getattr(case, "dtype", None) != torch.float32 else (2e-5, 1e-6)
    return all_unequal(plain_run(case, world, 5), got, rank, world, *bounds), len(islands(step.program.graph))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, mode",
    [
        pytest.param(Later(Blocks(optimizer="SGD")), {"parallel_style": "fully_shard"}, marks=pytest.mark.exhaustive),
        (Later(Gated(optimizer="SGD")), {"parallel_style": "fully_shard"}),
        (Blocks(optimizer="AdamW"), {"parallel_style": "replicate", "shard_optimizer": True, "micro_batches": 2}),
        pytest.param(
            Blocks(optimizer="SGD"),
            {"parallel_style": "replicate", "defer_updates": True},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            Blocks(optimizer="SGD"),
            {"parallel_style": "fully_shard", "micro_batches": 2},
            marks=pytest.mark.exhaustive,
        ),
        (Blocks(optimizer="SGD", dtype=torch.float32), {"parallel_style": "replicate"}),
    ],
)
def test_the_numbers_are_those_of_the_plain_step(ranks: Ranks, case: Any, mode: dict[str, Any]) -> None:
    """Also of a short batch, where the model evaluates, and with a parameter that is frozen (``Later``)."""
    (one, count), (other, same) = ranks.run(2, trained, case, mode)
    assert not [*one, *other] and count == same > (1 if case == Later(Gated(optimizer="SGD")) else 4)


def chosen(rank: int, world: int) -> list[str]:
    """The islands that a rank takes, of which each rank would take others: each finds every second one slower."""
    with pytest.MonkeyPatch.context() as patch:
        calls: list[int] = []

        def seconds_of(island: Any, compiles: Any) -> tuple[float, float]:
            calls.append(0)
            return (3.0, 1.0) if len(calls) % 2 == rank else (1.0, 2.0 if len(calls) % 3 else 5.0)

        patch.setattr(compiled_islands, "seconds_of", seconds_of)
        step, _ = compiled_run(rank, Blocks(), 2, backend="inductor")
    return [island.name for island in islands(step.program.graph).values()]


@pytest.mark.slow
def test_all_ranks_take_what_is_quicker_in_their_sum(ranks: Ranks) -> None:
    one, other = ranks.run(2, chosen)
    assert one == other and one


def small() -> tuple[Any, ...]:
    torch.manual_seed(0)
    case = Blocks(optimizer="SGD")
    return *case.build(), *case.part(0, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_equal_layers_share_kernels_and_the_report_has_a_row_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes_all(monkeypatch)
    model = nn.Sequential(*[Block(8) for _ in range(4)]).double()
    objects = model, torch.optim.SGD(model.parameters(), lr=0.1), *small()[2:]
    step, plain = spmd.compile(Blocks.step, backend="inductor", dump=tmp_path), copy.deepcopy(objects)
    torch.testing.assert_close(step(*objects), Blocks.step(*plain))
    torch.testing.assert_close([*model.parameters()], [*plain[0].parameters()])
    found, rows = islands(step.program.graph), step.report().islands
    assert sum(row.calls for row in rows if row.is_taken) == len(found)
    assert len(rows) <= len(found) - 6 and max(row.calls for row in rows) >= 3
    assert all(row.aten > 0 and row.kernels > 0 and row.bytes >= 0 and row.nodes > 1 for row in rows)
    (folder,) = tmp_path.glob("*/program-0")
    kernels = (folder / "kernels.cpp").read_text()
    assert kernels.count('extern "C" int island_') == len(rows) and "silu = aten.silu.default" in kernels
    assert len(json.loads((folder / "report.json").read_text())["islands"]) == len(rows)
    assert passes.Report.from_dict(step.report().to_dict()).islands == rows
    assert "bytes saved" in str(step.report())
    assert not step.diff("lowered", "lowered").changes  # the passes run once more, and take the same


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("module", "name"), [(island_library, "cpp_library"), (island_code, "inductor_code")])
def test_without_a_compiler_aten_computes_and_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    """Inductor asks for one while it writes code, unless it has found one before."""

    def no_compiler(*given: Any) -> Any:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(module, name, no_compiler)
    step, expected, got = spmd.compile(Blocks.step, backend="inductor"), small(), small()
    with pytest.warns(UserWarning, match="No working C") as caught:
        for rows in (6, 4):
            parts = [(*objects[:2], *(x[:rows] for x in objects[2:])) for objects in (got, expected)]
            torch.testing.assert_close(step(*parts[0]), Blocks.step(*parts[1]))
    assert len([each for each in caught if "compiler" in str(each.message)]) == 1
    assert not any(islands(program.graph) for program in step.programs)
    assert {row.why for row in step.report().islands} == {"RuntimeError: No working C++ compiler found"}


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_islands_of_a_pipeline_that_plans_no_memory_return_new_results(monkeypatch: pytest.MonkeyPatch) -> None:
    takes_all(monkeypatch)
    step, got, expected = spmd.compile(Blocks.step, backend="inductor", passes=()), small(), small()
    for _ in range(2):
        torch.testing.assert_close(step(*got), Blocks.step(*expected))
    assert islands(step.program.graph)
    torch.testing.assert_close([*got[0].parameters()], [*expected[0].parameters()])


def test_an_island_that_is_slower_stays_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """By less than 2% quicker counts as slower, and by less than a microsecond, which operands that move may cost."""
    found = list(islands(passes.run(gated(), [passes.FormIslands()]).graph).values())
    times = iter([(1.03, 1.0), (1.01, 1.0), (2.9e-6, 2e-6)])
    monkeypatch.setattr(compiled_islands, "seconds_of", lambda island, compiles: next(times))
    monkeypatch.setattr(compiled_islands, "difference", lambda island, made: "")
    monkeypatch.setattr(CompiledIslands, "_load", lambda self, codes: self._made.update(dict.fromkeys(codes, None)))
    made = CompiledIslands()
    assert made.choose(found, lambda text: [text, text]) == [True, False, False]
    assert made.choose(found, None) == [True, False, False]
    assert made.choose(found, lambda text: [text, json.dumps([None, *json.loads(text)[1:]])]) == [False] * 3


@pytest.mark.filterwarnings("error")
def test_an_island_without_kernels_stays_ops_whatever_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """``cache="verify"`` takes seconds of an earlier process. That Inductor leaves it to Python is no failure."""

    def none(island: passes.Island, name: str) -> Any:
        raise island_code.NoKernelError("Inductor leaves it to Python")

    found = list(islands(passes.run(gated(), [passes.FormIslands()]).graph).values())
    monkeypatch.setattr(compiled_islands, "island_code", none)
    made = CompiledIslands()
    seconds = dict.fromkeys(map(compiled_islands.key_of, found), (3.0, 1.0))
    made.adopt(compiled_islands.Kernels({}, seconds, {}, (), ""), compiles=True)
    assert made.choose(found, lambda text: [text]) == [False] * 3
    assert not made.failure


@pytest.mark.slow
def test_kernels_that_compute_something_else_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another island, in the place of one's own."""
    found = list(islands(passes.run(gated(), [passes.FormIslands()]).graph).values())
    made = CompiledIslands()
    original = compiled_islands.island_code

    def wrong(island: passes.Island, name: str) -> Any:
        code = original(island, name)
        return replace(code, text=code.text.replace("tmp0 * tmp0", "tmp0 + tmp0"))

    takes_all(monkeypatch)
    monkeypatch.setattr(compiled_islands, "island_code", wrong)
    assert made.choose(found, lambda text: [text]) == [False, True, True]
    assert "its kernels compute another mul_1 than its ops" in made.made(compiled_islands.key_of(found[0]))


@pytest.mark.slow
@pytest.mark.parametrize(("make", "is_launched"), [(gated, False), (rotated, False), (gated, True)])
def test_kernels_compute_what_ops_do_also_of_operands_that_lie_otherwise(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], passes.Program], is_launched: bool
) -> None:
    """``is_launched``: by the Python that Inductor writes, as on a GPU."""
    monkeypatch.setattr(CompiledIslands, "_is_launched", lambda self, island: is_launched)
    for island in islands(passes.run(make(), [passes.FormIslands()]).graph).values():
        writing = island.with_outs()
        compiled = CompiledIslands().compiled(writing)
        vals = [node.meta["val"] for node in writing.placeholders]
        values = [torch.rand(val.shape, dtype=val.dtype) for val in vals]
        values = [
            torch.empty_strided(val.shape, val.stride(), dtype=val.dtype).copy_(x)
            for x, val in zip(values, vals, strict=True)
        ]
        expected = [x.clone() for x in values]
        writing(*expected)
        turned = [
            x.t().contiguous().t() if x.ndim == 2 and k < len(island.placeholders) else x for k, x in enumerate(values)
        ]
        for operands in (values, turned):
            got = [x.clone() if k >= len(island.placeholders) else x for k, x in enumerate(operands)]
            compiled.bind(got, vals)()
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)
            given = [None, *got[1:]]
            run = compiled.bind(given, vals)
            for factor in (1.0, 1.0):
                run(operands[0] * factor)
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@dataclass(frozen=True)
class WrongInside(passes.Pass):
    """Subtracts where an island adds, once."""

    def rewrite(self, program: passes.Program) -> int:
        for node, island in islands(program.graph).items():
            graph = island.functional()
            added = graph.find_nodes(op="call_function", target=aten.add.Tensor)
            if added:
                added[0].target = aten.sub.Tensor
                node.target = passes.Island(island.name, graph)
                return 1
        return 0


@pytest.mark.slow
def test_verification_and_certificate_look_inside() -> None:
    model, optimizer, x, y = small()
    right = spmd.compile(Blocks.step, backend="inductor")
    assert spmd.verify(right, model, optimizer, x, y, world=2, steps=2)
    assert spmd.certify(right, model, optimizer, x, y, world=2)
    pipeline = passes.with_islands(passes.default())
    at = next(k for k, each in enumerate(pipeline) if isinstance(each, passes.FormIslands)) + 1
    wrong = spmd.compile(Blocks.step, passes=[*pipeline[:at], WrongInside(), *pipeline[at:]])
    verdict = spmd.verify(wrong, model, optimizer, x, y, world=2, steps=1)
    assert not verdict and verdict.stage == "WrongInside", verdict
    assert not spmd.certify(wrong, model, optimizer, x, y, world=2)


@pytest.mark.slow
def test_collectives_stay_where_they_are() -> None:
    """The same ones in the same order: only what computes between them differs."""
    names = []
    for backend in ("aten", "inductor"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CompiledIslands, "choose", lambda self, found, exchange: [True] * len(found))
            patch.setattr(CompiledIslands, "compiled", lambda self, island: island)
            patch.setattr(compiled_islands.Choice, "end", lambda self: None)
            nothing = compiled_islands.Kernels({}, {}, {}, (), "")
            patch.setattr(compiled_islands.Choice, "kernels", lambda self, nothing=nothing: nothing)
            mode = spmd.DataParallel("fully_shard")
            step = compile_on_fake_ranks(2, Blocks.step, small()[:2], *small()[2:], parallel_mode=mode, backend=backend)
        report = step.report()
        names.append([(one.kind, one.of) for one in report.every])
    assert names[0] == names[1]


def test_what_is_no_backend_is_refused_where_it_is_given() -> None:
    with pytest.raises(TypeError, match='expected backend to be "aten", "inductor" or a callable, got'):
        spmd.compile(backend="triton")


@pytest.mark.slow
def test_an_operand_may_be_expanded() -> None:
    """Its elements share memory, so examples are made in it."""

    def step(x: Any, one: Any) -> Any:
        wide = aten.expand.default(aten.mm.default(one, one), [4, 4])
        return (aten.mm.default(aten.mul.Tensor(aten.exp.default(wide), x), x),)

    program = make_program(step, x=f64(4, 4), one=f64(1, 1))
    (island,) = islands(passes.run(program, [passes.FormIslands()]).graph).values()
    made = CompiledIslands()
    made.choose([island], lambda text: [text])
    assert island.placeholders[0].meta["val"].stride() == (0, 0) and made.seconds


@pytest.mark.slow
def test_casts_round_as_the_step_says() -> None:
    """Inductor would leave out a cast to bf16 and back, and compute with what was not rounded."""

    def step(x: Any, y: Any) -> Any:
        rounded = aten._to_copy.default(aten.mul.Tensor(x, y), dtype=torch.bfloat16)
        return (aten.mul.Tensor(aten._to_copy.default(rounded, dtype=torch.float32), y),)

    x = torch.rand(6, 8)
    (island,) = islands(passes.run(make_program(step, x=x, y=x), [passes.FormIslands()]).graph).values()
    (got,) = CompiledIslands().compiled(island)(x, x + 1)
    assert torch.equal(got, (x * (x + 1)).bfloat16().float() * (x + 1))
