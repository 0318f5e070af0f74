"""Wrong arguments raise an error that says what was expected, where they are passed."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import spmd
from tests.harness.cases import MLP
from tests.harness.fake import fake_world

CASE = MLP(sizes=(15, 7), rows=6)


def test_an_unknown_style_names_the_three() -> None:
    with pytest.raises(ValueError, match="zero3") as caught:
        spmd.DataParallel("zero3")  # type: ignore[arg-type]
    assert all(style in str(caught.value) for style in ("replicate", "fully_shard", "default"))


def test_a_mesh_larger_than_the_world_says_both_sizes() -> None:
    with fake_world(3):
        mesh = DeviceMesh("cpu", torch.arange(8), _init_backend=False)
        with pytest.raises((ValueError, spmd.SpmdError), match=r"8.*\b3\b|\b3\b.*8"):
            spmd.compile(parallel_mode=spmd.DataParallel(mesh=mesh))(CASE.step)(*CASE.build(), *CASE.part(0, 0))


@pytest.mark.usefixtures("alone")
def test_a_mesh_larger_than_a_world_of_one_says_both_sizes() -> None:
    spmd.world("cpu")  # torch makes no mesh without a process group
    mesh = DeviceMesh("cpu", torch.arange(8), _init_backend=False)
    with pytest.raises((ValueError, spmd.SpmdError), match=r"8.*\b1\b|\b1\b.*8"):
        spmd.compile(parallel_mode=spmd.DataParallel(mesh=mesh))(CASE.step)(*CASE.build(), *CASE.part(0, 0))


@pytest.mark.usefixtures("alone")
def test_tensors_that_disagree_in_batch_size_are_named_with_their_sizes() -> None:
    model, _ = CASE.build()

    def step(model: nn.Module, batch: dict[str, Tensor], weights: Tensor) -> Tensor:
        return (model(batch["x"]) * weights).sum()

    with pytest.raises(spmd.PlacementError) as caught:
        spmd.compile(step)(model, {"x": torch.ones(6, 15).double()}, torch.ones(4).double())
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert all(word in text for word in ("batch.x", "weights", "6", "4", "inputs"))


@pytest.mark.usefixtures("alone")
def test_a_dict_with_tensors_of_many_sizes_is_what_ranks_share() -> None:
    model = nn.Sequential(nn.Linear(15, 7), nn.Linear(7, 4)).double()
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}

    def step(model: nn.Module, averages: dict[str, Tensor], x: Tensor) -> Tensor:
        return model(x).sum() + sum(average.sum() for average in averages.values())

    with pytest.raises(spmd.PlacementError, match=r"inputs=\{'x': Shard\(0\), 'averages': Replicate\(\)\}"):
        spmd.compile(step)(model, averages, torch.ones(6, 15).double())


@pytest.mark.usefixtures("alone")
def test_inputs_that_name_no_argument_are_refused() -> None:
    with pytest.raises((ValueError, spmd.PlacementError), match="z"):
        mode = spmd.DataParallel(inputs={"z": Replicate()})
        spmd.compile(parallel_mode=mode)(CASE.step)(*CASE.build(), *CASE.part(0, 0))


@pytest.mark.usefixtures("alone")
def test_params_that_match_no_parameter_are_refused() -> None:
    with pytest.raises((ValueError, spmd.PlacementError), match="nothing_like_it"):
        mode = spmd.DTensorExpand(params={"nothing_like_it.*": Shard(0)})
        spmd.compile(parallel_mode=mode)(CASE.step)(*CASE.build(), *CASE.part(0, 0))


WRONG: list[dict[str, Any]] = [
    {"module_override": 3},
    {"module_override": [nn.Linear(2, 2)]},
    {"gm_transformation": "inline"},
    {"parallel_mode": {"style": "fully_shard"}},
    {"passes": "default"},
    {"passes": [nn.Linear]},
    {"backend": 3},
    {"dump": 3},
]


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_an_option_of_the_wrong_type_is_a_type_error_that_names_it(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(options))):
        spmd.compile(**options)(CASE.step)


CLOSE: dict[str, Any] = {
    'did you mean "fully_shard"?': lambda: spmd.DataParallel("fully_shrad"),  # type: ignore[arg-type]
    'did you mean "fsdp"?': lambda: spmd.compile(parallel_mode="FSDP2"),  # type: ignore[call-overload]
    'did you mean "once"?': lambda: spmd.DataParallel(reduce_gradients="Once"),  # type: ignore[arg-type]
    'did you mean "inductor"?': lambda: spmd.compile(backend="inducter"),  # type: ignore[call-overload]
    'did you mean "batch"?': lambda: spmd.DataParallel(axes={"bach": "dp"}),
    'did you mean "interleaved"?': lambda: spmd.DataParallel(
        axes={"stages": "pp"}, micro_batches=2, schedule="interleave"
    ),
    "spmd.DataParallel has no option 'shard_optimiser': did you mean \"shard_optimizer\"?": lambda: spmd.DataParallel(
        shard_optimiser=True  # type: ignore[call-arg]
    ),
    "spmd.compile has no option 'dynamics': did you mean \"dynamic\"?": lambda: spmd.compile(dynamics={}),
    "spmd.compile has no option 'micro_batches', but spmd.DataParallel has: pass parallel_mode=spmd.DataParallel(": (
        lambda: spmd.compile(micro_batches=2)
    ),
    "spmd.Auto has no option 'style'": lambda: spmd.Auto(style="fsdp"),  # type: ignore[call-arg]
    "spmd.fully_shard has no option 'reshard_after_forwards': did you mean": lambda: spmd.fully_shard(
        nn.Linear(2, 2),
        reshard_after_forwards=True,  # type: ignore[call-arg]
    ),
    "one of the units B, KB, MB, GB, KiB, MiB, GiB, got '1kB': did you mean \"KB\"": lambda: spmd.compile(memory="1kB"),
    "one of the units B, KB, MB, GB, KiB, MiB, GiB, got '1 TB'": lambda: spmd.Auto(memory="1 TB"),
}


@pytest.mark.parametrize("message", CLOSE)
def test_a_wrong_name_is_answered_with_close_ones(message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        CLOSE[message]()


def test_overrides_may_stand_beside_the_function() -> None:
    assert spmd.compile(CASE.step, module_override=[spmd.Override()])._options.overrides
    with pytest.raises(TypeError, match="expected a function to compile, or none, beside module_override="):
        spmd.compile([spmd.Override()], module_override=[spmd.Override()])  # type: ignore[call-overload]


def test_an_unknown_backend_names_those_there_are() -> None:
    with pytest.raises((TypeError, ValueError), match="aten"):
        spmd.compile(backend="inductive")(CASE.step)


def test_only_a_function_can_be_compiled() -> None:
    with pytest.raises(TypeError):
        spmd.compile()(3)
    with pytest.raises(TypeError, match=r"^spmd.compile compiles a function that trains, got a Linear: .*") as caught:
        spmd.compile(nn.Linear(3, 4))
    assert "in_features" not in str(caught.value)


@pytest.mark.usefixtures("alone")
def test_whatever_can_be_called_is_a_step() -> None:
    class Step:
        def __call__(self, x: Tensor) -> Tensor:
            return 2 * x

    for step in (Step(), partial(lambda y, x: x * y, 2), partial(lambda x, y: x * y, y=2)):
        assert spmd.compile(step, parallel_mode=spmd.DataParallel())(torch.ones(3)).tolist() == [2.0] * 3


@pytest.mark.parametrize("mode", [spmd.DataParallel, spmd.DTensorExpand])
def test_modes_check_what_they_are_given(mode: Any) -> None:
    with pytest.raises(TypeError, match="mesh"):
        mode(mesh=4)
    with pytest.raises(TypeError, match="x"):
        mode(inputs={"x": "replicate"})
    with pytest.raises(TypeError, match="custom_passes"):
        mode(custom_passes=3)


def test_an_option_that_is_no_flag_is_refused() -> None:
    with pytest.raises(TypeError, match="keep_freed_memory to be True or False, got 'yes'"):
        spmd.compile(keep_freed_memory="yes")


@pytest.mark.usefixtures("alone")
def test_a_numpy_array_is_refused_with_what_to_pass() -> None:
    with pytest.raises(spmd.CaptureError, match=r"batch\.x is a ndarray, .*: pass torch\.from_numpy\(batch\.x\)"):
        spmd.compile(lambda batch: torch.as_tensor(batch["x"]))({"x": np.ones(3)})
