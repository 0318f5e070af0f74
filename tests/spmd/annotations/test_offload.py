"""Offloading: state lives in host memory; copies between host and device are nodes of the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import passes
import spmd
from passes import Input, Memory, Pass, Phase, Program, Role
from passes.memory.peak_memory import planned_memory
from passes.runtime.host_memory import to_device, to_host, wait_copy
from spmd._torch import dtensor_over, local_tensor
from tests.harness.cases import MLP, make_optimizer
from tests.harness.fake import fake_world
from tests.harness.on_cuda import OnCuda
from tests.harness.oracle import all_unequal, assert_agrees, compiled_run, plain_run
from tests.harness.pool import Ranks
from tests.harness.structure import computes
from tests.spmd.annotations.test_annotated_numbers import Annotated, Net
from tests.spmd.annotations.test_annotated_structure import compiled, counts
from tests.spmd.annotations.test_annotated_structure import per_block as blocks
from tests.spmd.modes.test_reshard import LAYERS, Model, step

POLICY = spmd.OffloadPolicy()


def per_block(model: Net) -> None:
    for module in (*model.blocks, model):
        spmd.fully_shard(module, offload_policy=POLICY)


def replicated(model: Net) -> None:
    for module in (*model.blocks, model):
        spmd.replicate(module, offload_policy=POLICY)


def siblings(model: Net) -> None:
    """The first block is offloaded, the second is not, and what is left is replicated on the host."""
    spmd.fully_shard(model.blocks[0], offload_policy=spmd.OffloadPolicy(pin_memory=False))
    spmd.fully_shard(model.blocks[1])
    spmd.replicate([model.embed, model.norm, model.head], offload_policy=POLICY)


STRATEGIES: dict[str, Callable[[Net], None]] = {
    "per block": per_block, "replicated": replicated, "siblings": siblings,
}  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "mode": {"parallel_style": "fully_shard"}, "shard optimizer": {"shard_optimizer": True},
}  # fmt: skip


def annotated(strategy: str) -> Net:
    """A model in fp64 with the annotations of a strategy, if it has any."""
    model = Net().double()
    STRATEGIES.get(strategy, lambda _: None)(model)
    return model


@dataclass(frozen=True)
class Offloaded(Annotated):
    """Also clips by the global norm, which mixes what is on the host with what is on the device."""

    def build(self) -> tuple[Any, ...]:
        """The annotated model and its optimizer."""
        model = annotated(self.strategy)
        return model, make_optimizer(self.optimizer, model.parameters())

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        """Forward, backward, clipping, update."""
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss


def differences(rank: int, world: int, case: Offloaded, passes: Any = None) -> list[str]:
    options = MODES.get(case.strategy)
    mode = spmd.DataParallel(**options, offload_policy=POLICY) if options else None
    _, got = compiled_run(rank, case, 5, parallel_mode=mode, passes=passes)
    return all_unequal(plain_run(case, world, 5), got, rank, world)


@pytest.mark.parametrize("strategy, optimizer", [
    ("per block", "Adam"), ("replicated", "SGD momentum"), ("shard optimizer", "SGD momentum"),
    pytest.param("mode", "SGD", marks=pytest.mark.exhaustive),
    pytest.param("siblings", "AdamW", marks=pytest.mark.exhaustive),
    pytest.param("per block", "SGD", marks=pytest.mark.exhaustive),
    pytest.param("siblings", "SGD", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_numbers_are_those_of_the_plain_step(ranks: Ranks, strategy: str, optimizer: str) -> None:
    assert ranks.run(2, differences, Offloaded(strategy, optimizer)) == [[], []]


@dataclass(frozen=True)
class Kept(Offloaded):
    """Gradients stay for the next call, which adds its own to them, and an average of the model follows by hand."""

    def build(self) -> tuple[Any, ...]:
        """The model, its optimizer, and the average, which is offloaded, too."""
        model, optimizer = super().build()
        return model, annotated(self.strategy).requires_grad_(False), optimizer

    @staticmethod
    def step(*args: Any, **kwargs: Any) -> Any:
        """Without ``zero_grad``; the average is read, then written."""
        model, average, optimizer, x, y = args
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            before = nn.functional.cross_entropy(average(x), y)
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.25)
        return loss.detach(), before


@pytest.mark.parametrize("strategy, passes", [
    ("mode", None),
    pytest.param("replicated", (), marks=pytest.mark.exhaustive),
    pytest.param("per block", None, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_gradients_that_are_kept_and_averages(ranks: Ranks, strategy: str, passes: Any) -> None:
    assert ranks.run(2, differences, Kept(strategy, "SGD"), passes) == [[], []]


def with_and_without(rank: int, world: int) -> list[bool]:
    """Whether the parameters are the same bits after training with casts, where units are copied at once."""
    found = []
    for policy in (None, POLICY):
        torch.manual_seed(0)
        case = MLP((8, 12, 4), 4, "SGD momentum")
        half = spmd.MixedPrecisionPolicy(torch.float32, output_dtype=torch.float64)
        mode = spmd.DataParallel("fully_shard", mp_policy=half, offload_policy=policy)
        result, seen = compiled_run(rank, case, 3, parallel_mode=mode)
        found.append(seen)
    assert len(copies(result, to_device)) == 1
    return [torch.equal(now, found[0][-1][name]) for name, now in found[1][-1].items() if isinstance(now, Tensor)]


def test_units_in_flat_storage_are_copied_at_once(ranks: Ranks) -> None:
    assert_agrees(ranks, 2, MLP((8, 12, 4), 4, "AdamW"), {"parallel_style": "fully_shard", "offload_policy": POLICY})
    (first, second) = ranks.run(2, with_and_without)
    assert first == second and all(first) and len(first) > 4


def all_inputs(result: spmd.CompiledStep) -> list[Input]:
    """The inputs, those in flat storage one by one."""
    assert result.program is not None
    return [each for i in result.program.inputs for each in ([part.input for part in i.parts] or [i])]


def copies(result: spmd.CompiledStep, op: Any) -> list[fx.Node]:
    assert result.program is not None
    return [node for node in result.program.graph.nodes if computes(node) is op]


def copies_before(gather: fx.Node) -> set[fx.Node]:
    """The copies to the device that a gather sends."""
    found, pending = set[fx.Node](), [gather]
    while pending:
        node = pending.pop()
        found |= {node} if computes(node) is to_device else set()
        pending += [] if computes(node) is to_device else node.all_input_nodes
    return found


@pytest.mark.slow
@pytest.mark.parametrize("reshard, again", [(None, LAYERS), (True, LAYERS + 1), (False, 0)])
def test_each_gather_has_its_copies_and_each_gradient_one(reshard: bool | None, again: int) -> None:
    """The collectives are those without offloading."""

    def annotate(model: Any) -> None:
        blocks(model, reshard_after_forward=reshard, offload_policy=POLICY)

    model, result = compiled(lambda: Model(64), annotate, world=64)
    assert counts(result.program) == (LAYERS + 1, again, LAYERS + 1)  # type: ignore[arg-type]
    gathers = [node for node in result.program.collectives() if node.meta["collective"].role is Role.PARAMETER]  # type: ignore[union-attr]
    assert len(gathers) == LAYERS + 1 + again
    sent = [copies_before(gather) for gather in gathers]
    for gather, each in zip(gathers, sent, strict=True):
        served = set(gather.meta["collective"].of)
        at_once = served in [set(unit) for unit in result.program.units]  # type: ignore[union-attr]
        assert len(each) == (1 if at_once else len(served))  # backward does not read biases
    assert {node for each in sent for node in each} == {*copies(result, to_device)}
    assert sum(map(len, sent)) == len(copies(result, to_device))  # each gather has its own
    parameters = len(list(model.parameters()))
    assert len(copies(result, to_host)) == len(copies(result, wait_copy)) == parameters
    assert memory_of(result) == {f"model.{name}": Memory.PINNED for name, _ in model.named_parameters()}


@pytest.mark.parametrize("world", [1, 4])
def test_what_is_not_gathered_is_copied_again_for_backward(world: int) -> None:
    """Forward copies every parameter; backward again the weights of blocks, but not the root's, nor what it leaves."""
    model, result = compiled(lambda: Model(16, 2), replicate_blocks, world=world)
    found = copies(result, to_device)
    again = [node for node in found if node.meta.get("phase") is Phase.BACKWARD]
    assert (len(found), len(again)) == (len(list(model.parameters())) + 4, 4)
    assert not any("gather" in str(node.meta["collective"].kind) for node in result.program.collectives())  # type: ignore[union-attr]


def replicate_blocks(model: Model) -> None:
    for module in (*model.blocks, model):
        spmd.replicate(module, offload_policy=POLICY)


def test_casts_are_made_on_the_device_and_gradients_cast_back_there() -> None:
    half = spmd.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    mode = spmd.DataParallel("fully_shard", offload_policy=POLICY, mp_policy=half)
    _, result = compiled(lambda: Model(16, 2), lambda model: None, parallel_mode=mode)
    assert {t.dtype for t in result.report().traffic if t.role in (Role.PARAMETER, Role.GRADIENT)} == {"bfloat16"}
    for op in (to_device, to_host):
        assert {node.meta["val"].dtype for node in copies(result, op)} == {torch.float32}
    products = [node for node in result.program.graph.nodes if "mm" in str(computes(node))]  # type: ignore[union-attr]
    assert products and all(node.meta["val"].dtype is torch.bfloat16 for node in products)


def test_a_gradient_is_copied_while_backward_goes_on() -> None:
    """All but those of the last unit: its reduction ends with backward."""
    _, result = compiled(lambda: Model(16, 3), lambda m: blocks(m, offload_policy=POLICY))
    order = list(result.program.graph.nodes)  # type: ignore[union-attr]
    reductions = [node for node in result.program.collectives() if node.meta["collective"].role is Role.GRADIENT]  # type: ignore[union-attr]
    last = order.index(reductions[-1])
    early = [node for node in copies(result, to_host) if order.index(node) < last]
    first_wait = min(order.index(node) for node in copies(result, wait_copy))
    assert len(early) >= 2 * 4 and first_wait > max(order.index(node) for node in copies(result, to_host))


def test_dump_and_report_say_what_is_on_the_host(tmp_path: Path) -> None:
    def annotate(model: Model) -> None:
        spmd.fully_shard(model.blocks[0], offload_policy=spmd.OffloadPolicy(pin_memory=False))

    model, result = compiled(lambda: Model(16, 2), annotate, dump=tmp_path)
    assert {*memory_of(result)} == {name for name, _ in model.named_parameters(prefix="model") if "blocks.0" in name}
    for stage in ("01_partition", "99_lowered"):
        text = next(tmp_path.glob(f"**/program-0/{stage}.py")).read_text()
        assert "memory.to_device" in text and "memory.to_host" in text and "in host memory" in text
    assert {node.args[1] for node in copies(result, to_host)} == {False}  # not pinned
    part = sum(p.numel() for p in Model(16, 2).blocks[0].parameters()) // 4 * 4
    at_the_peak = result.report().memory["cpu"].roles["offloaded"]
    assert part <= at_the_peak <= 2 * part  # gradients are there later


def memory_of(result: spmd.CompiledStep) -> dict[str, Memory]:
    return {each.name: each.memory for each in all_inputs(result) if each.memory is not Memory.DEVICE}


@dataclass(frozen=True)
class Seen(Pass):
    """Keeps the program, and stops."""

    programs: list[Program]
    last: ClassVar[bool] = True
    keeps_order: ClassVar[bool] = True

    def rewrite(self, program: Program) -> int:
        """Raises, since nothing can run here."""
        self.programs.append(program)
        raise spmd.PassError("seen")


def test_on_a_gpu_state_and_its_update_are_on_the_cpu() -> None:
    """On fake tensors: what computes forward and backward, and what is communicated, is on the GPU."""
    seen: list[Program] = []
    with fake_world(2):
        mode = OnCuda("fully_shard", offload_policy=POLICY, reshard_after_forward=True)
        result = spmd.compile(step, parallel_mode=mode, passes=[*passes.default(), Seen(seen)])
        model = Model(16, 1)
        with pytest.raises(spmd.PassError, match="seen"):
            result(model, torch.optim.AdamW(model.parameters()), torch.randn(4, 16))
    program, *_ = seen  # passes run once more behind one that raises
    where = {node: node.meta["val"].device.type for node in program.graph.nodes if is_tensor(node)}
    assert {where[node] for node in program.collectives()} == {"cuda"}
    for node, device in where.items():
        operands = {where[each] for each in node.all_input_nodes if each in where}
        if computes(node) in (to_device, to_host):
            assert where[node.args[0]] != device  # type: ignore[index]
        elif node.op == "call_function":
            assert operands <= {device}, f"{node.format_node()} mixes devices"
    (fused,) = [node for node in program.graph.nodes if "_fused_adamw" in str(node.target)]
    assert {where[each] for each in fused.all_input_nodes if each in where} == {"cpu"}
    memory = planned_memory(program)
    assert memory["cpu"].roles["offloaded"] == memory["cpu"].peak and not memory["cuda:0"].roles["offloaded"]


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def test_a_model_on_a_gpu_is_refused() -> None:
    model = Model(4, 1)
    with FakeTensorMode():
        model.first.weight = nn.Parameter(torch.empty(4, 4, device="cuda:0"))
    with fake_world(2), pytest.raises(spmd.PlacementError, match=r"model.first.weight is on cuda:0, .* model.cpu\(\)"):
        mode = spmd.DataParallel("fully_shard", offload_policy=POLICY)
        spmd.compile(step, parallel_mode=mode)(model, torch.optim.SGD(model.parameters()), torch.randn(4, 4))


@pytest.mark.parametrize("use", [
    lambda: spmd.OffloadPolicy(pin_memory="yes"),  # type: ignore[arg-type]
    lambda: spmd.OffloadPolicy(pin_memory=1),  # type: ignore[arg-type]
])  # fmt: skip
def test_a_policy_takes_a_bool(use: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match="expected pin_memory to be True or False"):
        use()


@pytest.mark.parametrize("apply", [spmd.fully_shard, spmd.replicate])
def test_what_is_no_policy_changes_nothing(apply: Any) -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"offload_policy to be a spmd.OffloadPolicy or None, got True"):
        apply(module, offload_policy=True)
    assert spmd.contract.state(module) is None
    with pytest.raises(TypeError, match=r"offload_policy to be a spmd.OffloadPolicy or None, got <class"):
        spmd.DataParallel("fully_shard", offload_policy=spmd.OffloadPolicy)  # type: ignore[arg-type]


def test_ignored_parameters_stay_where_they_are() -> None:
    def annotate(model: Model) -> None:
        model.first.requires_grad_(False)
        spmd.fully_shard(model, offload_policy=POLICY, ignored_params=model.first.parameters())

    _, result = compiled(lambda: Model(16, 1), annotate)
    assert not any("first" in name for name in memory_of(result)) and memory_of(result)


def test_a_plan_offloads_parameters_only() -> None:
    class Wrong(spmd.DataParallel):
        def plan(self, program: Program) -> spmd.Plan:
            return replace(super().plan(program), memory={"batches.0": Memory.HOST})

    with pytest.raises(spmd.PartitionError, match=r"memory must name parameters.*batches.0"):
        compiled(lambda: Model(16, 1), lambda model: None, parallel_mode=Wrong())


def test_a_dtensor_may_lie_elsewhere_than_its_mesh() -> None:
    """Made without ``from_local``, which would move it; here on the CPU."""
    with fake_world(2):
        mesh, local = init_device_mesh("cpu", (2,)), torch.randn(2, 3)
        tensor = nn.Parameter(dtensor_over(local, mesh, (Shard(0),), (3, 3), (3, 1)))
        assert (tensor.shape, tensor.placements, tensor.stride()) == ((3, 3), (Shard(0),), (3, 1))
        assert local_tensor(tensor).data_ptr() == local.data_ptr() and torch.equal(tensor.to_local(), local)


def test_a_draw_in_an_update_is_made_on_the_host() -> None:
    def noisy(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return loss.detach()

    with fake_world(2):
        model = spmd.fully_shard(nn.Linear(4, 4), offload_policy=POLICY)
        result = spmd.compile(noisy)
        result(model, torch.optim.SGD(model.parameters(), lr=0.0), torch.randn(2, 4))
    assert len(copies(result, to_host)) == 2  # the gradients, and no draws
