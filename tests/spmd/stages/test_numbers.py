"""Pipelines beside the plain step on one process: a GPT over stages, on gloo ranks and on simulated ones."""

from __future__ import annotations

import traceback
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn import functional as F

import spmd
from passes.runtime.message_collectives import connect
from tests.harness.oracle import Case, Snapshot, all_unequal, plain_run, snapshot
from tests.harness.pool import Ranks

from .trainings import HUGGING_FACE, TOKENS, WIDTH, Layer, Training, masked, metrics, with_sgd

STEPS = 6
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
TWO: dict[str, Any] = {"axes": {"stages": "pp"}, "micro_batches": 4}


def trained(case: Case, step: Any, batches: list[Any]) -> list[Snapshot]:
    """The results of each step, and all state behind the last."""
    torch.manual_seed(0)
    objects, seen = case.build(), []
    for k, batch in enumerate(batches):
        result = step(*objects, *batch)
        seen.append(snapshot(result, objects if k == len(batches) - 1 else ()))
        case.after(objects, k)
    return seen


def beside_plain(rank: int, world: int, case: Case, sizes: dict[str, int], mode: dict[str, Any]) -> list[str]:
    """What differs on a mesh of these sizes."""
    mesh, parts = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)), sizes.get("dp", 1)
    own = mesh["dp"].get_local_rank() if "dp" in sizes else 0
    batches = [[case.part(part, step) for part in range(parts)] for step in range(STEPS)]
    compiled = spmd.compile(case.step, parallel_mode=spmd.DataParallel(mesh=mesh, **mode))
    got = trained(case, compiled, [each[own] for each in batches])
    expected = trained(case, case.step, [case.whole(each) for each in batches])
    return all_unequal(expected, got, own, parts, case.rtol)


def in_two_groups(rank: int, world: int, *given: Any) -> list[str]:
    """The same on gloo ranks that are taken for ranks on NCCL, whose messages to earlier ranks have their own group."""
    groups = set[str]()

    def noted(ends: Any, device: torch.device) -> None:
        groups.update(group for group, *_ in ends)
        connect(ends, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spmd.ranks.world._backend", lambda *group_and_device: "nccl")
        patch.setattr("spmd.lowering.run_stages.connect", noted)
        lines = beside_plain(rank, world, *given)
    return lines if len(groups) == 2 else [*lines, f"expected two groups, got {groups}"]


def assert_agrees(ranks: Ranks, case: Case, sizes: dict[str, int], **mode: Any) -> None:
    """Fail with a line for each value that differs on any rank."""
    found = [line for lines in ranks.run(prod(sizes.values()), beside_plain, case, sizes, mode) for line in lines]
    assert not found, "\n".join(found[:20])


@pytest.mark.in_turn("schedule")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["masked", "tied", "rows", "encoder-decoder", "unet"])
def test_numbers_on_two_stages(ranks: Ranks, kind: str, schedule: str) -> None:
    assert_agrees(ranks, Training(kind), {"pp": 2}, **TWO | {"schedule": schedule})


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_numbers_as_ranks_on_nccl_send(ranks: Ranks, world: int) -> None:
    case = Training("dense, tied" if world == 2 else "deep")
    found = ranks.run(world, in_two_groups, case, {"pp": world}, TWO | {"schedule": "1f1b"})
    assert not any(found), found


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_models_of_transformers_as_they_are(ranks: Ranks, kind: str, schedule: str) -> None:
    """pytorch#184361: positions are buffers that no stage owns, and T5 reads its encoder in all blocks."""
    assert_agrees(ranks, Training(kind), {"pp": 2}, **TWO | {"schedule": schedule})


LARGE = ("deep", "T5")  # have eight modules, which four ranks with two stages each need

ON_FOUR = [(kind, schedule) for kind in LARGE for schedule in SCHEDULES]
ON_FOUR += [(k, schedule) for k in ("encoder-decoder", "unet", "Llama") for schedule in ("gpipe", "1f1b", "zb-h1")]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "schedule"), ON_FOUR)
def test_numbers_on_four_ranks(ranks: Ranks, kind: str, schedule: str) -> None:
    assert_agrees(ranks, Training(kind), {"pp": 4}, **TWO | {"schedule": schedule})


SPLIT = {"*.up.*": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}}


@pytest.mark.parametrize(
    ("case", "sizes", "mode"),
    [
        # torchtitan#2206, #4194: parts and micro-batches have unequal numbers of tokens that count.
        (Training("dense"), {"pp": 2, "dp": 2}, {"parallel_style": "fully_shard", "axes": {"batch": "dp"}}),
        pytest.param(
            Training("masked"),
            {"pp": 2, "tp": 2},
            {"axes": {"tensor": "tp"}, "params": SPLIT},
            marks=pytest.mark.exhaustive,  # in every run on simulated ranks, in test_models.py
        ),
        # pytorch#159942: batches of other lengths, and of other numbers of rows, in turn.
        (Training("dense", lengths=(6, 4)), {"pp": 2}, {"axes": {}}),
        pytest.param(
            Training("tied"),
            {"pp": 2, "dp": 2, "tp": 2},
            {"parallel_style": "fully_shard", "axes": {"batch": "dp", "shard": "dp", "tensor": "tp"}, "params": SPLIT},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["fully_shard", "tensor", "lengths", "eight"],
)
def test_numbers_on_other_meshes(ranks: Ranks, case: Training, sizes: dict[str, int], mode: dict[str, Any]) -> None:
    assert_agrees(ranks, case, sizes, **mode | {"axes": mode["axes"] | {"stages": "pp"}, "micro_batches": 4})


class Masks(nn.Module):
    """Layers with dropout; returns also what each has drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        drawn = []
        for layer in self.layers:
            drawn.append(F.dropout(torch.ones_like(x), 0.4))
            x = torch.tanh(layer(x)) * drawn[-1]
        return x, drawn


def draws(model: nn.Module, optimizer: Any, x: Tensor) -> list[Tensor]:
    y, drawn = model(x)
    y.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return drawn


def drawn_by(rank: int, world: int) -> list[list[Tensor]]:
    """What two steps draw on one rank without stages, then by each schedule."""
    mesh, found = init_device_mesh("cpu", (1, world), mesh_dim_names=("one", "pp")), []
    modes = [{"mesh": mesh["one"]}, *({"mesh": mesh["pp"], "schedule": each, **TWO} for each in SCHEDULES)]
    for mode in modes:
        model = Masks()
        spmd.seed(3, invariant=True)
        step = spmd.compile(draws, parallel_mode=spmd.DataParallel(**mode), passes=())
        optimizer = with_sgd(model)
        found.append([each for _ in range(2) for each in step(model, optimizer, torch.ones(8, 4))])
    return found


def test_draws_depend_on_the_position_alone(ranks: Ranks) -> None:
    for whole, *by_schedule in ranks.run(2, drawn_by):
        assert len({tuple(each.flatten().tolist()) for each in whole}) == 8, "each layer and step draws others"
        for drawn in by_schedule:
            assert all(torch.equal(one, other) for one, other in zip(whole, drawn, strict=True))


def in_bf16(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> dict[str, Any]:
    with torch.autocast("cpu", torch.bfloat16):
        return metrics(model, optimizer, x, y)


def bits_of(rank: int, world: int) -> list[list[Snapshot]]:
    """What trainings in bf16 compute, by autocast and by a policy: on one rank in 6 micro-batches, then on stages."""
    mesh, case = init_device_mesh("cpu", (1, world), mesh_dim_names=("one", "pp")), Training("rows")
    policy = {"mp_policy": spmd.MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    found, batches = [], [case.part(0, k) for k in range(2)]
    for function, options in ((in_bf16, {}), (metrics, policy)):
        for mode in ({"mesh": mesh["one"], "micro_batches": 6}, {"mesh": mesh["pp"], **TWO}):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Embedding(TOKENS, WIDTH), Layer(0.0), nn.Linear(WIDTH, TOKENS))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step = spmd.compile(function, parallel_mode=spmd.DataParallel(**options, **mode))
            results = [snapshot(step(model, optimizer, *each), ()) for each in batches]
            found.append([*results, snapshot(None, (model, optimizer))])
    return found


def test_bf16_has_the_bits_of_one_rank_with_the_same_micro_batches(ranks: Ranks) -> None:
    for one, pipeline, one_by_policy, pipeline_by_policy in ranks.run(2, bits_of):
        assert not all_unequal(one, pipeline, 0, 1, 0.0, 0.0)
        assert not all_unequal(one_by_policy, pipeline_by_policy, 0, 1, 0.0, 0.0)


def of_inner_layers(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Evaluates without the head, and with the tied weight on the first stage alone."""
    with torch.no_grad():
        h = model.tokens(x)
        for layer in model.layers:
            h = layer(h)
        return h.square().mean()


def in_turn(rank: int, world: int, order: str, tied: bool, style: str) -> list[float]:
    """How far training and evaluation in turn are from the plain steps."""
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("pp", "dp"))
    options = TWO | {"axes": {"stages": "pp", "batch": "dp"}, "stages": ["layers.1"]}
    case, mode = Training("dense, tied" if tied else "dense"), spmd.DataParallel(style, mesh=mesh, **options)
    torch.manual_seed(0)
    (model, optimizer), (plain, other) = case.build(), case.build()
    plain.load_state_dict(model.state_dict())
    steps = [spmd.compile(each, parallel_mode=mode) for each in (masked, of_inner_layers)]
    found = []
    for k, each in enumerate(order):
        x, y = case.part(0, k)
        if each == "t":
            found.append(float(steps[0](model, optimizer, x, y)[0]) - float(masked(plain, other, x, y)[0]))
        else:
            found.append(float(steps[1](model, x, y)) - float(of_inner_layers(plain, x, y)))
    return found


@pytest.mark.parametrize(
    ("order", "tied", "style"),
    [
        ("tet", True, "replicate"),
        pytest.param("ett", False, "replicate", marks=pytest.mark.exhaustive),
        ("ett", True, "fully_shard"),
    ],
)
def test_a_step_that_reads_less_leaves_state_where_it_is(ranks: Ranks, order: str, tied: bool, style: str) -> None:
    for found in ranks.run(2, in_turn, order, tied, style):
        assert max(map(abs, found)) < 1e-12, found


def averaged(model: nn.Module, average: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for mean, each in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(each, 0.3)
    return loss


def of_average(model: nn.Module, average: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return average(x).square().mean()


def with_average() -> tuple[Any, ...]:
    """A model, of which the last layer is frozen, and its moving average, with other values at first."""
    model, average = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double() for _ in range(2))
    model[2].requires_grad_(False)
    return model, average, torch.optim.SGD(model[0].parameters(), lr=0.1)


def averages(rank: int, world: int) -> tuple[list[str], bool]:
    """What differs from plain steps that train and evaluate in turn; whether the average lies where the model does."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("pp",))
    mode, seen = spmd.DataParallel(mesh=mesh, **TWO, stages=["2"]), []
    x = torch.arange(32.0).double().view(8, 4).sin()
    compiled = [spmd.compile(each, parallel_mode=mode) for each in (averaged, of_average)]
    for steps in ([averaged, of_average], compiled):
        torch.manual_seed(0)
        objects = with_average()
        seen.append([snapshot(step(*objects, x), objects) for step in steps * 2])
    pairs = zip(objects[0].parameters(), objects[1].parameters(), strict=True)
    return all_unequal(*seen, rank, world), all(one.placements == other.placements for one, other in pairs)


def test_an_average_lies_on_the_stages_of_what_it_averages(ranks: Ranks) -> None:
    assert ranks.run(2, averages) == [([], True)] * 2


def fails_once(rank: int, world: int, case: Case) -> list[str]:
    """A call in which stage 1 raises in a backward, between two that train: what differs, and what was not raised."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    torch.manual_seed(0)
    objects = case.build()
    compiled = spmd.compile(case.step, parallel_mode=spmd.DataParallel(mesh=mesh, **TWO, stages=["layers.1"]))
    got = [_snapshot(compiled, objects, case.part(0, 0))]
    stages = compiled._dispatch.programs.last.executable.function.executable  # type: ignore[union-attr]
    lowered = stages._programs[f"backward.{rank}"]
    sound, runs = lowered.executable, list[int]()

    def raises(inputs: Any) -> Any:
        runs.append(1)
        if rank == 1 and len(runs) == 2:
            raise RuntimeError("a fault")
        return sound(inputs)

    lowered.executable = raises
    lines = []
    try:
        compiled(*objects, *case.part(0, 1))
        lines.append(f"rank {rank} did not raise")
    except (RuntimeError, spmd.SpmdError) as error:
        shown = "".join(traceback.format_exception(error))
        lines += [] if f"in backward.{rank}, on micro-batch" in shown else [f"rank {rank}: {shown}"]
    lowered.executable = sound
    got.append(_snapshot(compiled, objects, case.part(0, 1)))
    return lines + all_unequal(plain_run(case, 1, 2), got, rank, world)


def _snapshot(step: Any, objects: tuple[Any, ...], batch: tuple[Any, ...]) -> dict[str, Any]:
    return snapshot(step(*objects, *batch), objects)


def test_a_stage_that_raises_ends_the_call_on_all(ranks: Ranks) -> None:
    found = ranks.run(2, fails_once, Training("dense"))
    assert not any(found), found
