"""``bits="same"``: state has the same bits on 1, 2, 3 and 4 ranks, whole or split; and it is that of the plain step."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

import spmd
from examples.gpt import GPT, Config
from passes.runtime.local_peers import LocalPeers
from spmd.ranks import failures
from spmd.verification import runs
from tests.harness.pool import RankError, Ranks

CONFIG = Config(width=32, layers=1, heads=2, context=16)
STEPS = 4
STYLES = [(1, "replicate"), (2, "fully_shard"), (3, "replicate")]


def train(
    model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, autocast: bool = False, drop: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Labels that count are unequally many in each part; gradients are clipped."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        scores = F.dropout(model(x), drop) if drop else model(x)
        loss = F.cross_entropy(scores.flatten(0, 1).float(), torch.where(y < 180, y, -100).flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


def penalized(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> tuple[Tensor]:
    """A term of whole parameters, and gradients that are kept: neither is a sum over rows."""
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss = torch.stack([loss, 0.01 * sum((p.square().sum() for p in model.parameters()), torch.zeros(()))]).sum()
    loss.backward()
    optimizer.step()
    return (loss,)


def weighted(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    weights = 0.1 + (y % 7) / 3
    each = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none").unflatten(0, y.shape)
    loss = (each * weights).sum() / weights.sum()
    loss.backward()
    optimizer.step()
    return loss


def small() -> nn.Module:
    """Parameters that no number of ranks divides evenly, nor into parts of whole vectors."""
    return nn.Sequential(
        nn.Embedding(CONFIG.vocabulary, 11), nn.Linear(11, 37), nn.GELU(), nn.LayerNorm(37), nn.Linear(37, 256)
    )


def with_norm() -> nn.Module:
    """Statistics of all rows, at each position."""
    first, second, *_ = small()  # type: ignore[misc]
    return nn.Sequential(first, second, nn.BatchNorm1d(CONFIG.context), nn.GELU(), nn.Linear(37, 256))


def fits(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def build(optimizer: str, make: Any = None) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = (make or partial(GPT, CONFIG))()
    if optimizer == "AdamW":
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def rows(step: int, rank: int = 0, world: int = 1, count: int = 16) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    own = torch.randint(0, CONFIG.vocabulary, (count, CONFIG.context + 1), generator=draw).chunk(world)[rank]
    return own[:, :-1].contiguous(), own[:, 1:].contiguous()


def mode(style: Any = "replicate", in_pairs: bool = False, virtual: int = 8, turns: int = 1) -> spmd.DataParallel:
    options: dict[str, Any] = {"micro_batches": turns}
    if in_pairs:
        options |= {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), "axes": {"batch": ("a", "b")}}
    return spmd.DataParallel(style, bits="same", virtual=virtual, **options)


def digest(model: nn.Module, optimizer: Any, results: list[Any]) -> str:
    tensors = [
        *model.parameters(),
        *model.buffers(),
        *(each[key] for each in optimizer.state.values() for key in sorted(each)),
    ]
    found = hashlib.sha256(repr(results).encode())
    for each in tensors:
        whole = each.full_tensor() if isinstance(each, DTensor) else each
        found.update(whole.detach().numpy().tobytes())
    return found.hexdigest()


def trained(
    rank: int, world: int, function: Any, optimizer: str, options: dict[str, Any], make: Any, *of_mode: Any
) -> str:
    objects = build(optimizer, make)
    step, results = spmd.compile(function, parallel_mode=mode(*of_mode)), []
    spmd.seed(3)
    try:
        for k in range(STEPS):
            results.append([each.item() for each in step(*objects, *rows(k, rank, world), **options)])
    finally:
        spmd.seed(None)
    return digest(*objects, results)


@pytest.mark.parametrize(
    ("function", "optimizer", "options", "make", "worlds"),
    [
        (train, "AdamW", {"drop": 0.3}, None, [(1,), (2, "fully_shard")]),
        (train, "AdamW", {"autocast": True}, small, [(1, "fully_shard"), (2, "replicate"), (4, "fully_shard", True)]),
        (penalized, "SGD", {}, small, [(1,), (2, "fully_shard"), (3,)]),  # of 6, 6 and 4 rows
        (train, "AdamW", {"drop": 0.3}, with_norm, [(k, style, False, 4) for k, style in STYLES]),
        (train, "AdamW", {"drop": 0.3}, small, [(1,), *((k, "fully_shard", False, 8, 2) for k in (2, 3))]),
    ],
    ids=["dropout", "autocast", "penalized", "statistics", "turns"],
)
def test_state_has_the_same_bits_on_any_number_of_ranks(
    ranks: Ranks,
    request: pytest.FixtureRequest,
    function: Any,
    optimizer: str,
    options: dict[str, Any],
    make: Any,
    worlds: list[tuple[Any, ...]],
) -> None:
    """On the fewest and the most ranks of each, 1 to 4 in all; on all with --exhaustive."""
    is_exhaustive = request.config.getoption("--exhaustive")
    found = [
        each
        for world, *of_mode in (worlds if is_exhaustive else [worlds[0], worlds[-1]])
        for each in ranks.run(world, trained, function, optimizer, options, make, *of_mode)
    ]
    assert len({*found}) == 1, found


def continued(rank: int, world: int, folder: Path, style: str, steps: range, ends: bool = True) -> str:
    """What is there after some steps, from the newest checkpoint; else the last rank is killed in the one after."""
    failures._PATIENCE = 0.1  # for reasons that nobody has
    model, optimizer = build("AdamW", small)
    step, results = spmd.compile(train, parallel_mode=mode(style)), []
    spmd.seed(3)
    try:
        if steps.start:
            assert spmd.load(folder, model=model, optimizer=optimizer) == steps.start
        for k in [*steps, *([] if ends else [steps.stop])]:
            if k == steps.stop and rank == world - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            results.append([each.item() for each in step(model, optimizer, *rows(k, rank, world), drop=0.3)])
            if k + 1 == steps.stop:
                spmd.save(folder, step=k + 1, model=model, optimizer=optimizer)
    finally:
        spmd.seed(None)
    return digest(model, optimizer, results[-1:])


def test_runs_that_go_on_with_fewer_ranks_after_a_kill_have_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    with pytest.raises(RankError, match="exit code -9"):
        ranks.run(3, continued, parts, "fully_shard", range(2), False, grace=30.0)
    found = ranks.run(2, continued, parts, "fully_shard", range(2, STEPS))
    assert {*found} == {*ranks.run(1, continued, tmp_path / "whole", "replicate", range(STEPS))}


@pytest.mark.usefixtures("alone")
def test_it_is_the_plain_step() -> None:
    """Beside the plain step on the whole batch, in fp64; and all ranks in one process, stage by stage."""
    results: list[Any] = []
    for compiles in (False, True):
        model, optimizer = build("SGD", small)
        model.double()
        step = spmd.compile(train, parallel_mode=spmd.DataParallel(bits="same", virtual=4)) if compiles else train
        results.append([step(model, optimizer, *rows(k)) for k in range(2)] + [list(model.parameters())])
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-9)
    verdict = spmd.verify(spmd.compile(train, parallel_mode=mode()), *build("SGD", small), *rows(0), world=3)
    assert verdict, verdict


def shows_rows(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    scores = model(x)
    F.cross_entropy(scores.flatten(0, 1), y.flatten()).backward()
    optimizer.step()
    return scores


def returned(rank: int, world: int) -> list[Tensor]:
    step, objects = spmd.compile(shows_rows, parallel_mode=mode()), build("SGD", small)
    return [step(*objects, *rows(k, rank, world, 24)) for k in range(2)]


def test_ranks_return_the_rows_that_they_pass(ranks: Ranks) -> None:
    """Three ranks, of which no part of the batch is that of a rank."""
    (whole,) = ranks.run(1, returned)
    parts = ranks.run(3, returned)
    for k, one in enumerate(whole):
        assert torch.equal(torch.cat([of_rank[k] for of_rank in parts]), one)


def refused(rank: int, world: int) -> list[str]:
    found = []
    cases = [(mode(virtual=2), 8), (mode(), 3), (mode(turns=8), 8)]
    for given, count in cases:
        try:
            x, y = rows(0, rank, world)
            spmd.compile(train, parallel_mode=given)(*build("SGD", small), x[:count], y[:count])
        except spmd.PartitionError as error:
            found.append(str(error))
    return found


def test_what_does_not_divide_is_refused(ranks: Ranks) -> None:
    few, rest, turns = ranks.run(2, refused)[0]
    assert "takes at least two virtual parts on each rank, but has virtual=2 for 2 ranks: pass virtual=4" in few
    assert "cuts the global batch into 8 equal parts, but x has 6 rows: pass a multiple of 8" in rest
    assert "takes a virtual part for each of them on each rank, but has virtual=8 for 2 ranks: pass virtual=16" in turns
    for options, message in [
        ({"micro_batches": 3}, "expected micro_batches to divide virtual=8"),
        ({"micro_batches": "auto"}, "expected micro_batches to divide virtual=8"),
        ({"micro_batches": 2, "statistics": "per_micro_batch"}, "neither stages nor bits"),
        ({"virtual": 6}, "expected virtual, the parts of the global batch, to be 2, 4, 8, ..., got 6"),
        ({"accumulate_dtype": torch.float64}, 'expected no accumulate_dtype with bits="same"'),
        ({"micro_batches": 2, "reduce_gradients": "each"}, 'expected reduce_gradients="once" with bits="same"'),
    ]:
        with pytest.raises(ValueError, match=message):
            spmd.DataParallel(bits="same", **options)


@pytest.mark.usefixtures("alone")
def test_parts_that_need_sums_of_all_are_computed_side_by_side() -> None:
    """The right numbers, with draws by position; and the same bits on three ranks, which have other parts than rows."""
    cases: list[Any] = [(train, with_norm, {"drop": 0.3}, 2, False), (weighted, small, {}, 3, True)]
    for function, make, options, world, bits in cases:
        model, optimizer = build("SGD", make)
        step = spmd.compile(function, parallel_mode=spmd.DataParallel(bits="same", virtual=4))
        verdict = spmd.verify(step, model.double(), optimizer, *rows(0), **options, world=world, steps=1, bits=bits)
        assert verdict, verdict


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_parts_of_one_turn_are_computed_side_by_side() -> None:
    """Memory falls with the number of turns; the right numbers; and what needs sums of all parts is refused."""
    found = []
    for turns in (2, 8):
        objects, step = build("SGD", small), spmd.compile(train, parallel_mode=mode(turns=turns))
        step(*objects, *rows(0), drop=0.3)
        found.append(step.report().memory["cpu"].roles["activations"])
        assert step.program is not None and step.program.micro_batches is not None
        assert (step.program.micro_batches.count, step.program.micro_batches.together) == (turns, 8 // turns)
    assert found[0] > 2 * found[1]
    model, optimizer = build("SGD", small)
    step = spmd.compile(train, parallel_mode=mode("fully_shard", turns=2))
    verdict = spmd.verify(step, model.double(), optimizer, *rows(0), drop=0.3, world=2, steps=1)
    assert verdict, verdict
    for function, make in [(train, with_norm), (weighted, small)]:
        with pytest.raises(spmd.PartitionError, match="sums of all, which are known only when all have run: leave out"):
            spmd.compile(function, parallel_mode=mode(turns=2))(*build("SGD", make), *rows(0))


def ranks_rows(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Compare rows, as a loss that sorts them does."""
    loss = model(x)[:, 0].sort(0).values.diff(dim=0).square().sum()
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.usefixtures("alone")
def test_a_refusal_says_why_there_are_micro_batches() -> None:
    """The user has asked for bits alone; ``micro_batches=1`` is what the mode has."""
    compiled = spmd.compile(ranks_rows, parallel_mode=mode())
    with pytest.raises(spmd.PartitionError, match="needs rows of all micro-batches at once") as raised:
        compiled(*build("SGD", small), rows(0)[0])
    assert 'bits="same" computes the batch in 8 parts' in "\n".join(raised.value.__notes__)


@pytest.mark.usefixtures("alone")
def test_a_wider_dtype_of_reductions_is_refused() -> None:
    """A rank by itself reduces nothing, and so rounds its sums elsewhere."""
    model, optimizer = build("SGD", small)
    compiled = spmd.compile(fits, parallel_mode=spmd.DataParallel(bits="same", reduce_dtype=torch.float32))
    with pytest.raises(spmd.PartitionError, match="expected gradients to be reduced in their own dtype"):
        compiled(model.bfloat16(), optimizer, rows(0)[0])


def test_a_backend_that_chooses_by_time_is_refused() -> None:
    with pytest.raises(ValueError, match='expected backend="aten" with bits="same"'):
        spmd.compile(train, parallel_mode=spmd.DataParallel(bits="same"), backend="inductor")


def late(rank: int, world: int) -> list[list[float]]:
    """The losses where one rank reads what its peers have published long after they did."""
    collect = LocalPeers.collect

    def collect_late(self: LocalPeers, number: int) -> Any:
        found = collect(self, number)
        time.sleep(0.03 * rank)
        return found

    LocalPeers.collect = collect_late  # type: ignore[method-assign]
    try:
        objects = build("SGD", small)
        step = spmd.compile(train, parallel_mode=spmd.DataParallel(micro_batches=4))
        return [[each.item() for each in step(*objects, *rows(k, rank, world))] for k in range(2)]
    finally:
        LocalPeers.collect = collect  # type: ignore[method-assign]


def test_a_run_leaves_what_peers_still_read(ranks: Ranks) -> None:
    """Each run counts labels on all ranks, in memory that the next run computes in."""
    objects = build("SGD", small)
    expected = [[each.item() for each in train(*objects, *rows(k))] for k in range(2)]
    for found in ranks.run(2, late):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("style", "world"), [pytest.param("replicate", 2, marks=pytest.mark.exhaustive), ("fully_shard", 3)]
)
def test_verify_compares_bits(style: Any, world: int) -> None:
    step = spmd.compile(train, parallel_mode=mode(style))
    verdict = spmd.verify(step, *build("AdamW", small), *rows(0), drop=0.3, world=world, steps=2, bits=True)
    assert verdict and "one rank, to the last bit" in str(verdict)


@pytest.mark.usefixtures("alone")
def test_parts_of_the_last_dim_have_the_same_bits() -> None:
    """They are gathered by other ops, behind which the same kernel updates."""
    model, optimizer = build("AdamW", partial(nn.Linear, 5, 67))
    spmd.fully_shard(model, shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
    x = torch.randn(16, 5)
    step = spmd.compile(fits, parallel_mode=mode("fully_shard"))
    assert spmd.verify(step, model, optimizer, x, world=2, steps=2, bits=True)
    turned = nn.Linear(5, 67)
    turned.weight.data = turned.weight.data.t().contiguous().t()
    with pytest.raises(spmd.PartitionError, match=r"expected model\.weight to be contiguous"):
        spmd.compile(fits, parallel_mode=mode("fully_shard"))(turned, torch.optim.SGD(turned.parameters()), x)


@pytest.mark.usefixtures("alone")
def test_products_have_the_same_bits_wherever_operands_were_stored() -> None:
    """A matrix product rounds by where operands begin: parameters of these sizes begin anywhere in a flat storage."""
    layers = [nn.Linear(37, 11), nn.Tanh(), nn.Linear(11, 37, bias=False), nn.Tanh(), nn.Linear(37, 67), nn.Tanh()]
    model, x = nn.Sequential(*layers, nn.Linear(67, 3)).double(), torch.randn(48, 37, dtype=torch.float64)
    step, optimizer = spmd.compile(fits, parallel_mode=mode("fully_shard")), torch.optim.SGD(model.parameters(), lr=0.1)
    verdict = spmd.verify(step, model, optimizer, x, world=2, steps=1, bits=True)
    assert verdict, verdict
    memory = torch.zeros(model[4].weight.numel() + 1, dtype=torch.float64)
    model[4].weight.data = memory[1:].view(67, 37)  # and what is not stored flat, where it lies
    with pytest.raises(ValueError, match=r"expected model\.4\.weight to begin at a multiple of 64 bytes"):
        spmd.compile(fits, parallel_mode=mode(), passes=())(model, optimizer, x)


@pytest.mark.usefixtures("alone")
def test_verify_sees_sums_in_the_order_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank adds up its parts one after the other, and then ranks: right but for rounding."""
    monkeypatch.setattr(runs, "ascend", lambda *_: None)
    step = spmd.compile(train, parallel_mode=mode())
    verdict = spmd.verify(step, *build("SGD", small), *rows(0), world=2, steps=1, bits=True)
    assert not verdict and verdict.after == 0


@pytest.mark.usefixtures("alone")
def test_bits_of_a_step_that_promises_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r'expected a step with spmd\.DataParallel\(bits="same"\) for bits=True'):
        spmd.verify(spmd.compile(train), *build("SGD", small), *rows(0), world=2, bits=True)
