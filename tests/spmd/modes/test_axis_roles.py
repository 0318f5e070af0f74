"""Roles of mesh axes by name: a batch's axis that is not the first, several axes of one role, split sequences."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

import spmd
from passes import AxisRole, Kind, PlacementError, RankMismatchError, Role
from passes.ir.printer import print_program
from passes.ir.saved_program import load_program, save_program
from spmd.options import check_mode
from tests.harness.cases import Block
from tests.harness.fake import fake_world
from tests.harness.oracle import all_unequal, random_generator, snapshot
from tests.harness.pool import Ranks

F64 = torch.float64
SPLIT = {"*up.weight": {"tp": Shard(0)}, "*up.bias": {"tp": Shard(0)}, "*down.weight": {"tp": Shard(1)}}
SECOND: dict[str, Any] = {"axes": {"batch": "x", "tensor": "tp"}, "params": SPLIT}
STYLES: dict[str, dict[str, Any]] = {
    "replicate": {"parallel_style": "replicate"},
    "fully_shard": {"parallel_style": "fully_shard"},
    "shard_optimizer": {"parallel_style": "replicate", "shard_optimizer": True},
}


def blocks() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(6)).double()
    model[0].down.bias.requires_grad_(False)
    return model, torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.05, momentum=0.9)


def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    predicted = model(x)
    loss = F.mse_loss(predicted, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss, predicted


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    predicted = model(x)
    return F.mse_loss(predicted, y), predicted


# A batch that is split over the second axis

ROWS = ((4, 4), (4, 4), (2, 2), (3, 1), (4, 4))  # of the two ranks along the axis, in each call
SAVED = 3  # calls before the checkpoint


def part(k: int, call: int) -> tuple[Tensor, Tensor]:
    draw = random_generator(k, call)
    x, y = (torch.randn(ROWS[call][k], 6, generator=draw, dtype=F64) for _ in range(2))
    return x, y


def whole(call: int) -> tuple[Tensor, ...]:
    return tuple(map(torch.cat, zip(part(0, call), part(1, call), strict=True)))


def run_plain(k: int) -> tuple[list[Any], Any]:
    """Snapshots of the plain step on the whole batch, with the rows of ``k`` in the results; and of an evaluation."""
    model, optimizer = blocks()
    seen = [snapshot(train(model, optimizer, *whole(call)), (model, optimizer)) for call in range(len(ROWS))]
    for each, rows in zip(seen, ROWS, strict=True):
        each["result[1]"] = each["result[1]"].split(rows)[k]
    model.eval()
    loss, predicted = evaluate(model, *whole(0))
    return seen, snapshot((loss, predicted.split(ROWS[0])[k]), (model,))


def compare_over_the_second_axis(rank: int, world: int, folder: str, styles: Sequence[str]) -> list[str]:
    """The styles beside the plain step; one saves, and goes on over the same axes in another order, and evaluates."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "x"))
    k, found = mesh.get_local_rank("x"), []
    expected, evaluated = run_plain(k)
    for style in styles:
        step = spmd.compile(train, parallel_mode=spmd.DataParallel(mesh=mesh, **SECOND, **STYLES[style]))
        model, optimizer = blocks()
        calls = range(SAVED if style == "fully_shard" else 2)
        got = [snapshot(step(model, optimizer, *part(k, call)), (model, optimizer)) for call in calls]
        found += [f"{style}, {line}" for line in all_unequal(expected[: len(got)], got, k, 2)]
        if style == "fully_shard":
            spmd.save(folder, model=model, optimizer=optimizer)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "tp"))
    mode, k = spmd.DataParallel("fully_shard", mesh=mesh, **SECOND), mesh.get_local_rank("x")
    expected, evaluated = run_plain(k)
    step, (model, optimizer) = spmd.compile(train, parallel_mode=mode), blocks()
    spmd.load(folder, model=model, optimizer=optimizer)
    calls = range(SAVED, len(ROWS))
    got = [snapshot(step(model, optimizer, *part(k, call)), (model, optimizer)) for call in calls]
    model.eval()
    result = spmd.compile(evaluate, parallel_mode=mode)(model, *part(k, 0))
    return found + all_unequal([*expected[SAVED:], evaluated], [*got, snapshot(result, (model,))], k, 2)


def test_the_second_axis_splits_the_batch(ranks: Ranks, tmp_path: Any, request: pytest.FixtureRequest) -> None:
    """In two styles; in all with --exhaustive. What each communicates is compared below."""
    styles = [*STYLES] if request.config.getoption("--exhaustive") else ["fully_shard", "shard_optimizer"]
    assert ranks.run(4, compare_over_the_second_axis, str(tmp_path / "saved"), styles) == [[]] * 4


def traffic(names: tuple[str, ...], options: Mapping[str, Any], passes: Any = None) -> tuple[Any, str]:
    """What one step of ``blocks`` communicates, and its program as text, on a fake mesh of 2 x 2."""
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        step = spmd.compile(train, parallel_mode=spmd.DataParallel(mesh=mesh, **options), passes=passes)
        step(*blocks(), *part(0, 0))
    assert step.program is not None
    return step.report().traffic, print_program(step.program)


@pytest.mark.parametrize("style", STYLES)
def test_it_communicates_as_the_first_axis_would(style: str) -> None:
    """By position the batch's axis is the first; nothing but the order of the axes and a name differs."""
    by_name, _ = traffic(("tp", "x"), {**SECOND, **STYLES[style]})
    by_position, _ = traffic(("x", "tp"), {"params": SPLIT, **STYLES[style]})
    counted = [sorted((t.kind, t.axis, t.role, t.bytes) for t in each) for each in (by_name, by_position)]
    assert counted[0] == counted[1]
    gradients = {(t.kind, t.axis) for t in by_name if t.role == Role.GRADIENT}
    scattered = set() if style == "replicate" else {(Kind.REDUCE_SCATTER, "x")}
    assert gradients == {(Kind.ALL_REDUCE, "x"), *scattered}  # a bias has no other dim than that over tp


def test_axes_of_a_hybrid_mesh_may_have_any_name() -> None:
    _, by_position = traffic(("replicate", "shard"), {"parallel_style": "fully_shard"})
    axes = {"batch": ("hosts", "gpus"), "shard": "gpus"}
    _, by_name = traffic(("hosts", "gpus"), {"parallel_style": "fully_shard", "axes": axes})
    assert by_name.replace("hosts", "replicate").replace("gpus", "shard") == by_position


# Several axes of one role, and split sequences, beside the plain step on simulated ranks


class Attention(nn.Module):
    """One head of causal attention over 6 features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.block = nn.LayerNorm(6), nn.Linear(6, 18), Block(6)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (each.unsqueeze(1) for each in self.qkv(self.norm(x)).chunk(3, -1))
        return self.block(x + F.scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1))


def attention(length: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(Attention()).double()
    x, y = (torch.randn(4, length, 6, dtype=F64) for _ in range(2))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), x, y


def rows_of_blocks() -> tuple[Any, ...]:
    return *blocks(), *whole(0)


@pytest.mark.slow
@pytest.mark.parametrize("mesh, mode, arguments", [
    ({"a": 2, "b": 2}, {"axes": {"batch": ("a", "b")}, **STYLES["fully_shard"]}, rows_of_blocks),
    ({"a": 2, "b": 2}, {"axes": {"batch": ("a", "b")}, **STYLES["shard_optimizer"]}, rows_of_blocks),
    ({"x": 2}, {"axes": {"shard": "x"}, **STYLES["fully_shard"]}, rows_of_blocks),
    ({"dp": 2, "cp": 2}, {"axes": {"batch": "dp", "sequence": "cp"}, **STYLES["fully_shard"]}, lambda: attention(5)),
    ({"cp": 2}, {"axes": {"sequence": "cp"}, **STYLES["replicate"]}, lambda: attention(6)),
], ids=["sharded over two", "optimizer over two", "no batch", "sequence and batch", "sequence"])  # fmt: skip
def test_the_numbers_are_those_of_the_plain_step(mesh: dict[str, int], mode: Any, arguments: Any) -> None:
    step = spmd.compile(train, parallel_mode=spmd.DataParallel(**mode))
    world = torch.Size(mesh.values()).numel()
    assert spmd.verify(step, *arguments(), mesh=mesh, world=world, steps=2)


def compiled(names: tuple[str, ...], arguments: Any, **mode: Any) -> Any:
    """A step after one call on a fake mesh of 2, or 2 x 2; and its arguments."""
    shape = (2,) * len(names)
    with fake_world(torch.Size(shape).numel()):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        step = spmd.compile(train, parallel_mode=spmd.DataParallel(mesh=mesh, **mode))
        step(*arguments)
    return step


@pytest.mark.slow
def test_each_rank_computes_with_its_part_of_the_sequence() -> None:
    """As with placements in ``inputs``, where ranks pass their parts and get those of rows."""
    model, optimizer, x, y = attention(10)
    cut = compiled(("cp",), (model, optimizer, x, y), axes={"sequence": "cp"})
    model, optimizer, _, _ = attention(10)
    parts = {"x": Shard(1), "y": Shard(1)}
    named = compiled(("cp",), (model, optimizer, x[:, :5], y[:, :5]), inputs=parts)
    moved = [sorted((t.kind, t.bytes) for t in each.report().traffic if t.role != Role.RESULT) for each in (cut, named)]
    assert moved[0] == moved[1]
    assert {i.name: i.placement for i in cut.program.inputs if i.name in parts} == dict.fromkeys("xy", (Replicate(),))
    result = next(output for output in cut.program.outputs if output.name == "result.1")
    assert result.placement == (Replicate(),)
    shapes = [node.meta["val"].shape for node in cut.program.graph.nodes if "mm" in str(node.target)]
    assert shapes
    assert all(40 not in shape for shape in shapes)  # rows times positions of the whole


def test_parameters_are_split_over_the_axes_of_batch_and_sequence() -> None:
    model, optimizer, x, y = attention(6)
    compiled(("dp", "cp"), (model, optimizer, x, y), axes={"batch": "dp", "sequence": "cp"}, **STYLES["fully_shard"])
    assert all(isinstance(p, DTensor) and p.placements == (Shard(0), Shard(0)) for p in model.parameters())


def test_a_program_knows_the_roles() -> None:
    step = compiled(("tp", "x"), (*blocks(), *part(0, 0)), **SECOND)
    assert [axis.roles for axis in step.program.mesh.axes] == [(AxisRole.TENSOR,), (AxisRole.BATCH, AxisRole.SHARD)]
    read = load_program(json.loads(json.dumps(save_program(step.program))))
    assert [axis.roles for axis in read.mesh.axes] == [axis.roles for axis in step.program.mesh.axes]


# What cannot be


def pass_other_rows(rank: int, world: int) -> str:
    mode = spmd.DataParallel(mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "x")), **SECOND)
    with pytest.raises(RankMismatchError) as raised:
        spmd.compile(train, parallel_mode=mode)(*blocks(), *part(rank, 0))
    return str(raised.value)


def test_ranks_along_another_axis_must_pass_equal_tensors(ranks: Ranks) -> None:
    """A sampler over all ranks is the usual mistake."""
    for message in ranks.run(2, pass_other_rows):
        assert "rank 0 passed x [" in message
        assert "ranks along tp must pass equal tensors, each whole" in message
        assert "count the ranks along x alone" in message


@pytest.mark.parametrize("axes, error, message", [
    ("dp", TypeError, "expected axes to map roles to names of mesh axes"),
    ({"batch": 0}, TypeError, r'expected axes\["batch"\] to be the name of a mesh axis, or several, got 0'),
    ({"data": "dp"}, ValueError, 'the roles "batch", "shard", "tensor", "sequence", "experts", "stages", got \'data\''),
    ({"batch": "dp", "stages": "tp"}, ValueError, 'expected micro_batches of 2 or more'),
    ({"batch": "pp"}, ValueError, r"axes names 'pp', but the axes of the mesh are \['dp', 'tp'\]"),
    ({"batch": ("dp", "dp")}, ValueError, r"axes\[\"batch\"\] names the axis 'dp' twice"),
    ({"tensor": "tp"}, ValueError, 'the role "shard", over which "fully_shard" splits'),
], ids=["no mapping", "no name", "role", "stages", "axis", "twice", "nothing to split over"])  # fmt: skip
def test_axes_that_cannot_be(axes: Any, error: type[Exception], message: str) -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(error, match=message):
            spmd.DataParallel("fully_shard", mesh=mesh, axes=axes)


@pytest.mark.parametrize("options, message", [
    ({"axes": {"batch": "x"}}, r"axes names 'x', but the axes of the mesh are \['dp'\]"),
    ({"axes": {"batch": "dp", "shard": ()}, "annotate": True}, 'no axis of dp=2 has the role "shard"'),
], ids=["an axis that the world has not", "annotated"])  # fmt: skip
def test_axes_that_do_not_fit_a_call(options: dict[str, Any], message: str) -> None:
    model, optimizer = blocks()
    if options.pop("annotate", False):
        spmd.fully_shard(model)
    with fake_world(2), pytest.raises(PlacementError, match=message):
        spmd.compile(train, parallel_mode=spmd.DataParallel(**options))(model, optimizer, *part(0, 0))


@pytest.mark.parametrize("axes, fits", [
    ({"batch": "x", "tensor": "tp"}, True),
    ({"batch": "tp", "tensor": "x"}, False),
    (None, False),  # by position tp splits the batch
], ids=["equal", "other", "by position"])  # fmt: skip
def test_annotations_over_the_second_axis(axes: Any, fits: bool) -> None:
    model, optimizer = blocks()
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "x"))
        spmd.fully_shard(model, mesh["x"])
        step = spmd.compile(train, parallel_mode=spmd.DataParallel(mesh=mesh, axes=axes))
        if not fits:
            with pytest.raises(PlacementError, match='annotations are over x, so that x has the role "batch", but'):
                step(model, optimizer, *part(0, 0))
            return
        step(model, optimizer, *part(0, 0))
    weight = model[0].up.weight
    assert isinstance(weight, DTensor)
    assert weight.placements == (Replicate(), Shard(0))


def test_a_mode_over_the_second_axis_of_the_mesh_of_its_parameters() -> None:
    """The mesh of all axes is larger than that of the mode; its axis keeps its role there."""
    model, _ = blocks()
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "x"))
        split = distribute_tensor(model[0].up.weight.detach(), mesh["tp"], [Shard(0)])
        model[0].up.weight = nn.Parameter(split)
        optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
        step = spmd.compile(train, parallel_mode=spmd.DataParallel("replicate", mesh=mesh["x"]))
        step(model, optimizer, *part(0, 0))
    assert step.program is not None
    placed = {declared.name: declared.placement for declared in step.program.inputs}
    assert placed["x"] == (Replicate(), Shard(0))
    assert placed["model.0.up.weight"] == (Shard(0), Replicate())
    gradients = [t for t in step.report().traffic if t.role == Role.GRADIENT]
    assert {t.axis for t in gradients if t.kind == Kind.ALL_REDUCE} == {"x"}


# Modes by name


@pytest.mark.parametrize("name, mode", [
    ("ddp", STYLES["replicate"]),
    ("replicate", STYLES["replicate"]),
    ("fsdp", STYLES["fully_shard"]),
    ("fully_shard", STYLES["fully_shard"]),
    ("zero1", STYLES["shard_optimizer"]),
    ("default", {"parallel_style": "default"}),
])  # fmt: skip
def test_modes_have_names(name: Any, mode: dict[str, Any]) -> None:
    """The same ones for ``compile`` and for ``DataParallel``."""
    assert repr(check_mode(name)) == repr(spmd.DataParallel(name)) == repr(spmd.DataParallel(**mode))


def test_a_name_that_no_mode_has() -> None:
    names = '"replicate", "fully_shard", "default", "ddp", "fsdp", "zero1"'
    with pytest.raises(ValueError, match=f"expected parallel_mode to be one of {names}, or a spmd.Para.*'zero3'$"):
        spmd.compile(train, parallel_mode="zero3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"expected parallel_style to be one of {names}, got 'zero3'$"):
        spmd.DataParallel("zero3")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"expected shard_optimizer=True with parallel_style=\"replicate\", got \"fsdp\""
    ):
        spmd.DataParallel("fsdp", shard_optimizer=True)
