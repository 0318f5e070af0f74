"""The bundles of pipelines: what each stage has, what is refused, and mutants that the proof or ``verify`` catches."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn import functional as F

import passes
import spmd
from passes import PartitionError, Pass, PassError, Program, Role, SpmdError
from passes.ir.bundle import Bundle, messages_of
from passes.ir.check_bundle import check_bundle
from passes.ir.collectives import Kind, kind_of
from spmd.placements import OnStage
from spmd.stages.schedules import ended_role, orders, with_ends
from tests.harness.fake import fake_world
from tests.models.catalog import ENTRIES

from .trainings import TOKENS, WIDTH, EncoderDecoder, Training, of_transformers, translate, with_sgd

TWO: dict[str, Any] = {"axes": {"stages": "pp"}, "micro_batches": 4, "stages": ["2"]}


def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


def arguments(dropout: float = 0.0) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Dropout(dropout), nn.Linear(4, 2)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), *(torch.randn(8, n).double() for n in (3, 2))


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        compiled = spmd.compile(step, parallel_mode=spmd.DataParallel(mesh=mesh, **TWO))
        compiled(*arguments())
        assert compiled.program is not None
        found: Bundle = compiled.program.stages
    return found


def test_a_stage_has_only_its_own_state(bundle: Bundle) -> None:
    for stage, layers in enumerate(({"0"}, {"2", "4"})):
        programs = [program for role, program in bundle.programs.items() if f".{stage}" in role]
        names = {each.name for program in programs for each in program.inputs if each.role is Role.PARAMETER}
        assert {name.split(".")[1] for name in names} == layers


def evaluation(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x).sum()


def test_stages_are_balanced_and_all_steps_of_a_model_take_them() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 512), nn.Linear(512, 512), nn.Linear(512, 8))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(1024, 8)
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        mode = spmd.DataParallel(mesh=mesh, **TWO | {"stages": None})
        spmd.compile(step, parallel_mode=mode)(model, optimizer, x, x)
        homes = [each.weight.placements[0].stages for each in model]
        assert homes == [(0,), (0,), (0,), (1,), (1,)]
        spmd.compile(evaluation, parallel_mode=mode)(model, x[:8])
        assert [each.weight.placements[0].stages for each in model] == homes


def averaging(model: nn.Module, average: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for mean, each in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(each, 0.1)
    return loss


ROWS_OF_BOTH: dict[str, Any] = {"parallel_style": "fully_shard", "axes": {"stages": "pp", "batch": "dp"}}
TENSORS: dict[str, Any] = {
    "axes": {"stages": "pp", "tensor": "dp"},
    "params": {"*.0.*": {"dp": Shard(0)}, "*.2.weight": {"dp": Shard(1)}, "*.4.*": {"dp": Shard(0)}},
}


@pytest.mark.parametrize("mode", [ROWS_OF_BOTH, TENSORS], ids=["fully_shard", "tensor"])
def test_ranks_of_a_stage_with_unequal_parts_have_the_same_programs(mode: dict[str, Any]) -> None:
    """A part of one element is as large as a clip coefficient, and one of one row is contiguous in any order."""
    digests = set()
    for rank in range(2):
        with fake_world(4, rank):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
            model, average = (
                nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)) for _ in range(2)
            )
            compiled = spmd.compile(averaging, parallel_mode=spmd.DataParallel(mesh=mesh, **TWO | mode), passes=())
            compiled(model, average, with_sgd(model), torch.randn(8, 5))
            assert compiled.program is not None
            digests.add(compiled.program.stages.digest())
    assert len(digests) == 1


def penalized(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y) + 0.01 * sum(p.square().sum() for p in model.parameters())
    loss.backward()
    optimizer.step()
    return loss


def test_a_penalty_on_large_parameters_is_added_to_whole_gradients() -> None:
    """Sums over micro-batches are whole, though ranks would send less if they added it to parts."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 512), nn.Linear(512, 512), nn.Linear(512, 8))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(1024, 8)
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        mode = spmd.DataParallel(mesh=mesh, **TWO | {"stages": ["3"]})
        spmd.compile(penalized, parallel_mode=mode, passes=())(model, optimizer, x, x)
    assert [each.weight.placements[0].stages for each in model] == [(0,), (0,), (0,), (1,), (1,)]


def test_where_state_is_kept_can_be_copied() -> None:
    for made in (copy.deepcopy(OnStage([0, 2])), pickle.loads(pickle.dumps(OnStage([0, 2])))):
        assert made.stages == (0, 2)


def test_1f1b_keeps_at_most_as_many_micro_batches_as_stages() -> None:
    for stage, order in enumerate(orders("1f1b", 4, 1, 16, lambda part, stage: f"{part}.{stage}")):
        level = most = 0
        for role, _ in order:
            level += 1 if role.startswith("forward") else -1
            most = max(most, level)
        assert most == 4 - stage and level == 0


def test_a_send_ends_once_it_is_known_to_have_arrived(bundle: Bundle) -> None:
    order = bundle.order("step", 0)
    assert order.count(ended_role("forward.0")) == 4
    assert order.index(ended_role("forward.0")) < len(order) - 6, "the first is not kept until the end"
    alone = with_ends([[("forward.0", 0)], [("forward.1", 0)]], {"forward.0": ["forward.1"]}, {})
    assert alone == [["forward.0", "forward.0.sent"], ["forward.1"]]


def test_a_backward_lets_go_of_a_gradient_before_the_next() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        compiled = spmd.compile(step, parallel_mode=spmd.DataParallel(mesh=mesh, **TWO | {"stages": ["4"]}))
        compiled(*arguments())
    assert compiled.program is not None
    names = [str(node.target) for node in compiled.program.stages.programs["backward.0"].graph.nodes]
    assert names.index("aten.add_.Tensor") < max(k for k, name in enumerate(names) if name.startswith("aten.mm"))


def test_a_tied_weight_is_sent_once_a_call() -> None:
    """The first stage reads it twice, and the last once: each sums up its own part of the gradient."""
    model, batch = EncoderDecoder().double(), [torch.randint(TOKENS, (8, 5)) for _ in range(2)]
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        mode = spmd.DataParallel(mesh=mesh, **TWO | {"stages": ["decoder.0"]})
        compiled = spmd.compile(translate, parallel_mode=mode, passes=())
        compiled(model, with_sgd(model), *batch)
    assert compiled.program is not None
    sent = {
        role: [node.args[0].meta["val"].numel() for node in messages_of(program) if kind_of(node) is Kind.SEND]
        for role, program in compiled.program.stages.programs.items()
    }
    weight = TOKENS * WIDTH
    assert not [role for role, sizes in sent.items() if weight in sizes and not role.startswith("exchange")]
    assert all(max(sent[role]) >= weight for role in ("exchange.0.0", "exchange.1.1"))


@pytest.mark.slow
def test_a_loss_that_balances_experts_is_refused_at_its_line() -> None:
    entry = next(each for each in ENTRIES if each.name == "Mixtral")
    model = entry.build()
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        step = spmd.compile(of_transformers, parallel_mode=spmd.DataParallel(mesh=mesh, **TWO | {"stages": None}))
        with pytest.raises(PartitionError, match=r"modeling_mixtral\.py.*sum over the whole batch that each micro"):
            step(model, with_sgd(model), entry.batch(torch.Generator().manual_seed(0)))


@pytest.mark.slow
def test_a_model_of_transformers_is_cut_as_it_is() -> None:
    """Each block reads positions that the model computes once. ``test_numbers.py`` trains it, exhaustively."""
    case = Training("Llama")
    model, optimizer = case.build()
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        mode = spmd.DataParallel(mesh=mesh, **TWO | {"stages": None})
        spmd.compile(case.step, parallel_mode=mode, passes=())(model, optimizer, *case.part(0, 0))
    homes = [each.mlp.up_proj.weight.placements[0].stages for each in model.model.layers]
    assert homes == sorted(homes) and set(homes) == {(0,), (1,)}


# Mutants


def test_the_proof_finds_orders_that_would_never_end(bundle: Bundle) -> None:
    check_bundle(bundle)
    first, second = bundle.calls["step"]
    early = [role for role in first if role != "forward.0"]
    at = early.index("backward.0") + 1
    for mutant in (
        (("backward.0", *(role for k, role in enumerate(first) if k != first.index("backward.0"))), second),
        (tuple(early[:at] + ["forward.0"] * 4 + early[at:]), second),
        (first[:-1], second),
        (first, tuple(role for role in second if role != ended_role("backward.1"))),
    ):
        with pytest.raises(PassError):
            check_bundle(bundle.with_orders({"step": mutant}))


def nothing(program: Program) -> bool:
    """No edit."""
    return False


def lost_norm(program: Program) -> bool:
    """A stage whose gradients are left out of the norm."""
    if "exchange.0.0" not in program.name:
        return False
    cat = next(iter(program.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)))
    with program.graph.inserting_before(cat):
        zeros = program.graph.call_function(torch.ops.aten.zeros_like.default, (cat.args[0][0],))
    cat.args = ([zeros, *cat.args[0][1:]],)
    return True


@dataclass(frozen=True)
class Edit(Pass):
    """Edits some programs of a pipeline."""

    edit: Callable[[Program], bool]

    def rewrite(self, program: Program) -> int:
        """Return whether it did."""
        return int(self.edit(program))


def verified(edit: Callable[[Program], bool] | None, *mesh: tuple[str, int], dropout: float = 0.0, **mode: Any) -> Any:
    sizes = dict(mesh)
    pipeline = None if edit is None else (Edit(edit), passes.DeadCode())
    compiled = spmd.compile(step, parallel_mode=spmd.DataParallel(**TWO | mode), passes=pipeline)
    world = torch.Size(sizes.values()).numel()
    return spmd.verify(compiled, *arguments(dropout), world=world, mesh=sizes, steps=2)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("edit", [nothing, lost_norm])
def test_verify_finds_mutants(edit: Callable[[Program], bool]) -> None:
    verdict = verified(edit, ("pp", 2))
    assert bool(verdict) == (edit is nothing) and verdict.stage == ("" if edit is nothing else "Edit")


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("style", [pytest.param("replicate", marks=pytest.mark.exhaustive), "fully_shard"])
def test_stages_and_rows(style: str) -> None:
    mode = {"axes": {"batch": "dp", "stages": "pp"}, "parallel_style": style, "micro_batches": 2, "schedule": "gpipe"}
    assert verified(None, ("pp", 2), ("dp", 2), **mode)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "schedule", ["1f1b", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("interleaved", "zb-h1"))]
)
def test_draws_follow_the_rows(schedule: str) -> None:
    assert verified(None, ("pp", 2), dropout=0.3, stages=None, schedule=schedule)


class Tied(nn.Module):
    """A weight of the first layer is read by the last one, too, the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh()).tanh() @ self.first.weight


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_gradient_of_few_rows_is_added_up_where_they_are() -> None:
    torch.manual_seed(0)
    model = Tied().double()
    compiled = spmd.compile(step, parallel_mode=spmd.DataParallel(**TWO | {"stages": ["last"]}))
    rows = [torch.randn(8, 6).double() for _ in range(2)]
    assert spmd.verify(compiled, model, with_sgd(model), *rows, world=2, mesh={"pp": 2}, steps=1)


TEXT = "0F0,,0F1,2F0,2F1,2I0,2W0,2I1,2W1,0I0,0I1,0W0,0W1\n,1F0,1F1,3F0,3I0,3F1,3I1,3W0,1B0,1I1,3W1,,1W1\n"


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_schedule_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "orders.csv"
    path.write_text(TEXT)
    assert verified(None, ("pp", 2), stages=None, schedule=str(path), micro_batches=2)
    for wrong, message in (
        (TEXT.replace("1W1", ""), "weights of stage 1 on micro-batch 1"),
        (TEXT.replace("1F0", "0F0"), "forward of stage 0 on micro-batch 0"),
        (TEXT.replace("1F0", "SEND"), "got 'SEND'"),
    ):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=message):
            spmd.DataParallel(**TWO | {"micro_batches": 2, "schedule": path})


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": ["2"]}, 'give an axis the role "stages"'),
        ({"axes": {"stages": "pp"}, "stages": ["2"]}, "micro_batches of 2 or more"),
        (TWO | {"schedule": "zigzag"}, 'schedule to be one of "1f1b", "zb-h1"'),
        (TWO | {"axes": {"stages": ("pp", "qq")}}, 'one axis with the role "stages"'),
        (TWO | {"offload_policy": spmd.OffloadPolicy()}, "no offload_policy with stages"),
    ],
)
def test_options_that_exclude_stages(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spmd.DataParallel(**options)
    with pytest.raises(ValueError, match="virtual_stages to be 2 or more"):
        spmd.DataParallel(**TWO, virtual_stages=1)
    with pytest.raises(TypeError, match="name the first module of each stage"):
        spmd.DataParallel(**TWO | {"stages": "2"})
    with pytest.raises(ValueError, match="no gm_transformation with stages"):
        spmd.compile(step, lambda gm: gm, parallel_mode=spmd.DataParallel(**TWO))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"axes": {"batch": "pp"}, "parallel_style": "fully_shard"}, TWO, "is split over pp, which has the stages"),
        (TWO, {"axes": {"batch": "pp"}}, "kept on some stages of a pipeline, by an earlier step"),
    ],
)
def test_steps_that_keep_state_in_other_ways(first: dict[str, Any], second: dict[str, Any], message: str) -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        given = arguments()
        spmd.compile(step, parallel_mode=spmd.DataParallel(mesh=mesh, **first))(*given)
        with pytest.raises(SpmdError, match=message):
            spmd.compile(step, parallel_mode=spmd.DataParallel(mesh=mesh, **second))(*given)


def returns_columns(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    return model(x).T


@pytest.mark.parametrize(
    ("function", "options", "rows", "message"),
    [
        (step, {"stages": ["5"]}, 8, "'5' does not run behind those before it"),
        (step, {"stages": ["2", "4"]}, 8, "each of 2 stages but the first"),
        (step, {"stages": None, "schedule": "interleaved", "virtual_stages": 3}, 8, "at least 6 modules"),
        (step, {"schedule": "interleaved", "micro_batches": 3}, 6, "a multiple of 2"),
        (step, {}, 1, "two or more rows"),
        (step, {"schedule": "interleaved", "stages": None}, 6, "a multiple of 2"),  # three parts of two rows
        (returns_columns, {}, 8, "stages return rows that are dim 0"),
    ],
)
def test_steps_that_stages_cannot_run(function: Any, options: dict[str, Any], rows: int, message: str) -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        compiled = spmd.compile(function, parallel_mode=spmd.DataParallel(mesh=mesh, **TWO | options))
        model, optimizer, x, y = arguments()
        with pytest.raises(PartitionError, match=message):
            compiled(model, optimizer, x[:rows], y[:rows])
