"""Calls whose arguments differ in sizes alone: one capture serves them all, with the numbers of the plain step."""

from __future__ import annotations

import copy
import gc
import math
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import spmd
from spmd import capture_call
from spmd.cache import compile_cache
from spmd.running import kept_programs
from tests.harness.pool import Ranks

pytestmark = pytest.mark.usefixtures("alone")

WORDS, WIDTH = 17, 8

# There a shape function gives float32 to the logarithms that attention on float64 leaves for backward, so that parts of
# unequal length are copied into memory of the wrong dtype, and backward raises.
not_on_2_11 = pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="unequal parts of attention in float64")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, time, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, time, 3, 2, -1).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        x = x + heads.transpose(1, 2).reshape(rows, time, WIDTH)
        return x + self.down(F.gelu(self.up(x)))


class Tagger(nn.Module):
    """Attention over padded text, if wanted, a mean over the words of each row, and positions that are computed."""

    def __init__(self, attends: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.block = Block() if attends else None

    def forward(self, text: Tensor, mask: Tensor) -> Tensor:
        positions = torch.arange(text.shape[1], dtype=torch.float64) / text.shape[1]
        x = self.embed(text) + positions[:, None]
        x = x if self.block is None else self.block(x, mask)
        mean = (x * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
        return self.head(x + mean)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    scores = model(text, labels >= 0)
    loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-1)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss, scores.detach()


def batch(rows: int, time: int, seed: int) -> tuple[Tensor, Tensor]:
    """Text padded by -1 labels: each row has another number of words."""
    draw = torch.Generator().manual_seed(seed)
    text, labels = torch.randint(WORDS, (2, rows, time), generator=draw)
    lengths = torch.randint(1, time + 1, (rows, 1), generator=draw)
    return text, labels.where(torch.arange(time) < lengths, -1)


@contextmanager
def counted_captures() -> Iterator[list[Any]]:
    """The sizes that each trace leaves open; those of the call are known."""
    traced: list[Any] = []
    original = capture_call.capture

    def counting(*args: Any) -> Any:
        traced.append(args[-1])
        return original(*args)

    capture_call.capture = counting
    try:
        yield traced
    finally:
        capture_call.capture = original


def train(
    rank: int,
    world: int,
    options: dict[str, Any],
    sizes: list[tuple[tuple[int, ...], int]],
    kind: str,
    attends: bool = True,
) -> tuple[int, int]:
    """Compare with the plain step on the whole batch; returns how often the step was traced, and the programs."""
    torch.manual_seed(0)
    model = Tagger(attends).double()
    plain = copy.deepcopy(model)
    settings = {"lr": 0.1, "momentum": 0.9} if kind == "SGD" else {"lr": 0.01}
    optimizer, its = (getattr(torch.optim, kind)(each.parameters(), **settings) for each in (model, plain))
    if "mesh" in options:
        mesh = init_device_mesh("cpu", options["mesh"], mesh_dim_names=("dp", "tp"))
        tensor_parallel = {
            "*.up.weight": {"tp": Shard(0)},
            "*.up.bias": {"tp": Shard(0)},
            "*.down.weight": {"tp": Shard(1)},
        }
        mode: spmd.ParallelMode = spmd.DTensorExpand(mesh=mesh, params=tensor_parallel)
    else:
        mode = spmd.DataParallel(**options)
    compiled = spmd.compile(step, parallel_mode=mode)
    place = rank // 2 if "mesh" in options else rank
    with counted_captures() as traced:
        for k, (rows, time) in enumerate(sizes):
            text, labels = batch(sum(rows), time, k)
            own = [each.split(list(rows))[place] for each in (text, labels)]
            loss, scores = compiled(model, optimizer, *own)
            expected_loss, expected = step(plain, its, text, labels)
            torch.testing.assert_close(loss, expected_loss, rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(scores, expected.split(list(rows))[place], rtol=1e-9, atol=1e-10)
    with spmd.unshard(model):
        for (name, ours), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(
                ours, theirs, rtol=1e-8, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
            )
    return len(traced), len(compiled.programs)


@pytest.fixture(scope="module")
def new_ranks() -> Iterator[Ranks]:
    """Ranks of these tests alone: where earlier jobs have left one of them other than the rest, each captures."""
    pool = Ranks()
    yield pool
    pool.close()


def random_sizes(count: int, *rows: tuple[int, ...], seed: int = 0) -> list[tuple[tuple[int, ...], int]]:
    """So many different lengths, each with the next of ``rows``."""
    lengths = random.Random(seed).sample(range(2, 40), count)
    return [(rows[k % len(rows)], length) for k, length in enumerate(lengths)]


@pytest.mark.processes
@pytest.mark.parametrize("world, options, kind, rows, traces, count", [
    (2, {"parallel_style": "replicate"}, "SGD", [(2, 2)], 2, 3),
    pytest.param(
        2, {"parallel_style": "fully_shard"}, "AdamW", [(2, 2), (3, 1), (1, 2), (4, 4)], 3, 5,
        marks=[not_on_2_11, pytest.mark.exhaustive],
    ),
    pytest.param(
        3, {"parallel_style": "fully_shard"}, "SGD", [(1, 1, 1), (2, 0, 1)], 2, 3, marks=pytest.mark.exhaustive
    ),
    (2, {"mesh": (1, 2)}, "SGD", [(4,)], 2, 3),
    pytest.param(4, {"mesh": (2, 2)}, "SGD", [(2, 2)], 2, 3, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_random_lengths_are_exact(
    new_ranks: Ranks,
    request: pytest.FixtureRequest,
    world: int,
    options: dict[str, Any],
    kind: str,
    rows: list[tuple[int, ...]],
    traces: int,
    count: int,
) -> None:
    """One trace for the first length, one for all that follow; and one where rows change later than the length.

    Where ranks bring equally many rows, the first one traces for all.
    """
    count = 12 if request.config.getoption("--exhaustive") else count
    first, *others = new_ranks.run(world, train, options, random_sizes(count, *rows), kind)
    assert first == (traces, count)
    assert {programs for _, programs in others} == {count} and all(traced < traces for traced, _ in others)


@not_on_2_11
@pytest.mark.processes
def test_ranks_bring_unequal_rows_of_a_length_that_is_new(new_ranks: Ranks) -> None:
    sizes = [((2, 2), 5), ((2, 2), 9), ((4, 1), 12), ((0, 3), 7)]
    (first, _), (other, _) = new_ranks.run(2, train, {"parallel_style": "fully_shard"}, sizes, "SGD", False)
    assert (first, other) == (3, 1), "the last trace is that of unequal rows, which each rank captures for itself"


def prepared() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tagger(attends=False).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.slow
def test_named_sizes_are_open_from_the_first_call_on() -> None:
    """The second trace is the witness: the step at another size, which the first has to equal there."""
    compiled = spmd.compile(step, dynamic={"text": {1: "time"}, "labels": {-1: "time"}})
    objects = prepared()
    with counted_captures() as traced:
        for k, time in enumerate((5, 9, 3)):
            compiled(*objects, *batch(4, time, k))
    assert [each.are_symbolic for each in traced] == [True, False]
    (size,) = traced[0].sizes
    assert (size.name, size.dims) == ("time", (("text", 1), ("labels", 1)))


@pytest.mark.slow
def test_a_length_of_one_and_one_that_was_seen() -> None:
    """What is 1 broadcasts, so it is traced by itself."""
    compiled, objects = spmd.compile(step), prepared()
    with counted_captures() as traced:
        for k, time in enumerate((5, 7, 1, 6, 5, 1)):
            compiled(*objects, *batch(4, time, k))
    assert len(traced) == 3 and len(compiled.programs) == 4


def scaled(x: Tensor) -> Tensor:
    """Sees whether a size is a number."""
    return x.sum() * (2 if isinstance(x.shape[0], int) else 3)


def knows(x: Tensor) -> tuple[Tensor, bool]:
    """Returns what it sees, and computes nothing else from it."""
    return x.sum() * 2, isinstance(x.shape[0], int)


@pytest.mark.parametrize("step", [scaled, lambda x: knows(x)[0] * knows(x)[1], knows])
def test_code_that_sees_a_symbol_is_traced_for_each_size(step: Callable[[Tensor], Any]) -> None:
    compiled = spmd.compile(step)
    for size in (4, 6, 8, 6):
        assert compiled(torch.ones(size)) == step(torch.ones(size))
    assert len(compiled.programs) == 3


def test_a_step_that_needs_a_size_names_its_line_once_it_costs() -> None:
    def looping(x: Tensor) -> Tensor:
        total = x[:, 0]
        for k in range(1, x.shape[1]):
            total = total * 0.5 + x[:, k]
        return total.sum()

    compiled = spmd.compile(looping)
    for time in (3, 5):
        x = torch.randn(4, time, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), looping(x))
    (note,) = [note for note in compiled.report().notes if "each size" in note]
    assert note.startswith("looping compiles a program for each size of dim 1 of x: it depends on the size at ")
    assert "for k in range(1, x.shape[1]):" in note
    with pytest.warns(UserWarning, match=r"size of dim 1 of x: .* Pad to one of a few lengths"):
        compiled(torch.randn(4, 7, dtype=torch.float64))


def test_sizes_that_a_step_needs_at_one_line_are_warned_of_once() -> None:
    def looping(x: Tensor, y: Tensor) -> Tensor:
        return sum((x[:, k] * y[:, k] for k in range(len(x[0]))), torch.zeros(4)).sum()

    compiled = spmd.compile(looping)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for time in (3, 5, 7):
            compiled(torch.randn(4, time), torch.randn(4, time))
    (warning,) = [str(each.message) for each in caught if "each size" in str(each.message)]
    assert "each size of dim 1 of x, dim 1 of y: it depends on the size at " in warning


def test_padding_and_slices_of_all_there_is_serve_any_size() -> None:
    def shifted(model: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
        """How transformers computes the loss of a language model."""
        scores = model(x[..., None])[:, slice(0, None), :]
        targets = F.pad(y, (0, 1), value=-100)[..., 1:].contiguous()
        loss = F.cross_entropy(scores.view(-1, 3), targets.view(-1))
        return torch.autograd.grad(loss, model.weight)[0]

    compiled = spmd.compile(shifted)
    model = nn.Linear(1, 3).double()
    with counted_captures() as traced:
        for time in (5, 7, 4, 9):
            x, y = torch.randn(4, time, dtype=torch.float64), torch.randint(3, (4, time))
            torch.testing.assert_close(compiled(model, x, y), shifted(model, x, y))
    assert len(traced) == 2


def test_what_changes_beside_a_size_is_traced_anew() -> None:
    class Scaled(nn.Module):
        factor = 2

        def forward(self, x: Tensor) -> Tensor:
            return x.sum() * self.factor

    model = Scaled()
    compiled = spmd.compile(lambda model, x: model(x))
    for size in (4, 6):
        assert compiled(model, torch.ones(size)) == 2 * size
    Scaled.factor = 3
    assert compiled(model, torch.ones(9)) == 27  # served by a capture only if guards look at the class
    assert compiled(model, torch.ones(7)) == 21


def test_a_condition_on_a_size_is_kept() -> None:
    def halves(x: Tensor) -> Tensor:
        return x.sum() if x.shape[0] % 2 == 0 else 10 * x.sum()

    compiled = spmd.compile(halves)
    assert [float(compiled(torch.ones(size))) for size in (4, 6, 7, 9, 8, 11)] == [4, 6, 70, 90, 8, 110]


def test_sizes_in_results_and_python_state_are_those_of_the_call() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.last, self.log = 0, []

        @spmd.compile
        def step(self, x: Tensor) -> tuple[Tensor, int]:
            self.last = x.shape[1] * 2
            self.log.append(x.shape[1] + 1)
            return x.sum(1) / x.shape[1], x.shape[1]

    trainer = Trainer()
    with counted_captures() as traced:
        _check_sizes(trainer)
    assert len(traced) == 2


def _check_sizes(trainer: Any) -> None:
    for time in (3, 5, 6, 4):
        mean, size = trainer.step(torch.full((4, time), 2.0))
        assert (size, trainer.last, trainer.log[-1]) == (time, 2 * time, time + 1)
        assert torch.equal(mean, torch.full((4,), 2.0))
    assert [type(each) for each in trainer.log] == [int] * 4


def test_an_argument_may_lose_a_dim_that_has_changed() -> None:
    compiled = spmd.compile(lambda x: x.sum(-1))
    for shape in ((4, 3, 2), (4, 3, 5), (4, 3), (4, 6), (4, 3, 7), (4,)):
        assert torch.equal(compiled(torch.ones(shape)), torch.full(shape[:-1], float(shape[-1])))


def lopsided(rank: int, world: int, sizes: list[tuple[tuple[int, ...], int]]) -> tuple[int, int]:
    """Train where each rank captures for itself, and the second for no other size; returns what ``train`` does."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compile_cache, "_LEAST_TIMEOUT", math.inf)
        if rank:
            patched.setattr(capture_call, "capture_any_size", lambda *_: (None, {}))
        return train(rank, world, {"parallel_style": "replicate"}, sizes, "SGD", attends=False)


def test_all_ranks_keep_a_trace_for_other_sizes_or_none(ranks: Ranks) -> None:
    """The first rank traces each length for all, in vain; both have a program for each."""
    (traced, programs), other = ranks.run(2, lopsided, [((2, 2), 5), ((2, 2), 7), ((2, 2), 6)])
    assert (traced, programs) == (3, 3) and other == (3, 3)


def test_programs_of_one_capture_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_programs, "_MOST_NODES", 8)  # of 3 in each program
    compiled = spmd.compile(lambda x: x.sum())
    with counted_captures() as traced:
        for size in (2, 3, 4, 5, 6, 3):
            assert compiled(torch.ones(size)) == size
    assert len(compiled.programs) == 3 and len(traced) == 2  # that of the first size by itself counts for none


@pytest.mark.usefixtures("alone")
def test_many_sizes_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_programs, "_MANY", 3)
    step = spmd.compile(lambda x: x * 2)
    with pytest.warns(UserWarning, match=r"compiled 3 programs that differ in sizes .*x: .*pad to a few") as found:
        for length in range(2, 9):
            step(torch.ones(length, 3))
    assert len(found) == 1


@pytest.mark.slow
def test_nothing_is_kept_of_a_model_that_is_gone() -> None:
    compiled, (model, optimizer) = spmd.compile(step), prepared()
    for time in (5, 7, 6):
        compiled(model, optimizer, *batch(4, time, 0))
    reference = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("dynamic, message", [
    ({"tokens": {1: "time"}}, "dynamic names 'tokens', but the tensor arguments of the step are ['text', 'labels']"),
    ({"text": {2: "time"}}, "dynamic names dim 2 of text, whose shape is [4, 5]"),
    ({"text": {0: "time", 1: "time"}}, "gives one name, 'time', to sizes that differ: dim 0 of text has 4, dim 1"),
])  # fmt: skip
def test_names_that_fit_no_size_are_refused(dynamic: dict[str, dict[int, str]], message: str) -> None:
    compiled = spmd.compile(step, dynamic=dynamic)
    with pytest.raises(spmd.CaptureError) as caught:
        compiled(*prepared(), *batch(4, 5, 0))
    assert message in str(caught.value)


@pytest.mark.parametrize("dynamic", [["text"], {"text": 1}, {"text": {"1": "time"}}, {"text": {1: 2}}])
def test_dynamic_is_checked_where_it_is_given(dynamic: Any) -> None:
    with pytest.raises(TypeError, match="expected dynamic to name sizes by argument and dim"):
        spmd.compile(step, dynamic=dynamic)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "noise": lambda x: x + torch.randn(x.shape[1]),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_have_the_shape_of_the_call(name: str) -> None:
    compiled = spmd.compile(DRAWS[name])
    shapes = [compiled(torch.ones(4, size)).shape for size in (3, 5, 7)]
    assert [tuple(shape) for shape in shapes] == [(4, 3), (4, 5), (4, 7)]
    assert [each.name for each in compiled.programs] == [f"<lambda>/program-{k}" for k in range(3)]
