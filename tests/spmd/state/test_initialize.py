"""Models on the meta device: initialized module by module, equal at any number of ranks, and only what is on meta."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import spmd
import spmd.step_compiler
from tests.harness.cases import MLP, Block, make_optimizer
from tests.harness.fake import fake_world
from tests.harness.memory import allocate_without_holes
from tests.harness.oracle import all_unequal, random_generator, snapshot
from tests.harness.pool import Ranks


class Net(nn.Module):
    """Sizes that two and three do not divide, one smaller than both, a batch norm, and a weight tied to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 5, dtype=torch.float64), nn.BatchNorm1d(5, dtype=torch.float64)
        self.narrow = nn.Linear(5, 1, dtype=torch.float64)
        self.head = nn.Linear(5, 7, dtype=torch.float64)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embed(x))
        return self.head(h + self.narrow(h))  # type: ignore[no-any-return]


def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def part(rank: int, k: int) -> list[Tensor]:
    return [torch.randint(0, 7, (6,), generator=random_generator(rank, k)) for _ in range(2)]


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, whole."""
    state = model.state_dict()
    return {name: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for name, v in state.items()}


def trained(rank: int, world: int, style: str, optimizer: str, ahead: bool) -> tuple[dict[str, Tensor], list[Any]]:
    """The values that the model begins with, and what is seen after each of five steps."""
    torch.manual_seed(rank)  # rank 0's decides
    mode = spmd.DataParallel(style)  # type: ignore[arg-type]
    with torch.device("meta"):
        model = Net()
    made = make_optimizer(optimizer, model.parameters())
    if ahead:
        spmd.materialize(model, mode)
    first: dict[str, Tensor] = whole(model) if ahead else {}
    compiled = spmd.compile(step, parallel_mode=mode)
    seen = [snapshot(compiled(model, made, *part(rank, k)), (model, made)) for k in range(5)]
    assert len(compiled.programs) == 1
    return first, seen


@pytest.mark.parametrize("style, optimizer, worlds", [
    ("fully_shard", "SGD momentum", (1, 3)),
    pytest.param("fully_shard", "AdamW", (2,), marks=pytest.mark.exhaustive),
    pytest.param("replicate", "SGD", (1, 2), marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_values_do_not_depend_on_the_number_of_ranks(
    ranks: Ranks, style: str, optimizer: str, worlds: tuple[int, ...]
) -> None:
    """And training goes on from them as on one process; initialized ahead or at the first step, they are equal."""
    firsts = []
    for world in worlds:
        results = ranks.run(world, trained, style, optimizer, True)
        torch.manual_seed(0)
        model = Net()
        model.load_state_dict(results[0][0])
        made = make_optimizer(optimizer, model.parameters())
        batches = [[torch.cat(x) for x in zip(*(part(r, k) for r in range(world)), strict=True)] for k in range(5)]
        expected = [snapshot(step(model, made, *batch), (model, made)) for batch in batches]
        for rank, (first, seen) in enumerate(results):
            assert all_unequal(expected, seen, rank, world) == []
            firsts.append(first)
    for other in firsts[1:]:
        for name, value in firsts[0].items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=1e-12)
    assert firsts[0]["norm.running_var"].eq(1).all() and firsts[0]["embed.weight"].std() > 0.3


def test_the_first_step_initializes_as_materialize_does(ranks: Ranks) -> None:
    ahead, later = (ranks.run(2, trained, "fully_shard", "SGD", ahead) for ahead in (True, False))
    assert all_unequal(ahead[0][1], later[0][1], 0, 2, 0, 0) == []


class Noted(nn.Linear):
    """A Linear that notes when it is initialized."""

    order: list[Any] = []  # noqa: RUF012 (of all of them)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.order.append(self)


def in_reverse(rank: int, world: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Noted(4, 4), nn.Sequential(Noted(4, 4)), Noted(4, 4))
    bias = nn.Parameter(torch.full((4,), 3.0))
    model[2].bias, values = bias, bias.detach().clone()
    Noted.order.clear()
    with fake_world(2):
        before, python = torch.get_rng_state(), next(iter(model.parameters()))
        assert spmd.materialize(model) is model
        assert Noted.order == [model[2], model[1][0], model[0]]  # type: ignore[index]
        assert model[2].bias is bias and torch.equal(bias, values)
        assert not any(p.is_meta for p in model.parameters()) and model[0].weight is not python
        spmd.materialize(model)
        assert len(Noted.order) == 3
        torch.set_rng_state(before)
        torch.randint(2**62, ())
    assert all(p.requires_grad for p in model.parameters())


def test_modules_are_initialized_in_reverse_and_only_what_is_on_meta_is_touched(ranks: Ranks) -> None:
    ranks.run(1, in_reverse, process_group=False)  # of fewer objects than this process has


def an_optimizer_of_before(rank: int, world: int) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    mark = model.weight.mark = "mine"  # type: ignore[attr-defined]
    with fake_world(2):
        spmd.materialize(model, spmd.DataParallel("fully_shard"))
        result = spmd.compile(lambda m, o, x: (m(x).sum().backward(), o.step())[0])
        result(model, optimizer, torch.randn(2, 4))
    assert [p is q for p, q in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True)] == [True] * 2
    assert model.weight.mark == mark


def test_an_optimizer_of_before_goes_on(ranks: Ranks) -> None:
    ranks.run(1, an_optimizer_of_before, process_group=False)  # of fewer objects than this process has


class Bare(nn.Module):
    """Has no reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(4))
        self.register_buffer("table", torch.empty(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.table  # type: ignore[operator]


def meta(*modules: type[nn.Module]) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*(kind() for kind in modules))


@pytest.mark.parametrize("compiles", [True, False])
def test_what_nothing_initializes_is_listed_and_nothing_is_changed(compiles: bool) -> None:
    model = meta(Bare, lambda: nn.Linear(4, 4), Bare)  # type: ignore[arg-type]
    names = r"model.0.scale, model.2.scale, model.0.table, model.2.table are on the meta device.*param_init_fn"
    with fake_world(2), pytest.raises(spmd.CaptureError, match=names):
        if compiles:
            spmd.compile(lambda model, x: model(x).sum())(model, torch.randn(2, 4))
        else:
            spmd.materialize(model)
    assert all(value.is_meta for value in model.state_dict().values())


def fill(module: nn.Module) -> None:
    for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        tensor.data.fill_(2.0) if isinstance(module, Bare) else tensor.normal_()


def test_a_function_of_the_mode_initializes() -> None:
    model = meta(Bare, lambda: nn.Linear(4, 4))  # type: ignore[arg-type]
    with fake_world(2):
        mode = spmd.DataParallel("fully_shard", param_init_fn=fill)
        spmd.compile(lambda model, x: model(x).sum(), parallel_mode=mode)(model, torch.randn(2, 4))
        assert model[0].scale.to_local().tolist() == [2.0] * 2 and model[0].table.tolist() == [2.0] * 4  # type: ignore[operator,union-attr]


class Forgetful(Bare):
    """Initializes one of its tensors only."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


def test_what_a_module_forgets_is_named_and_nothing_is_changed() -> None:
    model = meta(Forgetful, lambda: nn.Linear(4, 4))  # type: ignore[arg-type]
    before = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fake_world(2), pytest.raises(spmd.SpmdError, match=r"model.0.table would stay on the meta device"):
        spmd.materialize(model)
    assert all(value.is_meta for value in model.state_dict().values())
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    assert all(now is then for now, then in zip(optimizer.param_groups[0]["params"], before, strict=True))


def fails_late(module: nn.Module) -> None:
    if isinstance(module, Bare):
        raise RuntimeError("no such initialization")
    fill(module)


def failing(rank: int, world: int) -> None:
    model = meta(Bare, lambda: nn.Linear(4, 4))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = list(model.parameters())
    with fake_world(2):
        step = spmd.compile(MLP.step, parallel_mode=spmd.DataParallel("fully_shard", param_init_fn=fails_late))
        with pytest.raises(RuntimeError, match="no such initialization"):
            step(model, optimizer, torch.randn(2, 4), torch.randn(2, 4))
        assert all(now is then for now, then in zip(model.parameters(), before, strict=True)) and not optimizer.state
        good = spmd.compile(MLP.step, parallel_mode=spmd.DataParallel("fully_shard", param_init_fn=fill))
        good(model, optimizer, torch.randn(2, 4), torch.randn(2, 4))
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


def test_an_error_of_the_function_changes_nothing(ranks: Ranks) -> None:
    ranks.run(1, failing, process_group=False)  # of fewer objects than this process has


class Parent(nn.Module):
    """Initializes its child, too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.child = nn.Parameter(torch.empty(4)), nn.Linear(4, 4)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        self.child.reset_parameters()


def test_a_module_that_initializes_its_children_too_leaves_them_as_they_are() -> None:
    model = meta(Parent)
    model[0].child = nn.Linear(4, 4)
    values = model[0].child.weight.detach().clone()
    with fake_world(2):
        spmd.materialize(model)
    assert torch.equal(model[0].child.weight, values) and model[0].scale.tolist() == [1.0] * 4  # type: ignore[operator,union-attr]


def test_state_on_meta_that_has_no_values_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    optimizer = torch.optim.Adagrad(model.parameters())
    with (
        fake_world(2),
        pytest.raises(spmd.CaptureError, match=r"optimizer.sum\[model.weight\].*after spmd.materialize"),
    ):
        spmd.compile(MLP.step)(model, optimizer, torch.randn(2, 4), torch.randn(2, 4))
    assert model.weight.is_meta


@pytest.mark.parametrize("given, error", [("model", TypeError), (None, TypeError)])
def test_only_modules_are_materialized(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"torch\.nn\.Module"):
        spmd.materialize(given)


def peak_during(action: Any) -> int:
    """The most resident bytes of this process while ``action`` ran, over those before it (Linux)."""

    def resident(kind: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(kind))

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    action()
    return resident("VmHWM") - before


WIDTH, BLOCKS = 768, 6
UNIT = 4 * (8 * WIDTH * WIDTH + 5 * WIDTH)  # bytes of one block


def blocks(device: str) -> nn.Sequential:
    with torch.device(device):
        return nn.Sequential(*(Block(WIDTH) for _ in range(BLOCKS)))


def build_peaks(rank: int, world: int) -> tuple[int, int]:
    """The most memory while a model is built from meta, and while one that is whole is split."""
    allocate_without_holes()
    mode = spmd.DataParallel("fully_shard")
    built = peak_during(lambda: spmd.materialize(blocks("meta"), mode))
    model, peaks, commit = blocks("cpu"), list[int](), spmd.step_compiler.commit

    def measured(*args: Any) -> Any:
        result: list[Any] = []
        peaks.append(peak_during(lambda: result.append(commit(*args))))
        return result[0]

    spmd.step_compiler.commit = measured  # type: ignore[assignment]
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        spmd.compile(lambda m, o, x: (m(x).sum().backward(), o.step())[0], parallel_mode=mode)(
            model, optimizer, torch.randn(1, WIDTH)
        )
    finally:
        spmd.step_compiler.commit = commit
    return built, peaks[0]


def test_building_takes_the_parts_and_one_unit(ranks: Ranks) -> None:
    for built, split in ranks.run(2, build_peaks):
        assert built < BLOCKS * UNIT / 2 + UNIT * 1.2
        assert split < UNIT * 1.2
