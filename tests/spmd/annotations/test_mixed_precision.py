"""Mixed precision: casts are nodes of the graph, collectives have the dtype asked for, and state keeps its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from passes import Role
from tests.harness.cases import make_optimizer
from tests.harness.fake import fake_world
from tests.harness.oracle import Case, all_unequal, compiled_run, plain_run, random_generator
from tests.harness.pool import Ranks
from tests.spmd.modes.test_reshard import Model, step

BF16, HALF, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def dtypes(report: Any, role: Role) -> set[tuple[str, str]]:
    """The kinds of the collectives for this role, with their dtypes."""
    return {(t.kind, t.dtype) for t in report.traffic if t.role == role}


@pytest.mark.slow
@pytest.mark.parametrize("reduce_dtype, wire", [(FP32, "float32"), (None, "bfloat16"), (HALF, "float16")])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.in_turn("reshard")
def test_collectives_have_the_dtypes_of_the_policy(reduce_dtype: Any, wire: str, reshard: bool) -> None:
    with fake_world(4):
        model = Model(16, 2)
        policy = spmd.MixedPrecisionPolicy(BF16, reduce_dtype)
        for block in model.blocks:
            spmd.fully_shard(block, mp_policy=policy, reshard_after_forward=reshard)
        spmd.fully_shard(model, mp_policy=spmd.MixedPrecisionPolicy(BF16, reduce_dtype, output_dtype=FP32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        result = spmd.compile(step)
        result(model, optimizer, torch.randn(4, 16))
    report = result.report()
    assert dtypes(report, Role.PARAMETER) == {("all_gather", "bfloat16")}
    assert dtypes(report, Role.GRADIENT) == {("reduce_scatter", wire)}
    assert {p.dtype for p in model.parameters()} == {FP32}
    assert {value.dtype for values in optimizer.state.values() for value in values.values()} == {FP32}
    products = [node for node in result.programs[0].graph.nodes if "mm" in str(node.target)]
    assert products and all(node.meta["val"].dtype is BF16 for node in products)


def test_a_replicated_module_is_reduced_in_the_dtype_of_its_policy() -> None:
    with fake_world(4):
        model = spmd.replicate(Model(16, 1), mp_policy=spmd.MixedPrecisionPolicy(BF16, output_dtype=FP32))
        result = spmd.compile(step)
        result(model, torch.optim.AdamW(model.parameters()), torch.randn(4, 16))
    assert dtypes(result.report(), Role.GRADIENT) == {("all_reduce", "bfloat16")}


class Normed(nn.Module):
    """A batch norm with buffers of several dtypes between two Linears; the second is called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)
        self.register_buffer("scale", torch.full((7,), 1.5))
        self.register_buffer("offset", torch.full((7,), 0.25, dtype=HALF))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor, *, gain: Tensor) -> Tensor:
        self.calls.add_(1)
        h = self.norm(self.up(x)) * self.scale + self.offset
        return self.down(h) * gain  # type: ignore[no-any-return]


POLICY = spmd.MixedPrecisionPolicy(FP32, FP64, output_dtype=FP64, buffer_dtype=FP32)


class ByHand(Normed):
    """The casts that ``POLICY`` asks for, written out."""

    def forward(self, x: Tensor, *, gain: Tensor) -> Tensor:
        self.calls.add_(1)
        h = F.linear(x.float(), self.up.weight.float(), self.up.bias.float())
        mean, var = self.norm.running_mean.float(), self.norm.running_var.float()  # type: ignore[union-attr]
        h = F.batch_norm(h, mean, var, self.norm.weight.float(), self.norm.bias.float(), training=True)
        with torch.no_grad():
            self.norm.num_batches_tracked.add_(1)  # type: ignore[union-attr]
            self.norm.running_mean.copy_(mean)  # type: ignore[union-attr]
            self.norm.running_var.copy_(var)  # type: ignore[union-attr]
        h = h * self.scale.float() + self.offset.float()
        return (F.linear(h, self.down.weight.float(), self.down.bias.float()) * gain.float()).double()


@dataclass(frozen=True)
class Mixed(Case):
    """A model in fp64 that computes in fp32: rounding is that of fp32, masters and state are in fp64."""

    api: str = "fully_shard"
    optimizer: str = "SGD"
    rtol, atol = 2e-5, 2e-6

    def build(self) -> tuple[Any, ...]:
        """On ranks the annotated model, else the casts by hand."""
        model = (Normed if torch.distributed.is_initialized() else ByHand)()
        for module in (model.up, model.norm, model.down):
            module.double()
        if type(model) is Normed and self.api != "mode":
            annotate = getattr(spmd, self.api)
            annotate(model, mp_policy=POLICY)
        return model, make_optimizer(self.optimizer, model.parameters())

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        """``x``, ``gain`` and ``y``: (5, 6), (5, 1) and (5, 3)."""
        random = random_generator(rank, step)
        return tuple(torch.randn(5, width, generator=random, dtype=FP64) for width in (6, 1, 3))

    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor, gain: Tensor, y: Tensor) -> Tensor:
        """Forward, backward, update."""
        loss = F.mse_loss(model(x, gain=gain), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


def differences(rank: int, world: int, case: Mixed, expected: list[Any]) -> list[str]:
    mode = spmd.DataParallel("fully_shard", mp_policy=POLICY) if case.api == "mode" else None
    result, got = compiled_run(rank, case, 5, parallel_mode=mode)
    lines = all_unequal(expected, got, rank, world, case.rtol, case.atol)
    gathers = dtypes(result.report(), Role.PARAMETER)
    return lines + [f"{each}" for each in gathers if each != ("all_gather", "float32")]


@pytest.mark.parametrize("api, optimizer, world", [
    ("replicate", "SGD", 2), ("mode", "SGD", 2), ("fully_shard", "SGD momentum", 2),
    pytest.param("fully_shard", "SGD momentum", 3, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_numbers_are_those_of_casts_by_hand(ranks: Ranks, api: str, optimizer: str, world: int) -> None:
    """Also the dtype and the value of each buffer, by its name."""
    case = Mixed(api, optimizer)
    expected = plain_run(case, world, 5)
    assert ranks.run(world, differences, case, expected) == [[]] * world


@dataclass(frozen=True)
class Evaluated(Case):
    """A model in ``eval()`` mode, whose policy holds in training only: it computes in fp64, as the plain one does."""

    def build(self) -> tuple[Any, ...]:
        """The model, annotated on ranks."""
        model = Normed().eval()
        for module in (model.up, model.norm, model.down):
            module.double()
        if torch.distributed.is_initialized():
            spmd.fully_shard(model, mp_policy=replace(POLICY, full_precision_in_eval=True))
        return (model,)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        """``x`` and ``gain``: (5, 6) and (5, 1)."""
        return Mixed().part(rank, step)[:2]

    @staticmethod
    def step(model: nn.Module, x: Tensor, gain: Tensor) -> Tensor:
        """Forward."""
        loss: Tensor = model(x, gain=gain).square().mean()
        return loss


def evaluation_differences(rank: int, world: int, expected: list[Any]) -> list[str]:
    case = Evaluated()
    result, got = compiled_run(rank, case, 2)
    lines = all_unequal(expected, got, rank, world, case.rtol, case.atol)
    return lines + [f"{each}" for each in dtypes(result.report(), Role.PARAMETER) if each != ("all_gather", "float64")]


def test_in_eval_mode_a_module_computes_in_full_precision_where_asked(ranks: Ranks) -> None:
    assert ranks.run(2, evaluation_differences, plain_run(Evaluated(), 2, 2)) == [[]] * 2


def test_a_module_that_is_put_into_eval_mode_loses_its_casts() -> None:
    with fake_world(2):
        policy = spmd.MixedPrecisionPolicy(BF16, full_precision_in_eval=True)
        model = spmd.fully_shard(nn.Linear(4, 4), mp_policy=policy)
        result = spmd.compile(lambda model, x: model(x))
        found = [result(model.train(mode), torch.randn(4, 4)).dtype for mode in (True, False, True)]
    assert found == [BF16, FP32, BF16] and len(result.programs) == 2


def test_gradients_of_a_module_in_eval_mode_are_reduced_as_in_training() -> None:
    with fake_world(4):
        policy = spmd.MixedPrecisionPolicy(BF16, full_precision_in_eval=True)
        model = spmd.fully_shard(Model(16, 1), mp_policy=policy).eval()
        result = spmd.compile(step)
        result(model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(4, 16))
    assert dtypes(result.report(), Role.PARAMETER) == {("all_gather", "float32")}
    assert dtypes(result.report(), Role.GRADIENT) == {("reduce_scatter", "bfloat16")}


def test_buffers_keep_their_names_and_dtypes() -> None:
    with fake_world(2):
        model, optimizer = Mixed().build()
        spmd.compile(Mixed.step)(model, optimizer, *Mixed().part(0, 0))
        found = {name: value.dtype for name, value in model.state_dict().items() if name in dict(model.named_buffers())}
    assert found == {
        "scale": FP32, "offset": HALF, "calls": torch.int64,
        "norm.running_mean": FP64, "norm.running_var": FP64, "norm.num_batches_tracked": torch.int64,
    }  # fmt: skip
    assert model.calls.item() == 1


def test_without_casts_of_inputs_they_stay_as_they_are() -> None:
    class Look(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    for casts, dtype in ((True, BF16), (False, FP32)):  # fp32 times bf16 is fp32
        with fake_world(2):
            policy = spmd.MixedPrecisionPolicy(BF16, cast_forward_inputs=casts)
            model = spmd.fully_shard(Look(), mp_policy=policy)
            assert spmd.compile(lambda model, x: model(x))(model, torch.randn(4, 4)).dtype is dtype


class Writes(nn.Module):
    """Writes to its weight in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.5, 0.5)
        return x * self.weight


def test_a_parameter_that_has_a_cast_in_its_place_cannot_be_written() -> None:
    with fake_world(2):
        model = spmd.fully_shard(Writes(), mp_policy=spmd.MixedPrecisionPolicy(BF16))
        with pytest.raises(spmd.CaptureError, match=r"forward writes to model.weight while mixed precision"):
            spmd.compile(lambda model, x: model(x).sum())(model, torch.randn(4, 4))
        assert model.weight.eq(1).all()


def test_what_is_shared_has_one_cast() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
            self.b.weight = self.a.weight
            self.b.running_mean = self.a.running_mean

        def forward(self, x: Tensor) -> Tensor:
            assert self.a.weight is self.b.weight and self.a.running_mean is self.b.running_mean
            return self.b(self.a(x))  # type: ignore[no-any-return]

    means = []
    for policy in (None, spmd.MixedPrecisionPolicy(buffer_dtype=FP64, param_dtype=FP32)):
        torch.manual_seed(0)
        with fake_world(1):
            model = spmd.replicate(Tied(), mp_policy=policy)
            spmd.compile(lambda model, x: model(x).sum())(model, torch.randn(4, 3) + 1)
        means.append(model.a.running_mean)
    torch.testing.assert_close(*means)


def test_a_policy_of_a_module_that_is_not_called_is_in_the_notes() -> None:
    with fake_world(2):
        model = spmd.fully_shard(nn.Linear(4, 4), mp_policy=spmd.MixedPrecisionPolicy(BF16))
        step = spmd.compile(lambda model, x: model.forward(x).sum())
        step(model, torch.randn(4, 4))
        assert any("model.weight has no effect" in note for note in step.report().notes)


def test_nothing_is_left_patched() -> None:
    before = nn.Module.__call__
    with fake_world(2):
        model, optimizer = Mixed().build()
        with pytest.raises(RuntimeError, match="must match the size"):
            spmd.compile(Mixed.step)(model, optimizer, torch.ones(5, 6), torch.ones(5, 1), torch.ones(5, 4))
    assert nn.Module.__call__ is before
