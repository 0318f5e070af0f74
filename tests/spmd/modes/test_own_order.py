"""Rows that each rank, and each micro-batch, sorts by itself: which steps allow it, their numbers, what is sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import spmd
from passes import Axis, AxisRole, Kind, Mesh, PartitionError, Role
from passes.ir.schemas import name_of
from spmd import placements
from spmd.partitioner.experts import routes
from spmd.partitioner.experts.axis import EXPERTS_AXIS
from spmd.partitioner.experts.own_order import own_orders
from spmd.partitioner.experts.recomputed import originals
from spmd.rules.base import P, R
from tests.harness import experts as harness
from tests.harness.experts import CHOSEN, EXPERTS, WIDTH, Mixture, Training
from tests.harness.fake import fake_world
from tests.harness.oracle import all_unequal, plain_run, snapshot
from tests.harness.pool import Ranks

OVER_TWO: dict[str, Any] = {"axes": {"batch": ("dp", "ep"), "experts": "ep"}}
product = torch.ops.transformers.grouped_mm_fallback


class Routed(Mixture):
    """A shared expert beside the others; no statistics, of which each micro-batch would need all."""

    def forward(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, width), and the numbers of the experts of each row -> the same shape, and no loss."""
        weights = self.router(x).softmax(-1).gather(1, chosen)
        return self.by_ends(x, chosen, weights) + self.shared(x), x.new_zeros(())


class Inverse(Routed):
    """Rows that are put back by the inverse of their order, as transformers does."""

    def by_ends(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """As a mixture in this form."""
        experts, order = chosen.flatten().sort()
        ends = experts.bincount(minlength=EXPERTS).cumsum(0).int()
        out = product(x[order // 2], self.experts["up"], ends).relu()
        out = product(out, self.experts["down"], ends) * weights.flatten()[order, None]
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        return out[inverse].view(len(x), 2, WIDTH).sum(1)


class Two(nn.Module):
    """Two layers."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.first, self.second = Routed(form), Routed(form)  # type: ignore[arg-type]

    def forward(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """As each of them."""
        return self.second(self.first(x, chosen)[0], chosen)  # type: ignore[no-any-return]


class Recomputed(nn.Module):
    """Layers that are computed again in backward, which count the rows of each expert for a bias.

    ``form``: whether the bias follows the loads between two steps, or within the layer, so that the second run of a
    layer chooses other experts than the first one.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.layers = form, nn.ModuleList(map(Routed, ("ends", "ends")))
        for layer in self.layers:
            layer.register_buffer("loads", torch.zeros(EXPERTS))

    def forward(self, x: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        """As a mixture, whose experts the router and the bias choose."""
        for layer in self.layers:
            x = checkpoint(self.layer, layer, x, use_reentrant=False)
        return x, x.new_zeros(())

    def layer(self, layer: Any, x: Tensor) -> Tensor:
        """One layer; the rows are counted in a sort of their own."""
        chosen = (layer.router(x).sigmoid() + layer.bias).topk(CHOSEN).indices
        layer.loads += chosen.flatten().sort(stable=True).values.bincount(minlength=EXPERTS)
        if self.form == "within":
            follow(layer)
        return x + layer(x, chosen)[0]  # type: ignore[no-any-return]


def follow(layer: Any) -> None:
    """Move the bias of a layer against its loads."""
    with torch.no_grad():
        layer.bias += 0.5 * (layer.loads.mean() - layer.loads).sign()


def train_with_bias(model: Any, *rest: Any) -> tuple[Tensor, Tensor]:
    """Training, after which the bias of each layer follows its loads."""
    result = train(model, *rest)
    for layer in model.layers:
        follow(layer)
        layer.loads.zero_()
    return result


def train(model: nn.Module, optimizer: Any, x: Tensor, chosen: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Training without an auxiliary loss."""
    out = model(x, chosen)[0]
    loss = nn.functional.mse_loss(out, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss, out


def given(model: type[nn.Module], ranks: int = 4, form: str = "ends") -> tuple[Any, ...]:
    torch.manual_seed(0)
    case, net = Training(), model(form).double()
    batch = case.whole([case.part(rank, 0) for rank in range(ranks)])
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), *batch


# Which steps allow it


def forward(x: Tensor, weight: Tensor, scores: Tensor, change: str = "") -> Tensor:
    """A layer in which one thing needs the order of all rows, or nothing."""
    chosen = scores.topk(2).indices
    keys = (chosen if change != "may be below zero" else chosen - 1).flatten()
    experts, order = keys.sort()
    if change == "looked up":
        order = keys.argsort()
        experts = keys[order]
    counts = torch.histc(experts.float(), 4, 0, 3)
    ends = (counts.cumsum(0) if change != "no ends" else counts.cumsum(0).cumsum(0)).int()
    rows = x[order // 2]
    match change:
        case "draws":
            rows = nn.functional.dropout(rows, 0.5)
        case "pairs of rows":
            rows = rows.view(-1, 2, rows.shape[1]).flip(1).view_as(rows)
        case "tokens beside rows":
            rows = rows * scores.flatten()[: len(rows), None]
        case "positions":
            rows = rows + order[:, None]
        case "best row":
            rows = rows - rows.amax(0)
        case "rows of columns":
            return rows[rows.sort(1).indices].sum() + product(rows, weight, ends).sum()
    out = product(rows, weight, ends)
    if change == "is returned":
        return out
    return torch.zeros_like(x).index_add(0, order if change == "other tokens" else order // 2, out)


def orders(change: str, roles: tuple[AxisRole, ...] = (AxisRole.BATCH,)) -> Any:
    sizes = (16 if change == "other tokens" else 8, 6), (4, 6, 6), (8, 4)
    graph = make_fx(lambda *given: forward(*given, change), tracing_mode="fake")(*map(torch.randn, sizes)).graph
    return own_orders(list(graph.nodes), Mesh((Axis("dp", 2, "dp", 0, roles=roles),)), {})


@pytest.mark.parametrize("change", [
    *("may be below zero", "no ends", "draws", "pairs of rows", "tokens beside rows", "positions", "best row"),
    *("is returned", "other tokens", "rows of columns"),
])  # fmt: skip
def test_what_needs_the_order_of_all_rows_is_seen(change: str) -> None:
    assert not orders(change)


def test_rows_stay_with_ranks_that_split_tokens() -> None:
    assert [option.results[0] for node, option in orders("").items() if "index_add" in node.name] == [
        placements.Shard(0)
    ]
    assert orders("looked up")
    assert not orders("", roles=(AxisRole.TENSOR,))
    assert not orders("", roles=(AxisRole.BATCH, EXPERTS_AXIS))


def test_rows_of_a_layer_that_is_computed_again_have_the_same_order() -> None:
    def first_ends(x: Tensor, weight: Tensor, scores: Tensor) -> Tensor:
        """Backward of a custom op, whose ends are those of the first run."""
        (first, _), (_, order) = (scores.topk(2).indices.flatten().sort() for _ in range(2))
        ends = torch.histc(first.float(), 4, 0, 3).cumsum(0).int()
        return torch.zeros_like(x).index_add(0, order // 2, product(x[order // 2], weight, ends))

    given = torch.randn(8, 6), torch.randn(4, 6, 6), torch.randn(8, 4)
    nodes = list(make_fx(first_ends, tracing_mode="fake")(*given).graph.nodes)
    mesh = Mesh((Axis("dp", 2, "dp", 0, roles=(AxisRole.BATCH,)),))

    def sorted_apart() -> list[bool]:
        found = own_orders(nodes, mesh, originals(nodes))
        return [node in found for node in nodes if name_of(node.target) in ("sort", "grouped_mm_fallback")]

    assert sorted_apart() == [True, False, False]  # the first is counted
    for node in nodes:
        node.meta["recompute_of"] = "a node before it"
    assert sorted_apart() == [True, True, True]


# Numbers


@pytest.mark.slow
@pytest.mark.parametrize("model, mesh, rows, options", [
    (Inverse, {"dp": 2}, 8, {"axes": {"batch": "dp"}}),
    (Routed, {"dp": 2, "ep": 2}, 8, {"passes": None, "parallel_style": "fully_shard", **OVER_TWO}),
    (Inverse, {"ep": 4}, 64, {"axes": {"batch": "ep", "experts": "ep"}}),
    (Two, {"pp": 2}, 8, {"axes": {"stages": "pp"}, "stages": ["second"]}),
])  # fmt: skip
def test_micro_batches_are_as_the_plain_step(
    monkeypatch: pytest.MonkeyPatch, model: Any, mesh: dict[str, int], rows: int, options: dict[str, Any]
) -> None:
    """Over the batch alone; experts in groups of ranks; experts to which rows are exchanged; in stages."""
    monkeypatch.setattr(harness, "ROWS", rows)
    monkeypatch.setattr(placements, "FEWEST", 4)
    given_to_mode = {name: value for name, value in options.items() if name != "passes"}
    mode = spmd.DataParallel(micro_batches=2, **given_to_mode)
    step = spmd.compile(train, parallel_mode=mode, passes=options.get("passes", ()))
    world = 4 if "ep" in mesh else 2
    verdict = spmd.verify(step, *given(model), world=world, mesh=mesh, steps=1)
    assert verdict, str(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("mesh, options", [
    pytest.param({"dp": 2}, {"axes": {"batch": "dp"}}, marks=pytest.mark.exhaustive),
    ({"ep": 2}, {"axes": {"batch": "ep", "experts": "ep"}, "parallel_style": "fully_shard"}),
])  # fmt: skip
def test_layers_computed_again_count_rows_in_micro_batches(mesh: dict[str, int], options: dict[str, Any]) -> None:
    """Backward reads where the rows of the first run end, and the rows of the second."""
    step = spmd.compile(train_with_bias, parallel_mode=spmd.DataParallel(micro_batches=2, **options))
    verdict = spmd.verify(step, *given(Recomputed), world=2, mesh=mesh, steps=2)
    assert verdict, str(verdict)


@pytest.mark.slow
def test_layers_computed_again_with_other_experts_are_as_the_plain_step() -> None:
    """Backward reads where other rows end than it has, so the order is that of all rows."""
    step = spmd.compile(train, parallel_mode=spmd.DataParallel(axes={"batch": "dp"}), passes=())
    verdict = spmd.verify(step, *given(Recomputed, form="within"), world=2, mesh={"dp": 2}, steps=1)
    assert verdict, str(verdict)


@pytest.mark.slow
def test_ends_of_all_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_all(*given: Any) -> Any:
        whole = {P: R}
        return {
            node: replace(each, operands=tuple(whole.get(p, p) for p in each.operands)) if "mm" in node.name else each
            for node, each in own_orders(*given).items()
        }

    monkeypatch.setattr(routes, "own_orders", of_all)
    step = spmd.compile(Training.step, parallel_mode=spmd.DataParallel(axes={"batch": "dp"}), passes=())
    verdict = spmd.verify(step, *given(Routed), world=2, mesh={"dp": 2}, steps=1)
    assert not verdict and verdict.stage == "partition"


class OneGroup(Training):
    """In the second step the tokens of the first two ranks go to two experts of one rank."""

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        """A part of the batch."""
        x, chosen, y = super().part(rank, 0)
        return x, torch.tensor([0, 1]).expand_as(chosen).clone() if step == 1 and rank < 2 else chosen, y


def with_little_room(rank: int, world: int) -> tuple[list[str], list[str]]:
    """What differs in steps on two groups of two ranks, and why programs were compiled."""
    harness.ROWS, fewest, placements.FEWEST = 64, placements.FEWEST, 8
    try:
        torch.manual_seed(0)
        case, mesh = OneGroup(alone=True), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        mode = spmd.DataParallel(mesh=mesh, **OVER_TWO)
        step, objects = spmd.compile(case.step, parallel_mode=mode, passes=()), case.build()
        got = [snapshot(step(*objects, *case.part(rank, k)), objects) for k in range(2)]
        reasons = [each.reason for each in step.recompiles().programs]
        return all_unequal(plain_run(case, world, 2), got, rank, world), reasons
    finally:
        harness.ROWS, placements.FEWEST = 8, fewest


def test_all_ranks_know_that_one_group_had_more_rows(ranks: Ranks) -> None:
    for unequal, reasons in ranks.run(4, with_little_room):
        assert unequal == []
        assert reasons == ["the first call", "a rank's experts had more rows than there was room for"]


# What is sent


def sent(model: Any, options: dict[str, Any], *axes: str) -> list[tuple[Kind, str]]:
    """The collectives of activations with rows, on a mesh of two by two or of four."""
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2) if len(axes) == 2 else (4,), mesh_dim_names=axes)
        step: Any = spmd.compile(Training.step, parallel_mode=spmd.DataParallel(mesh=mesh, **options), passes=())
        step(*given(model, 1))
    found = [node for node in step.program.collectives() if node.meta["collective"].role is Role.ACTIVATION]
    rows = [node for node in found if node.args[0].meta["val"].shape[1:] == (WIDTH,)]
    return [(node.meta["collective"].kind, node.meta["collective"].axis) for node in rows]


def test_rows_are_sent_between_the_ranks_of_experts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "ROWS", 64)
    assert sent(Routed, {"axes": {"batch": "dp"}}, "dp") == []
    over_ep = sent(Routed, {**OVER_TWO, "micro_batches": 2}, "dp", "ep")
    assert over_ep and {axis for _, axis in over_ep} == {"ep"}


def test_rows_are_exchanged_within_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "ROWS", 1024)
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "ep"))
        step = spmd.compile(Training.step, parallel_mode=spmd.DataParallel(mesh=mesh, **OVER_TWO), passes=())
        step(*given(Routed, 1))
    assert step.program is not None
    nodes = [node for node in step.program.collectives() if node.meta["collective"].kind is Kind.ALL_TO_ALL]
    slots = 1024 * 2 * 5 // 4  # of the tokens of this rank
    assert [tuple(node.args[0].meta["val"].shape) for node in nodes if node.meta["collective"].axis == "ep"] == [
        *((slots, 1), (slots, WIDTH), (slots, WIDTH), (slots, WIDTH), (slots, 1)),
    ]


@pytest.mark.usefixtures("alone")
def test_micro_batches_of_what_needs_all_rows_are_refused() -> None:
    from tests.spmd.modes.test_experts import Odd

    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        mode = spmd.DataParallel(mesh=mesh, axes={"batch": "dp"}, micro_batches=2)
        with pytest.raises(PartitionError, match=r"\(.*\.py:.*\) needs rows of all micro-batches at once: "):
            spmd.compile(Training.step, parallel_mode=mode)(*given(Odd, 1))
