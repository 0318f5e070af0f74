"""Experts along an axis of the mesh: numbers beside the plain step, what is communicated, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import spmd
from passes import Kind, PartitionError, PlacementError, Role
from passes.ir.collectives import is_wait
from spmd import placements
from spmd.partitioner.experts.own_rows import Own, OwnRowsOf
from spmd.recorder import recorded_calls
from spmd.rules.experts import exchange_rows
from tests.harness import experts as harness
from tests.harness.experts import EXPERTS, HIDDEN, WIDTH, Mixture, Training
from tests.harness.fake import fake_world
from tests.harness.oracle import all_unequal, assert_agrees, plain_run, snapshot
from tests.harness.pool import Ranks
from tests.models.examine import Training as Real
from tests.models.examine import products_in_fp64

OVER_BATCH: dict[str, Any] = {"axes": {"batch": "ep", "experts": "ep"}}
OVER_DP: dict[str, Any] = {"axes": {"batch": "dp", "experts": "dp"}}
OVER_TWO: dict[str, Any] = {"axes": {"batch": ("dp", "ep"), "experts": "ep"}}
OVER_TP = {"model.shared.*": {"tp": Shard(0)}, "*.up": {"tp": Shard(2)}, "*.down": {"tp": Shard(1)}}
HALF = spmd.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
AS_ONE: dict[str, Any] = {"axes": {"batch": ("dp", "ep"), "experts": ("dp", "ep")}}
OF_THEIR_OWN: dict[str, Any] = {"axes": {"batch": "dp", "experts": "ep"}}


def whole_batch(form: Any, ranks: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    case = Training(form)
    return (*case.build(), *case.whole([case.part(rank, 0) for rank in range(ranks)]))


def verified(form: Any, mesh: dict[str, int], passes: Any = (), **options: Any) -> Any:
    """The verdict, of the program that the partitioner leaves if no ``passes`` are given."""
    step = spmd.compile(Training.step, parallel_mode=spmd.DataParallel(**options), passes=passes)
    return spmd.verify(step, *whole_batch(form, 4), world=4 if len(mesh) > 1 else 2, mesh=mesh, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("form, mesh, options", [
    ("ends", {"dp": 2, "ep": 2}, {"passes": None, "parallel_style": "fully_shard", **OVER_TWO}),
    ("ends", {"dp": 2, "ep": 2}, {"passes": None, "shard_optimizer": True, **OF_THEIR_OWN}),
    ("ends", {"dp": 2, "ep": 2}, {"parallel_style": "fully_shard", **AS_ONE}),
    # The other forms in every run: test_any_routing_on_ranks, test_experts_of_split_sequences.
    pytest.param(
        "numbers", {"dp": 2, "ep": 2}, {"parallel_style": "replicate", **OVER_TWO}, marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        "capacity", {"dp": 2, "ep": 2}, {"parallel_style": "fully_shard", **OVER_TWO}, marks=pytest.mark.exhaustive,
    ),
    ("ends", {"tp": 2, "ep": 2}, {"params": OVER_TP, **OVER_BATCH}),
    pytest.param(
        "capacity", {"tp": 2, "ep": 2}, {"parallel_style": "fully_shard", "params": OVER_TP, **OVER_BATCH},
        marks=pytest.mark.exhaustive,
    ),
    ("ends", {"ep": 2}, {"parallel_style": "fully_shard", "reduce_dtype": torch.bfloat16, **OVER_BATCH}),
    ("ends", {"ep": 2}, {"passes": None, "parallel_style": "fully_shard", "mp_policy": HALF, **OVER_BATCH}),
])  # fmt: skip
def test_each_form_is_as_the_plain_step(form: Any, mesh: dict[str, int], options: dict[str, Any]) -> None:
    verdict = verified(form, mesh, **options)
    assert verdict, str(verdict)


class Attends(nn.Module):
    """A mixture behind causal attention, for (rows, length, width)."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.qkv, self.mixture = nn.Linear(WIDTH, 3 * WIDTH), Mixture(form)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = (each.unsqueeze(1) for each in self.qkv(x).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1)
        out, loss = self.mixture((x + seen).flatten(0, 1), chosen.flatten(0, 1))
        return out.view_as(x), loss


@pytest.mark.slow
@pytest.mark.parametrize("form, mesh, axes", [
    ("ends", {"x": 2}, {"sequence": "x", "experts": "x"}),
    pytest.param("numbers", {"cp": 2, "ep": 2}, {"sequence": "cp", "experts": "ep"}, marks=pytest.mark.exhaustive),
    ("capacity", {"cp": 2, "dp": 2}, {"sequence": "cp", "batch": "dp", "experts": "dp"}),
])  # fmt: skip
def test_experts_of_split_sequences(form: Any, mesh: dict[str, int], axes: Any) -> None:
    torch.manual_seed(0)
    model, (x, y) = Attends(form).double(), torch.randn(2, 4, 8, WIDTH, dtype=torch.float64)
    chosen = torch.rand(4, 8, EXPERTS).topk(2).indices
    mode = spmd.DataParallel("fully_shard", axes={"shard": (*mesh,), **axes})
    step = spmd.compile(Training.step, parallel_mode=mode, passes=None if len(mesh) == 1 else ())
    given = model, torch.optim.SGD(model.parameters(), lr=0.1), x, chosen, y
    verdict = spmd.verify(step, *given, world=torch.Size(mesh.values()).numel(), mesh=mesh, steps=2)
    assert verdict, str(verdict)


def in_half_precision(model: nn.Module, optimizer: Any, x: torch.Tensor, chosen: torch.Tensor, y: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return Training.step(model, optimizer, x, chosen, y)


@pytest.mark.slow
@pytest.mark.parametrize("form", [pytest.param("numbers", marks=pytest.mark.exhaustive), "capacity"])
def test_products_of_experts_in_half_precision(form: Any) -> None:
    model, optimizer, x, chosen, y = whole_batch(form, 4)
    step = spmd.compile(in_half_precision, parallel_mode=spmd.DataParallel(**OVER_BATCH))
    batch = x.float(), chosen, y.float()
    verdict = spmd.verify(step, model.float(), optimizer, *batch, world=2, mesh={"ep": 2}, steps=3)
    assert verdict, str(verdict)


@pytest.mark.parametrize("form", ["ends", "numbers"])
def test_any_routing_on_ranks(ranks: Ranks, form: Any) -> None:
    """Skewed, with an expert that has no row, and a rank whose experts have none."""
    mode = {"parallel_style": "fully_shard", "axes": {"batch": "dp", "experts": "dp"}}
    assert_agrees(ranks, 2, Training(form), mode, steps=5)


def save_on_four(rank: int, world: int, folder: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    mode, case = spmd.DataParallel("fully_shard", mesh=mesh, **OVER_TWO), Training()
    torch.manual_seed(0)
    step, (model, optimizer) = spmd.compile(case.step, parallel_mode=mode), case.build()
    got = [snapshot(step(model, optimizer, *case.part(rank, k)), (model, optimizer)) for k in range(2)]
    up = model.experts["up"]
    assert isinstance(up, DTensor) and up.placements == (Shard(1), Shard(0))
    spmd.save(folder, model=model, optimizer=optimizer)
    return all_unequal(plain_run(case, world, 2), got, rank, world)


def go_on(rank: int, world: int, folder: str) -> list[str]:
    """Two ranks that each have the rows of two; or four, along two axes that are one for the experts."""
    case, plain = Training(), Training()
    torch.manual_seed(0)
    objects = plain.build()
    batches = [plain.whole([plain.part(each, k) for each in range(4)]) for k in range(4)]
    expected = [snapshot(plain.step(*objects, *batch), objects) for batch in batches]
    mode, each = spmd.DataParallel("replicate", **OVER_DP), 4 // world
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        mode = spmd.DataParallel("fully_shard", mesh=mesh, **AS_ONE)
        assert spmd.data_rank(mode) == (rank, 4)
    step, (model, optimizer) = spmd.compile(case.step, parallel_mode=mode), case.build()
    spmd.load(folder, model=model, optimizer=optimizer)
    own = range(each * rank, each * (rank + 1))
    parts = [plain.whole([plain.part(other, k) for other in own]) for k in (2, 3)]
    got = [snapshot(step(model, optimizer, *part), (model, optimizer)) for part in parts]
    return all_unequal(expected[2:], got, rank, world)


def test_a_checkpoint_goes_on_at_another_size(ranks: Ranks, tmp_path: Any, request: pytest.FixtureRequest) -> None:
    folder = str(tmp_path / "saved")
    assert ranks.run(4, save_on_four, folder) == [[]] * 4
    assert ranks.run(2, go_on, folder) == [[]] * 2
    if request.config.getoption("--exhaustive"):  # along two axes as one: to load is as along one
        assert ranks.run(4, go_on, folder) == [[]] * 4


class Odd(Mixture):
    """Rows behind the last end, read by others than products; experts counted from the last; masks; sums over rows."""

    def by_ends(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        experts, order = chosen.flatten().sort()
        ends, rows = experts.bincount(minlength=EXPERTS).cumsum(0).clamp(max=len(experts) - 5).int(), order // 2
        out = torch.ops.transformers.grouped_mm_fallback(x[rows], self.experts["up"], ends).exp()
        out = torch.ops.transformers.grouped_mm_fallback(out, self.experts["down"], ends) + x[rows]
        out = nn.functional.dropout(out, 0.2) * weights.flatten()[order, None]
        with torch.no_grad():
            self.bias += 1e-3 * out[:, 0].float().histc(EXPERTS, -1, 1)
        negative = (out[:, 0] < 0)[order.argsort()]
        return torch.zeros_like(x).index_add(0, rows, out) + out.sum(0) + out.exp().mean() + (~negative).sum()

    def by_numbers(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().by_numbers(x, chosen.where(chosen < 2, chosen - EXPERTS), weights)


@pytest.mark.slow
@pytest.mark.parametrize("form, mesh", [("ends", {"dp": 2, "ep": 2}), ("numbers", {"ep": 2})])
def test_rows_that_no_expert_has_and_uneven_parts(form: Any, mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, case = Odd(form).double(), Training(form)
    batch = [each[:37] for each in case.whole([case.part(rank, 0) for rank in range(5)])]  # tokens, for 4 ranks
    mode = spmd.DataParallel(axes={"batch": tuple(mesh), "experts": "ep"})
    step = spmd.compile(case.step, parallel_mode=mode, passes=())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    verdict = spmd.verify(step, model, optimizer, *batch, world=2 * mesh.get("dp", 1), mesh=mesh, steps=1)
    assert verdict, str(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("name, implementation, mesh, options", [
    pytest.param("Mixtral", "grouped_mm", {"ep": 4}, OVER_BATCH, marks=pytest.mark.exhaustive),
    pytest.param("Qwen3Moe", "batched_mm", {"ep": 4}, OVER_BATCH, marks=pytest.mark.exhaustive),
    ("DeepseekV3", "grouped_mm", {"ep": 4}, OVER_BATCH),
    # Part by part in groups, in every run: test_own_order.py.
    pytest.param(
        "GptOss", "grouped_mm", {"dp": 2, "ep": 2}, {"micro_batches": 2, **OVER_TWO}, marks=pytest.mark.exhaustive,
    ),
])  # fmt: skip
def test_models_of_transformers(
    monkeypatch: pytest.MonkeyPatch, name: str, implementation: str, mesh: dict[str, int], options: dict[str, Any]
) -> None:
    """Unmodified; the plain step takes the grouped product that has fp64.

    On four ranks, which exchange rows in both directions and again for backward, with their auxiliary loss; or in
    groups of two, part by part, without it. One layer, of experts.
    """
    from tests.models.catalog import ENTRIES

    monkeypatch.setattr(placements, "FEWEST", 4)
    (entry,) = (entry for entry in ENTRIES if entry.name == name)
    torch.manual_seed(0)
    changed = {"experts_implementation": implementation, "num_hidden_layers": 1, "first_k_dense_replace": 0}
    changed |= {"output_router_logits": False} if "micro_batches" in options else {}
    model = replace(entry, config={**entry.config, **changed}).build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(8, 96, (16, 8))
    mode = spmd.DataParallel("fully_shard", **options, experts="*.experts.*")
    step = spmd.compile(Real.step, parallel_mode=mode, passes=())
    with products_in_fp64():
        verdict = spmd.verify(step, model, optimizer, {"input_ids": ids, "labels": ids}, world=4, mesh=mesh, steps=1)
    assert verdict, str(verdict)


class NoSuchRow(Training):
    """The second call has a number that no expert, or no token, has."""

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        """A part of the batch."""
        x, chosen, y = super().part(rank, 0)
        return x, chosen.index_fill(0, torch.tensor(0), -EXPERTS - 1) if step else chosen, y


class TakesAny(Mixture):
    """Rows of tokens by numbers that come from an argument."""

    def by_ends(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        experts, order = (chosen % EXPERTS).flatten().sort()
        ends, missing = experts.bincount(minlength=EXPERTS).cumsum(0).int(), (chosen < 0).sum() * len(x)
        out = torch.ops.transformers.grouped_mm_fallback(x[order // 2 + missing], self.experts["up"], ends)
        out = torch.ops.transformers.grouped_mm_fallback(out, self.experts["down"], ends)
        return torch.zeros_like(x).index_add(0, order // 2, out)


class LooksUp(Mixture):
    """The weights of each token's experts, looked up by numbers of two dims."""

    def by_numbers(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        hidden = torch.einsum("nw,nkwh->nkh", x, self.experts["up"][chosen])
        return torch.einsum("nkh,nkhw,nk->nw", hidden, self.experts["down"][chosen], weights)


def raises_as_plain(rank: int, world: int, form: str) -> tuple[int, str]:
    """The all_to_alls of a call, and what the call behind it raises."""
    harness.ROWS, fewest, placements.FEWEST = 64, placements.FEWEST, 1
    try:
        torch.manual_seed(0)
        made = {"ends": TakesAny, "numbers": Mixture, "lies": LooksUp}[form]
        case, model = NoSuchRow("ends"), made("ends" if form == "ends" else "numbers").double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = spmd.compile(case.step, parallel_mode=spmd.DataParallel(**OVER_DP))
        step(model, optimizer, *case.part(rank, 0))
        try:
            step(model, optimizer, *case.part(rank, 1))
        except Exception as error:
            return step.report().count("all_to_all"), f"{type(error).__name__}: {error}"
        return step.report().count("all_to_all"), "nothing"
    finally:
        harness.ROWS, placements.FEWEST = 8, fewest


@pytest.mark.parametrize("form, world", [("ends", 4), ("numbers", 2), ("lies", 2)])
def test_a_number_that_no_row_has_raises_on_all_ranks_as_in_the_plain_step(ranks: Ranks, form: str, world: int) -> None:
    for exchanges, raised in ranks.run(world, raises_as_plain, form):
        assert (exchanges > 0) is (form == "ends")
        assert "out of" in raised, raised


# Room for rows


def with_little_room(rank: int, world: int) -> tuple[list[str], list[str], list[str], int]:
    """Steps of which the second one sends all rows to one rank: what differs, why it compiled, notes of reports.

    And the all_to_alls of the first one.
    """
    harness.ROWS, fewest, placements.FEWEST = 256, placements.FEWEST, 8
    try:
        torch.manual_seed(0)
        case = Training(alone=True)
        mode = spmd.DataParallel("fully_shard", axes={"batch": "dp", "experts": "dp"})
        step, objects, got, notes, sent = spmd.compile(case.step, parallel_mode=mode), case.build(), [], [], []
        for k in range(3):
            got.append(snapshot(step(*objects, *case.part(rank, k)), objects))
            notes += [note for note in step.report().notes if "room" in note]
            sent.append(step.report().count("all_to_all"))
        reasons = [each.reason for each in step.recompiles().programs]
        return all_unequal(plain_run(case, world, 3), got, rank, world), reasons, notes, sent[0]
    finally:
        harness.ROWS, placements.FEWEST = 8, fewest


def test_a_call_with_more_rows_than_there_is_room_for_runs_again(ranks: Ranks) -> None:
    """On four ranks, where rows are exchanged; the program that has room for all rows gathers tokens."""
    for unequal, reasons, notes, exchanges in ranks.run(4, with_little_room):
        assert unequal == []
        assert exchanges == 5
        assert reasons == ["the first call", "a rank's experts had more rows than there was room for"]
        small, *large = (note.removeprefix("rows of experts: a rank has room for ") for note in notes)
        assert small == "1.25 times the mean of its ranks; 0 calls had more, and ran again with more room"
        assert large == ["all of them; 1 call had more, and ran again with more room"] * 2


class WritesFirst(Training):
    """A step that writes to its argument, and then sends all rows to one rank, in its first call."""

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        """As the next step."""
        return super().part(rank, step + 1)

    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, chosen: torch.Tensor, y: torch.Tensor) -> Any:
        """Training on other rows."""
        return Training.step(model, optimizer, x.mul_(2), chosen, y)


def checked_and_recorded(rank: int, world: int, folder: str) -> tuple[list[str], dict[int, str]]:
    """What differs, and the program of each call that is recorded."""
    rows, fewest, harness.ROWS, placements.FEWEST = harness.ROWS, placements.FEWEST, 64, 8
    try:
        torch.manual_seed(0)
        case = WritesFirst(alone=True)
        step, objects = spmd.compile(case.step, parallel_mode=spmd.DataParallel(**OVER_DP), check="first"), case.build()
        step.record(folder)
        got = [snapshot(step(*objects, *case.part(rank, k)), objects) for k in range(2)]
        calls = recorded_calls(Path(folder) / f"rank-{rank}")
        unequal = all_unequal(plain_run(case, world, 2), got, rank, world)
        return unequal, {number: torch.load(path)["program"] for number, path in calls.items()}
    finally:
        harness.ROWS, placements.FEWEST = rows, fewest


def test_a_call_that_runs_again_has_written_nothing_and_is_checked_and_recorded(ranks: Ranks, tmp_path: Any) -> None:
    for unequal, programs in ranks.run(2, checked_and_recorded, str(tmp_path)):
        assert unequal == []
        assert programs == {1: "program-1", 2: "program-1"}


# What is communicated


def compiled(form: Any, passes: Any = None, **options: Any) -> spmd.CompiledStep:
    """The step on rank 0 of a fake mesh of 2 x 2."""
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        mesh = mesh["ep"] if "dp" not in str(options) else mesh
        step = spmd.compile(Training.step, parallel_mode=spmd.DataParallel(mesh=mesh, **options), passes=passes)
        torch.manual_seed(0)
        step(*Training(form).build(), *Training(form).part(0, 0))
    return step


@pytest.mark.parametrize("form, axes, style", [
    ("ends", OVER_TWO, "fully_shard"),
    ("ends", OF_THEIR_OWN, "replicate"),
    ("numbers", OVER_TWO, "replicate"),
    ("capacity", OVER_TWO, "fully_shard"),
])  # fmt: skip
def test_experts_and_their_gradients_never_travel_over_their_axis(form: Any, axes: Any, style: Any) -> None:
    program = compiled(form, passes=(), parallel_style=style, **axes).program
    assert program is not None
    sent = [node.meta["collective"] for node in program.collectives()]
    assert not [each for each in sent if each.axis == "ep" and any("experts" in name for name in each.of)]
    assert [each for each in sent if each.axis == "dp" and any("experts" in name for name in each.of)]
    weights = [node.meta["val"] for node in program.placeholders if "experts" in node.name]
    assert all(len(each) == EXPERTS // 2 for each in weights)


def test_rows_are_brought_once_and_summed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens come to the experts' ranks, results go back, and their gradient comes; tokens themselves need none."""
    monkeypatch.setattr("tests.harness.experts.ROWS", 4096)  # so that sums are large enough to be scattered
    program = compiled("ends", passes=(), parallel_style="replicate", **OVER_BATCH).program
    assert program is not None
    activations = [node for node in program.collectives() if node.meta["collective"].role is Role.ACTIVATION]
    sent = [(node.meta["collective"].kind, tuple(node.args[0].meta["val"].shape[1:])) for node in activations]
    rows = [kind for kind, shape in sent if shape == (WIDTH,)]
    assert rows == [Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_GATHER]
    assert (HIDDEN,) not in dict(map(reversed, sent))
    products = [node for node in program.graph.nodes if "grouped_mm_fallback" in str(node.target)]
    assert [len(node.args[1].meta["val"]) for node in products] == [EXPERTS // 2] * 4


def test_rows_are_exchanged_where_that_moves_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2 experts a token on 4 ranks, 5/8 of what all tokens are; on 2 ranks it would be more."""
    monkeypatch.setattr(harness, "ROWS", 1024)
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
        step = spmd.compile(Training.step, parallel_mode=spmd.DataParallel(mesh=mesh, **OVER_BATCH), passes=())
        step(*Training().build(), *Training().part(0, 0))
    assert step.program is not None
    shapes = [
        (node.meta["collective"].kind, tuple(node.args[0].meta["val"].shape)) for node in step.program.collectives()
    ]
    slots = 1024 * 2 * 5 // 4
    kinds = [kind for kind, shape in shapes if shape[1:] == (WIDTH,) and len(shape) == 2 and shape[0] >= 1024]
    assert kinds == [Kind.ALL_TO_ALL] * 3
    assert sorted(shape for kind, shape in shapes if kind is Kind.ALL_TO_ALL) == [
        *((slots, width) for width in (1, 1, WIDTH, WIDTH, WIDTH)),
    ]
    products = [node for node in step.program.graph.nodes if "grouped_mm_fallback" in str(node.target)]
    assert {len(node.args[0].meta["val"]) for node in products} == {slots}


class SharedBehind(Mixture):
    """A shared expert that is called behind the others, and no statistics."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, width), and the numbers of the experts of each row -> the same shape, and no loss."""
        out = self.by_ends(x, chosen, self.router(x).softmax(-1).gather(1, chosen))
        return out + self.shared(x), x.new_zeros(())


def test_shared_experts_run_while_rows_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ROWS": 1024, "WIDTH": 128, "HIDDEN": 128}.items():
        monkeypatch.setattr(harness, name, value)
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
        step = spmd.compile(Training.step, parallel_mode=spmd.DataParallel(mesh=mesh, **OVER_BATCH))
        model = SharedBehind("ends").double()
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), *Training().part(0, 0))
    assert step.program is not None
    nodes = list(step.program.graph.nodes)
    sent = (node for node in step.program.collectives() if node.meta["collective"].kind is Kind.ALL_TO_ALL)
    dispatch = next(node for node in sent if node.meta["val"].shape[1] == 128)  # not that of their weights
    arrives = next(node for node in nodes if is_wait(node) and node.args[0] is dispatch)
    (shared,) = (node for node in nodes if "addmm" in str(node.target))
    assert nodes.index(dispatch) < nodes.index(shared) < nodes.index(arrives)


# Mutants: each is found


def ends_of_other_experts(self: OwnRowsOf, rows: Any, index: int, ends: Any) -> Any:
    """The ends of the first rank's experts, on all ranks."""
    mesh = self.mesh
    self.mesh = replace(mesh, axes=tuple(replace(axis, coordinate=0) for axis in mesh.axes))
    try:
        return ENDS(self, rows, index, ends)
    finally:
        self.mesh = mesh


def dropped_first_row(self: Own, emit: Any, own: Any) -> Any:
    """The own rows, of which the first counts for nothing."""
    rest = emit(torch.ops.aten.slice.Tensor, (ONLY(self, emit, own), self.dim, 1, own.meta["val"].shape[self.dim]))
    return emit(torch.ops.aten.constant_pad_nd.default, (rest, [0, 0] * (own.meta["val"].ndim - self.dim - 1) + [1, 0]))


def not_masked(self: Own, emit: Any, own: Any) -> Any:
    """Whatever lies behind a rank's rows counts."""
    return own


ENDS, ONLY = OwnRowsOf._ends, Own.only
MUTANTS = {
    "ends of others": ("ends", OwnRowsOf, "_ends", ends_of_other_experts),
    "dropped row": ("ends", Own, "only", dropped_first_row),
    "rows behind": ("numbers", Own, "only", not_masked),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found(monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    form, *change = MUTANTS[mutant]
    monkeypatch.setattr(*change)
    verdict = verified(form, {"ep": 2}, parallel_style="replicate", **OVER_BATCH)
    assert not verdict and verdict.stage == "partition"


def without_the_first_slot(self: Any, rows: Any) -> Any:
    """What a rank receives, but for the first row."""
    found = EXCHANGED(self, rows)
    rest = self.run(torch.ops.aten.slice.Tensor, (found, 0, 1, len(found.meta["val"])))
    pad = [0, 0] * (found.meta["val"].ndim - 1) + [1, 0]
    return self.run(torch.ops.aten.constant_pad_nd.default, (rest, pad))


EXCHANGED = exchange_rows._Messages._exchanged


@pytest.mark.slow
def test_a_mutant_of_the_exchange_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "ROWS", 256)
    monkeypatch.setattr(placements, "FEWEST", 8)
    monkeypatch.setattr(exchange_rows._Messages, "_exchanged", without_the_first_slot)
    step = spmd.compile(Training.step, parallel_mode=spmd.DataParallel(**OVER_BATCH), passes=())
    verdict = spmd.verify(step, *whole_batch("ends", 4), world=4, mesh={"ep": 4}, steps=1)
    assert not verdict and verdict.stage == "partition"


# Options


class Gathers(Mixture):
    """All experts for all tokens, as one product of two dims."""

    def by_ends(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x @ self.experts["up"].reshape(EXPERTS * WIDTH, HIDDEN)[:WIDTH] @ self.experts["down"].sum(0)


class Halves(Mixture):
    """The weights of each expert seen as those of two."""

    def by_ends(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        experts, order = chosen.flatten().sort()
        ends = experts.bincount(minlength=EXPERTS).cumsum(0).repeat_interleave(2).int()
        up = self.experts["up"].view(2 * EXPERTS, WIDTH, HIDDEN // 2)
        out = torch.ops.transformers.grouped_mm_fallback(x[order // 2], up, ends)
        return torch.zeros_like(x).index_add(0, order // 2, out.sum(-1, keepdim=True).expand(-1, WIDTH))


class Plain(nn.Module):
    """No experts."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), x.new_zeros(())


@pytest.mark.parametrize("make, options, error, message", [
    (Mixture, {"experts": "*.expert.*"}, PlacementError, r"'\*.expert.\*' in experts picks none of the parameters \("),
    (Mixture, {"experts": nn.Conv1d}, PlacementError, "Conv1d in experts picks none of the parameters"),
    (Mixture, {"experts": "*.shared.*"}, PlacementError, "expected model.shared.weight to have experts in dim 0"),
    (Plain, {}, PlacementError, "no parameter is read by a grouped or batched matrix product, or looked up"),
    (Gathers, {"experts": "*.experts.*"}, PartitionError, "experts.py:.* reads the weights of all experts, .24, 10"),
    (Halves, {"experts": "*.experts.*"}, PartitionError, "experts.py:.* reads the weights of all experts, .8, 6, 5"),
    (Mixture, {"axes": {"batch": ("dp", "ep"), "experts": "dp"}}, PlacementError, "the axis of experts, dp, to stand"),
])  # fmt: skip
def test_what_is_refused(make: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    model = make("ends").double()
    given = (model, torch.optim.SGD(model.parameters(), lr=0.1), *Training().part(0, 0))
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 4) if "shared" in str(options) else (4, 2), mesh_dim_names=("dp", "ep"))
        step = spmd.compile(Training.step, parallel_mode=spmd.DataParallel(mesh=mesh, **{**OVER_TWO, **options}))
        with pytest.raises(error, match=message):
            step(*given)


@pytest.mark.parametrize("names, axes, message", [
    (("dp", "ep"), {"batch": "dp", "experts": ("dp", "ep")}, "dp has batch, shard, experts; ep has experts"),
    (("ep", "dp"), AS_ONE["axes"], r"dp, ep, to follow each other in the mesh in this order, got .* \['ep', 'dp'\]"),
])  # fmt: skip
def test_axes_that_are_not_one(names: tuple[str, ...], axes: Any, message: str) -> None:
    with fake_world(4), pytest.raises((ValueError, PlacementError), match=message):
        spmd.DataParallel(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=names), axes=axes)


def test_axes_that_are_one_need_a_mesh_that_has_them() -> None:
    with fake_world(4), pytest.raises(PlacementError, match=r"axes names 'dp_ep', .* Of dp, ep one is made .* mesh="):
        spmd.data_rank(spmd.DataParallel(**AS_ONE))


def test_two_axes_beside_another_are_one_axis_of_the_program() -> None:
    """So are those of a slice of a mesh, between which another axis lies."""
    with fake_world(8, 5):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "tp", "ep"))
        mode = spmd.DataParallel(mesh=mesh["dp", "ep"], **AS_ONE)
        assert mode.mesh is not None and mode.mesh.mesh.tolist() == [0, 1, 4, 5]
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("tp", "dp", "ep"))
        step = spmd.compile(Training.step, parallel_mode=spmd.DataParallel(mesh=mesh, params=OVER_TP, **AS_ONE))
        model, optimizer = Training().build()
        step(model, optimizer, *Training().part(0, 0))
        up = model.experts["up"]
        assert isinstance(up, DTensor) and up.placements == (Shard(2), Shard(0))
        assert up.device_mesh.mesh_dim_names == ("tp", "dp_ep")
        apart = spmd.compile(Training.step, parallel_mode=spmd.DataParallel(mesh=mesh, **OVER_TWO))
        with pytest.raises(PlacementError, match=r"some parameters are DTensors on .*dp_ep=4.* has not all axes"):
            apart(model, optimizer, *Training().part(0, 0))


def test_experts_are_named_or_found() -> None:
    for experts in (None, nn.ParameterDict, lambda module: isinstance(module, nn.ParameterDict)):
        program = compiled("ends", (), parallel_style="replicate", experts=experts, **OVER_TWO).program
        assert program is not None
        split = {i.name for i in program.inputs if Shard(0) in i.placement and i.role is Role.PARAMETER}
        assert split == {"model.experts.up", "model.experts.down"}


@pytest.mark.parametrize("axes", [None, {"batch": "dp"}])
def test_experts_need_an_axis(axes: Any) -> None:
    with pytest.raises(ValueError, match="experts"):
        spmd.DataParallel(experts="*.experts.*", axes=axes)


def test_bits_that_are_the_same_need_whole_experts() -> None:
    with pytest.raises(ValueError, match='no axis with the role "experts" with bits="same"'):
        spmd.DataParallel(bits="same", **OVER_TWO)
