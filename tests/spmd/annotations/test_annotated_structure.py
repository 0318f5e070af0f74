"""Annotated models on fake ranks: units, their order, who claims what, and how often each unit is communicated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import spmd
from passes import Kind, Role
from tests.harness.cases import Block
from tests.harness.fake import fake_world
from tests.spmd.modes.test_reshard import LAYERS, Model, counts, step


class Inner(nn.Module):
    """Two Linears, the second in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.subsubmod = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.subsubmod(self.lin(x))  # type: ignore[no-any-return]


class Tree(nn.Module):
    """``submod2`` holds ``subsubmod``."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.submod1, self.submod2 = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.submod2(self.submod1(self.lin(x)))  # type: ignore[no-any-return]


class Shared(nn.Module):
    """Two Sequentials share a Linear, and the last one has the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(), nn.Linear(4, 4)
        self.b.append(self.a[0])
        self.last.weight = self.a[0].weight  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.b(self.a(x)))  # type: ignore[no-any-return]


def compiled(
    build: Callable[[], nn.Module], annotate: Callable[[Any], Any], world: int = 4, **options: Any
) -> tuple[nn.Module, spmd.CompiledStep]:
    """The annotated model, and the step that was called with it once."""
    with fake_world(world):
        model = build()
        annotate(model)
        width = next(model.parameters()).shape[-1]
        result = spmd.compile(step, **options)
        result(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, width))
    return model, result


def per_block(model: Model, **options: Any) -> None:
    for block in model.blocks:
        spmd.fully_shard(block, **options)
    spmd.fully_shard(model, **options)


def split(model: nn.Module) -> dict[str, Any]:
    """The placements of the parameters that are split."""
    return {name: p.placements for name, p in model.named_parameters() if isinstance(p, DTensor)}


def units(result: spmd.CompiledStep) -> list[str]:
    """The units in the order of the model."""
    assert result.program is not None
    return [" ".join(name.removeprefix("model.") for name in unit) for unit in reversed(result.program.units)]


@pytest.mark.slow
@pytest.mark.parametrize("reshard, backward", [(None, LAYERS), (True, LAYERS + 1), (False, 0), (8, LAYERS + 1)])
def test_each_unit_is_gathered_and_reduced_as_it_asks(reshard: bool | int | None, backward: int) -> None:
    _, result = compiled(lambda: Model(64), lambda m: per_block(m, reshard_after_forward=reshard), world=64)
    assert result.program is not None
    assert counts(result.program) == (LAYERS + 1, backward, LAYERS + 1)


def test_units_stand_in_order_and_an_inner_one_takes_its_subtree() -> None:
    def annotate(model: Tree) -> None:
        for module in (model.submod2, model, model.submod2.subsubmod, model.submod1):  # the order does not matter
            spmd.fully_shard(module)

    model, result = compiled(Tree, annotate)
    assert units(result) == [
        "lin.weight lin.bias",
        "submod1.0.weight submod1.0.bias",
        "submod2.lin.weight submod2.lin.bias",
        "submod2.subsubmod.0.weight submod2.subsubmod.0.bias",
    ]
    assert {*split(model).values()} == {(Shard(0),)} and len(split(model)) == 8
    assert counts(result.program) == (4, 3, 4)  # type: ignore[arg-type]


def test_several_modules_are_one_unit() -> None:
    _, result = compiled(Tree, lambda m: spmd.fully_shard([m.lin, m.submod1, m.submod2]))
    assert len(units(result)) == 1 and counts(result.program)[0] == 1  # type: ignore[arg-type]


def test_a_step_that_takes_a_part_of_a_unit() -> None:
    with fake_world(2):
        model = Tree()
        spmd.fully_shard([model.lin, model.submod1])
        result = spmd.compile(lambda module, x: module(x).sum())
        result(model.lin, torch.randn(2, 4))
    assert [*split(model)] == ["lin.weight", "lin.bias"]


def test_annotations_of_both_kinds_nest() -> None:
    def annotate(model: Tree) -> None:
        spmd.fully_shard(model)
        spmd.replicate(model.submod2)
        spmd.fully_shard(model.submod2.subsubmod)

    model, result = compiled(Tree, annotate)
    assert [*split(model)] == [f"{name}.{kind}" for name in ("lin", "submod1.0", "submod2.subsubmod.0")
                               for kind in ("weight", "bias")]  # fmt: skip
    reduced = {(t.kind, t.count) for t in result.report().traffic if t.role == Role.GRADIENT}
    assert reduced == {(Kind.REDUCE_SCATTER, 2), (Kind.ALL_REDUCE, 1)}


def test_parts_without_an_annotation_follow_the_mode() -> None:
    def annotate(model: Tree) -> None:
        spmd.fully_shard(model.submod1)

    model, _ = compiled(Tree, annotate)
    assert [*split(model)] == ["submod1.0.weight", "submod1.0.bias"]

    def other(model: Tree) -> None:
        spmd.replicate(model.submod1)

    model, _ = compiled(Tree, other, parallel_mode=spmd.DataParallel("fully_shard"))
    assert len(split(model)) == 6 and not any(name.startswith("submod1") for name in split(model))


@pytest.mark.parametrize("first, second", [("a", "b"), ("b", "a")])
def test_what_is_shared_belongs_to_the_annotation_that_came_first(first: str, second: str) -> None:
    def annotate(model: Shared) -> None:
        spmd.fully_shard(getattr(model, first))
        spmd.fully_shard(getattr(model, second))
        spmd.fully_shard(model.last)

    _, result = compiled(Shared, annotate)
    assert units(result) == ["a.0.weight a.0.bias", "last.bias"]


def test_a_module_that_is_annotated_later_gets_another_program() -> None:
    with fake_world(4):
        model = Tree()
        optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 4)
        result = spmd.compile(step)
        result(model, optimizer, x)
        spmd.fully_shard(nn.Linear(2, 2))  # another model's
        result(model, optimizer, x)
        assert len(result.programs) == 1 and not split(model)
        spmd.fully_shard(model.submod1)
        result(model, optimizer, x)
        assert [*split(model)] == ["submod1.0.weight", "submod1.0.bias"]
        spmd.fully_shard(model)
        result(model, optimizer, x)
        result(model, optimizer, x)
        assert len(result.programs) == 3 and len(split(model)) == 8


def test_a_mesh_of_two_axes_shards_over_the_second() -> None:
    mesh2d = None

    def annotate(model: nn.Module) -> None:
        nonlocal mesh2d
        mesh2d = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        spmd.fully_shard(model, mesh2d)

    model, result = compiled(Tree, annotate)
    assert {*split(model).values()} == {(Replicate(), Shard(0))}
    found = {(t.kind, t.axis) for t in result.report().traffic if t.role == Role.GRADIENT}
    assert found == {(Kind.ALL_REDUCE, "outer"), (Kind.REDUCE_SCATTER, "inner")}
    assert {i.shape for i in result.program.inputs if i.role is Role.BATCH} == {(16, 4)}  # type: ignore[union-attr]


@pytest.mark.parametrize("mesh", [
    lambda: init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard")),
    lambda: dist.group.WORLD,
    lambda: init_device_mesh("cpu", (4,)),
], ids=["N x 1", "process group", "one axis"])  # fmt: skip
def test_replicate_over_meshes(mesh: Callable[[], Any]) -> None:
    model, result = compiled(Tree, lambda m: spmd.replicate(m, mesh(), device_id=torch.device("cpu")))
    assert not split(model) and result.report().count("all_reduce") == 2  # gradients in one, and the loss
    assert {i.shape for i in result.program.inputs if i.role is Role.BATCH} == {(16, 4)}  # type: ignore[union-attr]


def test_a_process_group_is_taken_where_a_mesh_is() -> None:
    with fake_world(4):
        for mode in (
            spmd.DataParallel("fully_shard", mesh=dist.group.WORLD),
            spmd.DTensorExpand(mesh=dist.group.WORLD),
        ):
            assert mode.mesh is not None and (mode.mesh.size(), mode.mesh.mesh_dim_names) == (4, ("dp",))
        model = Tree()
        spmd.fully_shard(model, dist.group.WORLD)
        spmd.compile(step)(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 4))
        assert len(split(model)) == 8


def test_parameters_are_split_on_the_dim_that_is_asked_for() -> None:
    def last(parameter: nn.Parameter) -> Shard | None:
        return Shard(-1) if parameter.ndim > 1 else None

    model, _ = compiled(lambda: Block(6), lambda m: spmd.fully_shard(m, shard_placement_fn=last))
    assert split(model) == {
        "up.weight": (Shard(1),), "up.bias": (Shard(0),), "down.weight": (Shard(1),), "down.bias": (Shard(0),),
    }  # fmt: skip


@pytest.mark.parametrize("how", ["annotation", "parameters", "modules"])
def test_ignored_parameters_stay_as_they_are(how: str) -> None:
    def annotate(model: Tree) -> None:
        model.submod2.requires_grad_(False)
        if how == "annotation":
            spmd.fully_shard(model, ignored_params=model.submod2.parameters())

    with fake_world(4):
        model = Tree()
        annotate(model)
        mode = None
        if how == "parameters":
            mode = spmd.DataParallel("fully_shard", ignored_params=model.submod2.parameters())
        if how == "modules":
            spmd.fully_shard(model.submod2.subsubmod)  # it is taken out of what is ignored
            mode = spmd.DataParallel("fully_shard", ignored_modules=[model.submod2])
        before = list(model.submod2.lin.parameters())
        result = spmd.compile(step, parallel_mode=mode)
        optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
        result(model, optimizer, torch.randn(4, 4))
        assert all(now is then for now, then in zip(model.submod2.lin.parameters(), before, strict=True))
    inner = {"submod2.subsubmod.0.weight", "submod2.subsubmod.0.bias"} if how == "modules" else set()
    assert {*split(model)} == {"lin.weight", "lin.bias", "submod1.0.weight", "submod1.0.bias"} | inner
    assert not any("submod2.lin" in unit for unit in units(result))
