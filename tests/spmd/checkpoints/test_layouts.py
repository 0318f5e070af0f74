"""A checkpoint of any layout loads into any other, bit by bit, and training goes on as if nothing had happened."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor, Shard

import spmd
from tests.harness.pool import Ranks

from .runs import ALL, PLAIN, USUAL, Run, part, unequal, whole


def run_in(rank: int, layout: str, optimizer: str, seed: int, trains: bool) -> Run:
    """A run that has state of the optimizer: after an eager update, or, for what only a step splits, after training."""
    trains = trains or layout == "shard_optimizer"
    run = Run(layout, optimizer, seed, on_meta=not trains)
    if trains:
        run.train(rank, seed, seed + 2)
    else:
        run.update()
    return run


def saved(rank: int, world: int, layout: str, optimizer: str, seed: int, trains: bool, folder: Path) -> None:
    run = run_in(rank, layout, optimizer, seed, trains)
    spmd.save(folder, step=seed, **run.objects)
    state = run.state()
    if rank == 0:
        torch.save(state, folder / f"{seed}.pt")


def loaded(
    rank: int, world: int, layout: str, optimizer: str, seed: int, trains: bool, folder: Path, sources: Sequence[int]
) -> list[str]:
    """What differs after loads into what was never trained, and into what has other state, in turn.

    The first load of an odd seed is into other state.
    """
    trained: Run | None = None
    wrong = []
    for k, source in enumerate(sources, seed):
        expected = torch.load(folder / f"{source}.pt")
        if k % 2:
            run = trained = trained or run_in(rank, layout, optimizer, seed, trains)
        else:
            run = Run(layout, optimizer, seed, on_meta=True)
        assert {"model.embed.weight", "model.up.bias"} <= {*unequal(expected, run.state())}, "other values before"
        assert spmd.load(folder / f"step-{source}", **run.objects) == source
        wrong += [f"{source}: {name}" for name in unequal(expected, run.state())]
    return wrong


@pytest.mark.timeout(3600)  # with --exhaustive
@pytest.mark.parametrize("places, optimizer, trains", [
    pytest.param(USUAL, "Adam", False, id="usual"),
    pytest.param(ALL, "Adam", False, id="all pairs", marks=pytest.mark.exhaustive),
    pytest.param(USUAL, "Adam", True, id="Adam", marks=pytest.mark.exhaustive),
    pytest.param(USUAL, "Adafactor", True, id="Adafactor", marks=pytest.mark.exhaustive),
    pytest.param(USUAL, "Muon", True, id="Muon", marks=pytest.mark.exhaustive),
    pytest.param(USUAL, "SGD", True, id="SGD", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_every_layout_loads_from_every_other(
    ranks: Ranks,
    places: Sequence[tuple[str, int]],
    optimizer: str,
    trains: bool,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """State by name, and that of the optimizer, bit by bit: from any layout on any number of ranks into any other.

    In every run each checkpoint is loaded into one layout, and each layout loads one; all with --exhaustive.
    """
    count, is_exhaustive = len(places), request.config.getoption("--exhaustive")

    def run(number: int, job: Callable[..., Any], *args: Any) -> list[Any]:
        layout, world = places[number]
        given = (layout, optimizer, number, trains, tmp_path, *args)
        return ranks.run(world, job, *given, timeout=600, process_group=places[number] != PLAIN)

    for number in range(count):
        run(number, saved)
    for number, place in enumerate(places):
        sources = [(number + k) % count for k in range(1, count if is_exhaustive else 2)]
        assert not any(wrong := run(number, loaded, sources)), f"into {place} from {list(enumerate(places))}: {wrong}"


def resumed(rank: int, world: int, layout: str, optimizer: str, is_new: bool, folder: Path) -> list[str]:
    """What differs between a run of four steps and one that is interrupted after two."""
    run = Run(layout, optimizer)
    run.train(rank, 0, 2)
    spmd.save(folder, **run.objects)
    expected = run.train(rank, 2, 4)
    other = Run(layout, optimizer, seed=1, on_meta=is_new and layout == "fully_shard")
    if not is_new:
        other.train(rank, 7, 8)
    assert spmd.load(folder, **other.objects) is None
    got = other.train(rank, 2, 4)
    assert len(other.step.programs) == 1
    losses = [*zip(expected, got, strict=True)]
    return unequal(run.state(), other.state()) + [str(each) for each in losses if not torch.equal(*each)]


USUAL_RUNS = (
    ("fully_shard", 2, "Adafactor", True),
    ("shard_optimizer", 2, "Adam", False),
    ("rounded", 2, "Adam", True),
)
OTHER_RUNS = [
    ("rounded", 3, "SGD", False),
    ("replicate", 2, "Muon", True),
    *(
        (*place, optimizer, is_new)
        for k, (place, optimizer) in enumerate(product(USUAL, ("Adam", "Muon", "Adafactor", "SGD")))
        if place != PLAIN and (*place, optimizer, is_new := k % 3 == 0) not in USUAL_RUNS
    ),
]


@pytest.mark.parametrize(
    "layout, world, optimizer, is_new",
    [*USUAL_RUNS, *(pytest.param(*run, marks=pytest.mark.exhaustive) for run in OTHER_RUNS)],
)
def test_a_run_goes_on_with_the_same_bits(
    ranks: Ranks, layout: str, world: int, optimizer: str, is_new: bool, tmp_path: Path
) -> None:
    assert ranks.run(world, resumed, layout, optimizer, is_new, tmp_path) == [[]] * world


def elsewhere(rank: int, world: int, folder: Path, steps: int) -> dict[str, Any]:
    """Go on, or start, for so many steps of a global batch of twelve rows; the state then."""
    run = Run("fully_shard", "SGD", seed=rank)
    if folder.exists():
        done = spmd.load(folder, **run.objects)
        assert done is not None
    else:
        spmd.seed(0, invariant=True)
        done = 0
    for k in range(done, done + steps):
        rows = [torch.cat(each).chunk(world)[rank] for each in zip(part(0, k), part(1, k), strict=True)]
        run.step(run.model, run.optimizers, *rows)
    spmd.save(folder, step=done + steps, **run.objects)
    return run.state()


def test_a_run_goes_on_with_other_numbers_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks.run(1, elsewhere, tmp_path / "one", 3)[0]
    for world in (3, 1, 2):
        got = ranks.run(world, elsewhere, tmp_path / "several", 1)[0]
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


def by_torch(rank: int, world: int, layout: str, trains: bool, folder: Path) -> list[str]:
    """What differs after torch's own ways to save: gathered on rank 0, by DCP, and of whole tensors."""
    run, other = run_in(rank, layout, "Adam", 0, trains), Run(layout, "Adam", seed=1, on_meta=True)
    model, wrong = run.model, list[str]()
    expected = {name: whole(value) for name, value in model.state_dict().items()}
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    wrong += unequal(expected if rank == 0 else {}, full)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder / "dcp")
    torch.save(spmd.state_dict(model), folder / f"{rank}.pt")
    by_dcp = get_model_state_dict(other.model)
    dcp.load({"model": by_dcp}, checkpoint_id=folder / "dcp")
    for state_dict in (by_dcp, torch.load(folder / f"{rank}.pt")):
        other.model.load_state_dict(state_dict)
        wrong += unequal(expected, {name: whole(value) for name, value in other.model.state_dict().items()})
    return wrong


@pytest.mark.parametrize(
    "layout, world, trains",
    [
        ("fully_shard", 2, True),
        *((*place, False) for place in (("replicate", 2), ("hybrid", 4), ("tensor parallel", 4), ("annotated", 3))),
        *(pytest.param(*place, True, marks=pytest.mark.exhaustive) for place in USUAL if place != PLAIN),
    ],
)
def test_torch_saves_compiled_models_too(ranks: Ranks, layout: str, world: int, trains: bool, tmp_path: Path) -> None:
    assert ranks.run(world, by_torch, layout, trains, tmp_path) == [[]] * world


class Counted:
    """A slice of a safetensors file that notes how many bytes are read."""

    def __init__(self, slice: Any, read: list[int]) -> None:
        self.slice, self.read = slice, read
        self.get_shape, self.get_dtype = slice.get_shape, slice.get_dtype

    def __getitem__(self, key: Any) -> torch.Tensor:
        found: torch.Tensor = self.slice[key]
        self.read.append(found.nbytes)
        return found


def bytes_read(rank: int, world: int, layout: str, folder: Path) -> tuple[int, int]:
    """How many bytes of tensors this rank reads of a checkpoint, and has of its shards."""
    run, read = Run(layout, on_meta=True), list[int]()
    run.update()
    if not folder.exists():
        spmd.save(folder, **run.objects)

    @contextmanager
    def opened(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with safe_open(*args, **kwargs) as file:
            sliced = lambda name: Counted(file.get_slice(name), read)  # noqa: E731
            yield SimpleNamespace(keys=file.keys, metadata=file.metadata, get_slice=sliced)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(safetensors, "safe_open", opened)
        spmd.load(folder, **run.objects)
    tensors = [*run.model.state_dict(keep_vars=True).values()]
    tensors += [each for o in run.optimizers for entries in o.state.values() for each in entries.values()]
    shards = {id(each): each.to_local() if isinstance(each, DTensor) else each for each in tensors if each.ndim}
    return sum(read), sum(each.nbytes for each in shards.values())


def test_each_rank_reads_its_own_bytes(ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks what they wrote; then three, in the same layout, and four, in another one, what these two wrote."""
    found = {}
    for layout, world in (("fully_shard", 2), ("fully_shard", 3), ("tensor parallel", 4)):
        found[world] = ranks.run(world, bytes_read, layout, tmp_path / "two")
    assert all(read == own for each in found.values() for read, own in each), found
    assert max(read for read, _ in found[3]) < min(read for read, _ in found[2]), found


def rounded(rank: int, world: int, folder: Path) -> dict[str, torch.Tensor]:
    """Exact parameters of a run whose ranks hold them rounded, once that has trained and was saved in each way."""
    run = Run("rounded", "SGD")
    run.train(rank, 0, 3)
    assert torch.equal(run.model.up.weight, run.model.up.weight.bfloat16().double())
    spmd.save(folder / "all", **run.objects)
    spmd.export(folder / "exported", run.model)
    spmd.export(folder / "some", run.model, only="*bias")
    spmd.load(folder / "some", model=run.model, strict=False)  # all others stay exact
    exact, parts = spmd.state_dict(run.model), spmd.state_dict(run.model, full=False)
    assert unequal(exact, {name: whole(each) for name, each in parts.items()}) == []
    return exact


def read(rank: int, world: int, layout: str, folder: Path) -> list[dict[str, torch.Tensor]]:
    """The parameters that a run of another layout has after loading these: exact, whether it has trained or not."""
    fresh, trained = Run(layout, "SGD", seed=1), Run(layout, "SGD", seed=2)
    if layout != "plain":
        trained.train(rank, 0, 1)
    spmd.load(folder / "all", model=fresh.model)
    spmd.load(folder / "exported", model=trained.model, strict=False)
    return [spmd.state_dict(fresh.model), spmd.state_dict(trained.model)]


def test_what_ranks_hold_rounded_is_saved_exactly(ranks: Ranks, tmp_path: Path) -> None:
    """By two ranks, and read by one without a process group, and by three, of which each holds what the others send."""
    expected = ranks.run(2, rounded, tmp_path)
    assert unequal(expected[0], expected[1]) == []
    assert not torch.equal(expected[0]["up.weight"], expected[0]["up.weight"].bfloat16().double())
    for layout, world in (PLAIN, ("rounded", 3)):
        got = ranks.run(world, read, layout, tmp_path, process_group=layout != "plain")
        assert [unequal(expected[0], each) for of_rank in got for each in of_rank] == [[]] * 2 * world


def many(rank: int, world: int, folder: Path) -> bool:
    """Whether thousands of tensors come back where a process may open few files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, limits[1]), limits[1]))
    try:
        parts, mesh = [torch.full((2,), k + rank / 2) for k in range(1200)], spmd.world()
        state = [DTensor.from_local(part, mesh, [Shard(0)], run_check=False) for part in parts]
        spmd.save(folder, state=state)
        for part in parts:
            part.zero_()
        spmd.load(folder, state=state)
        return all(each.to_local().tolist() == [k + rank / 2] * 2 for k, each in enumerate(state))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_thousands_of_tensors_need_few_open_files(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, many, tmp_path) == [True, True]
