"""``spmd.contract``: what modules carry, which annotations exclude each other, and that modules stay as they are."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import spmd
from tests.harness.cases import MLP
from tests.harness.fake import fake_world

CASE = MLP(sizes=(4, 8, 8, 4), rows=2)


class Holder(nn.Module):
    """A module whose children lie in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ModuleList([nn.Linear(2, 2)])
        self.named = nn.ModuleDict({"a": nn.Linear(2, 2)})

    def forward(self, x: torch.Tensor) -> Any:
        return self.named["a"](self.listed[0](x))


def test_nothing_was_applied() -> None:
    module = nn.Linear(2, 2)
    before = dict(vars(module))
    assert spmd.contract.state(module) is None and spmd.contract.applied(module) is None
    assert vars(module) == before
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        spmd.contract.state("module")  # type: ignore[arg-type]


def test_the_modules_of_one_call_share_one_record_and_stay_as_they_are() -> None:
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    before = [dict(vars(module)) for module in modules]
    assert spmd.fully_shard(modules) is modules
    first, second = map(spmd.contract.state, modules)
    assert first is second is not None and list(first.modules) == modules
    assert [spmd.contract.applied(module) for module in modules] == ["fully_shard"] * 2
    assert [dict(vars(module)) for module in modules] == before
    other = nn.Linear(2, 2)
    assert spmd.replicate(other) is other and spmd.contract.applied(other) == "replicate"


def test_an_annotation_keeps_no_module_alive() -> None:
    module = spmd.fully_shard(nn.Linear(2, 2), ignored_params=[])
    gone, record = weakref.ref(module), spmd.contract.state(module)
    del module
    gc.collect()
    assert gone() is None and record is not None and record.modules == ()


def wrong() -> list[tuple[str, Callable[[nn.Module], Any], type[Exception], str]]:
    """(name, what is done to a ``Holder`` whose list holds a sharded Linear, the error, what it says)."""
    shard, replicate, parameter = spmd.fully_shard, spmd.replicate, nn.Parameter(torch.ones(1))
    return [
        ("twice", lambda m: shard(m.listed[0]), spmd.contract.ContractError, "fully_shard was applied to this Linear"),
        ("other", lambda m: replicate(m.listed[0]), spmd.contract.ContractError, "replicate .* fully_shard manages"),
        ("one of a list", lambda m: shard([m, m.listed[0]][::-1]), ValueError, "a part of another module"),
        ("list", lambda m: shard([m.named["a"], m.listed[0]]), spmd.contract.ContractError, "before"),
        ("ModuleList", lambda m: shard(m.listed), ValueError, "ModuleList, which has no forward"),
        ("ModuleDict", lambda m: replicate(m.named), ValueError, "ModuleDict, which has no forward"),
        ("no module", lambda m: shard([m, 3]), TypeError, "expected a torch.nn.Module or a list"),
        ("nothing", lambda m: shard([]), TypeError, "expected a torch.nn.Module or a list"),
        ("no mesh", lambda m: shard(m, "dp"), TypeError, "DeviceMesh, a ProcessGroup or None"),
        ("square mesh", lambda m: replicate(m, mesh2d()), ValueError, r"shape \(N, 1\).*got \(2, 2\)"),
        ("cube", lambda m: shard(m, init_device_mesh("cpu", (1, 2, 2))), ValueError, "one or two axes"),
        ("device", lambda m: replicate(m, device_id=0), ValueError, "device_id is cuda:0, but .* is on cpu"),
        ("mesh's", lambda m: replicate(m, one(), device_id=1), ValueError, "cuda:1, but the mesh is of cpu"),
        ("reshard", lambda m: shard(m, reshard_after_forward="no"), TypeError, "reshard_after_forward"),
        ("placement", lambda m: shard(m, shard_placement_fn=3), TypeError, "shard_placement_fn"),
        ("policy", lambda m: shard(m, mp_policy=torch.bfloat16), TypeError, "MixedPrecisionPolicy"),
        ("ignored", lambda m: shard(m, ignored_params=["weight"]), TypeError, "ignored_params to hold parameters"),
        ("ignored one", lambda m: shard(m, ignored_params=parameter), TypeError, "a collection of parameters"),
    ]


def mesh2d() -> Any:
    return init_device_mesh("cpu", (2, 2))


def named() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def one() -> Any:
    return init_device_mesh("cpu", (4,))


@pytest.mark.parametrize("apply, error, message", [pytest.param(*each[1:], id=each[0]) for each in wrong()])
def test_what_cannot_be_applied_changes_nothing(apply: Any, error: type[Exception], message: str) -> None:
    with fake_world(4):
        module = Holder()
        spmd.fully_shard(module.listed[0])
        before = [(spmd.contract.state(each), dict(vars(each))) for each in module.modules()]
        with pytest.raises(error, match=message):
            apply(module)
        assert [(spmd.contract.state(each), dict(vars(each))) for each in module.modules()] == before


@pytest.mark.parametrize("given, error", [
    ({"param_dtype": torch.int32}, ValueError), ({"reduce_dtype": "bf16"}, ValueError),
    ({"cast_forward_inputs": 1}, TypeError),
])  # fmt: skip
def test_a_policy_takes_floating_point_dtypes(given: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(given))):
        spmd.MixedPrecisionPolicy(**given)


def test_gradients_in_another_dtype_are_refused_as_torch_refuses_them() -> None:
    parameter = nn.Parameter(torch.ones(2))
    with pytest.raises(RuntimeError, match="attempting to assign a gradient with dtype"):
        parameter.grad = torch.ones(2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="reduce_dtype reduces them in low precision"):
        spmd.MixedPrecisionPolicy(torch.bfloat16, keep_low_precision_grads=True)


def insert(model: nn.Sequential) -> None:
    model[2].adapter = nn.Linear(2, 2)


def exchange(model: nn.Sequential) -> None:
    model[2].register_parameter("scale", model[2]._parameters.pop("weight"))


def reorder(model: nn.Sequential) -> None:
    model[2].weight = model[2].__dict__["_parameters"].pop("weight")


@pytest.mark.parametrize("change, message", [
    (insert, r"fully_shard on model.2.*it had 2 parameters, and has 4"),
    (exchange, "weight stood where bias is now"), (reorder, "weight stood where bias is now"),
])  # fmt: skip
def test_a_module_that_changed_since_is_refused(change: Any, message: str) -> None:
    with fake_world(2):
        model, optimizer = CASE.build()
        spmd.fully_shard(model[2])
        change(model)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(spmd.contract.ContractError, match=message):
            spmd.compile(CASE.step)(model, optimizer, *CASE.part(0, 0))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert not optimizer.state


def refused() -> list[tuple[str, Callable[[nn.Sequential], Any], Any, str]]:
    """(name, how the model is annotated, the mode, what the error says)."""
    shard, expand = spmd.fully_shard, spmd.DTensorExpand
    return [
        ("mode", lambda m: shard(m), expand, "fully_shard on model is an annotation, which .* does not follow"),
        ("two meshes", lambda m: (shard(m[0], one()), shard(m[2], mesh2d())), None, "annotations .* have one mesh"),
        ("axis", lambda m: shard(m, named()["tp"]), lambda: spmd.DataParallel(mesh=named()), "annotations are over tp"),
        ("dim", lambda m: shard(m, shard_placement_fn=lambda p: Shard(1)), None, r"gave .* for 0.bias, which has 1 "),
        ("kind", lambda m: shard(m, shard_placement_fn=lambda p: Replicate()), None, r"gave Replicate\(\) for"),
        ("trained", lambda m: shard(m, ignored_params=[m[2].bias]), None, "model.2.bias is among the ignored"),
    ]


@pytest.mark.parametrize("annotate, mode, message", [pytest.param(*each[1:], id=each[0]) for each in refused()])
def test_a_step_that_cannot_follow_annotations_changes_nothing(annotate: Any, mode: Any, message: str) -> None:
    with fake_world(4):
        model, optimizer = CASE.build()
        annotate(model)
        step = spmd.compile(CASE.step, parallel_mode=mode() if mode else None)
        before = list(model.parameters())
        with pytest.raises(spmd.PlacementError, match=message):
            step(model, optimizer, *CASE.part(0, 0))
        assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
        assert not optimizer.state and not step.programs


@pytest.mark.parametrize("annotate, message", [
    (lambda m: spmd.replicate(m), "replicates it, but an earlier step has split model.0.weight over dp"),
    (lambda m: spmd.fully_shard(m, shard_placement_fn=lambda p: Shard(p.ndim - 1)), r"splits it as S\(1\), but"),
], ids=["replicate", "another dim"])  # fmt: skip
def test_what_is_split_cannot_be_placed_otherwise(annotate: Any, message: str) -> None:
    with fake_world(2):
        model, optimizer = CASE.build()
        step = spmd.compile(CASE.step, parallel_mode=spmd.DataParallel("fully_shard"))
        step(model, optimizer, *CASE.part(0, 0))
        annotate(model)
        with pytest.raises(spmd.PlacementError, match=message):
            spmd.compile(CASE.step)(model, optimizer, *CASE.part(0, 0))
