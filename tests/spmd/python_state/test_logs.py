"""Logs: what a step appends to lists and writes to dicts, and does not read, is there after each call as in eager."""

from __future__ import annotations

import gc
import io
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import spmd
from tests.harness.oracle import random_generator
from tests.harness.pool import Ranks

FLOAT = torch.float64
HISTORY: list[Any] = []


@dataclass
class Logger:
    """Keeps what it is given, in the ways that loggers do."""

    rows: list[Any] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    window: deque[Any] = field(default_factory=lambda: deque(maxlen=2))

    def log(self, name: str, value: Any) -> None:
        self.rows.append((name, value))
        self.last[name] = value
        self.window.append(value)


class Trainer:
    """Has a model with a list of its own, lists and dicts, a counter and a logger."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3).double()
        self.model.seen = []
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.losses: list[Any] = []
        self.history: dict[str, Any] = {"loss": [], "steps": 0}
        self.logger, self.steps, self.loss = Logger(), 0, None

    def kept(self) -> dict[str, Any]:
        """All that is logged, and the numbers of the model."""
        logger = (self.logger.rows, self.logger.last, list(self.logger.window))
        own = {"losses": self.losses, "history": self.history, "loss": self.loss, "steps": self.steps}
        return {**own, "logger": logger, "seen": self.model.seen, "global": list(HISTORY), "model": list(self.state())}

    def state(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.model.parameters()]


Log = Callable[[Trainer, Tensor, Tensor], Any]


def appends(trainer: Trainer, x: Tensor, loss: Tensor) -> None:
    trainer.losses.append(loss)
    trainer.losses += [loss.detach() * 2, "text"]
    trainer.losses.extend((x.sum(1), 3))


def nests(trainer: Trainer, x: Tensor, loss: Tensor) -> None:
    entry: dict[str, Any] = {"n": 3, "loss": loss}
    trainer.history["loss"].append((entry, [loss.detach()]))
    entry["rows"] = x.sum(1)  # after it was appended
    HISTORY.append(entry)


def writes_entries(trainer: Trainer, x: Tensor, loss: Tensor) -> None:
    trainer.history["last"] = loss
    trainer.history.update(rows=x.sum(1).detach(), text="now")
    trainer.loss = loss
    trainer.model.seen.append(loss)


def calls_a_logger(trainer: Trainer, x: Tensor, loss: Tensor) -> None:
    trainer.logger.log("loss", loss)
    trainer.logger.log("norm", trainer.model.weight.norm().item())


def counts(trainer: Trainer, x: Tensor, loss: Tensor) -> None:
    trainer.steps += 1
    trainer.losses.append((trainer.steps, loss.detach()))
    trainer.history[trainer.steps] = loss.detach()


def reads_its_own(trainer: Trainer, x: Tensor, loss: Tensor) -> Tensor:
    trainer.history["now"] = loss.detach() * 2
    trainer.losses.append(loss.detach())
    return trainer.history["now"] + trainer.losses[-1]


LOGS: list[Log] = [appends, nests, writes_entries, calls_a_logger, counts, reads_its_own]


def run(log: Log, decorate: Callable[[Any], Any], batches: list[Tensor]) -> tuple[list[Any], Any]:
    """What is kept after each call, and the step."""
    HISTORY.clear()
    trainer, found = Trainer(), []

    def step(x: Tensor) -> Any:
        loss = trainer.model(x).square().mean()
        loss.backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return loss, log(trainer, x, loss)

    made = decorate(step)
    for k, x in enumerate(batches):
        made(x)
        found.append(tree_flatten(trainer.kept()))
        if k == 2:  # as a loop does at the start of an epoch
            trainer.losses, trainer.history["loss"] = [], []
    return found, made


def assert_equal(got: list[Any], want: list[Any], rank: int = 0, world: int = 1) -> None:
    for (leaves, spec), (expected, expected_spec) in zip(got, want, strict=True):
        assert spec == expected_spec
        for have, value in zip(leaves, expected, strict=True):
            assert type(have) is type(value)
            if not isinstance(value, Tensor):
                assert have == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value)
                continue
            assert not have.requires_grad and have.grad_fn is None
            value = value.chunk(world)[rank] if value.ndim and value.shape != have.shape else value
            torch.testing.assert_close(have, value.detach(), rtol=1e-9, atol=1e-10)


def part(rank: int, k: int) -> Tensor:
    return torch.randn(4, 4, generator=random_generator(rank, k), dtype=FLOAT) + rank


def logs_of(rank: int, world: int, name: str, style: str) -> int:
    """Compare with the plain step on the whole batch; returns the number of programs."""
    log = next(each for each in LOGS if each.__name__ == name)
    whole = [torch.cat([part(r, k) for r in range(world)]) for k in range(5)]
    want, _ = run(log, lambda step: step, whole)
    mode = spmd.DataParallel(style)
    got, step = run(log, lambda step: spmd.compile(step, parallel_mode=mode), [part(rank, k) for k in range(5)])
    for (leaves, _), (expected, _) in zip(got, want, strict=True):
        count = len(leaves) - 2 if style == "fully_shard" else len(leaves)  # parameters are split
        del leaves[count:], expected[count:]
    assert_equal(got, want, rank, world)
    return len(step.programs)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("log", LOGS)
def test_logs_are_those_of_the_plain_step(log: Log) -> None:
    assert logs_of(0, 1, log.__name__, "replicate") == 1


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_each_rank_logs_what_results_are(ranks: Ranks, style: str) -> None:
    assert ranks.run(2, logs_of, "nests", style) == [1, 1]


@pytest.mark.usefixtures("alone")
def test_prints_show_the_values_of_each_call(capsys: pytest.CaptureFixture[str]) -> None:
    def prints(trainer: Trainer, x: Tensor, loss: Tensor) -> None:
        trainer.steps += 1
        print("step", trainer.steps, loss.detach(), {"item": loss.item()}, sep=" | ")

    batches = [part(0, k) for k in range(3)]
    texts = []
    for decorate in (lambda step: step, spmd.compile):
        _, step = run(prints, decorate, batches)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].count("tensor(") == 3 and len(step.programs) == 1


def log_with_logging(trainer: Trainer, x: Tensor, loss: Tensor) -> None:
    trainer.steps += 1
    TRAIN.info("step %d: %s, %.6f", trainer.steps, loss.detach(), loss.item())
    TRAIN.debug("sum %s", x.sum())
    logging.getLogger("train.other").warning("100%")
    TRAIN.log(logging.ERROR, {"loss": loss.detach()}, extra={"steps": trainer.steps})


TRAIN = logging.getLogger("train")


@pytest.mark.usefixtures("alone")
def test_logging_shows_the_values_of_each_call_at_its_line(caplog: pytest.LogCaptureFixture) -> None:
    """Also a level that was off when the step was compiled."""
    batches, found = [part(0, k) for k in range(3)], []
    for decorate in (lambda step: step, spmd.compile):
        records: list[Any] = []
        for batch in (batches[:1], batches):
            caplog.clear()
            caplog.set_level(logging.INFO if len(batch) == 1 else logging.DEBUG, logger="train")
            run(log_with_logging, decorate, batch)
            records += caplog.records
        found.append([(r.getMessage(), r.name, r.levelno, r.lineno, r.pathname, r.funcName) for r in records])
        assert [r.steps for r in records if hasattr(r, "steps")] == [1, 1, 2, 3]
    assert len(found[1]) == 3 + 3 * 4 and found[0] == found[1]


@pytest.mark.usefixtures("alone")
def test_a_level_is_looked_at_in_each_call(caplog: pytest.LogCaptureFixture) -> None:
    @spmd.compile
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss = trained(model, optimizer, x)
        TRAIN.debug("loss %s", loss.item())
        return loss

    given, counts = objects(), []
    for level in (logging.INFO, logging.DEBUG, logging.INFO, logging.DEBUG):
        caplog.clear()
        caplog.set_level(level, logger="train")
        step(*given)
        counts.append(len([record for record in caplog.records if record.name == "train"]))
    assert counts == [0, 1, 0, 1] and len(step.programs) == 1


def logs_at_levels(rank: int, world: int) -> list[int]:
    """Only the first rank shows what it logs."""
    TRAIN.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    shown: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())  # type: ignore[method-assign]
    TRAIN.addHandler(handler)

    def shows(trainer: Trainer, x: Tensor, loss: Tensor) -> None:
        TRAIN.info("loss %s, norm %s", loss, trainer.model.weight.norm())

    try:
        run(shows, spmd.compile, [part(rank, k) for k in range(3)])
    finally:
        TRAIN.removeHandler(handler)
        TRAIN.setLevel(logging.NOTSET)
    return [len(shown), len(set(shown))]


def test_ranks_may_log_at_other_levels(ranks: Ranks) -> None:
    assert ranks.run(2, logs_at_levels) == [[3, 3], [0, 0]]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("text", [lambda loss: f"{loss}", lambda loss: f"{loss.item():.3f}", str, "%s".__mod__])
def test_text_of_a_value_is_refused_with_its_line(text: Callable[[Tensor], str]) -> None:
    def formats(trainer: Trainer, x: Tensor, loss: Tensor) -> None:
        trainer.losses.append(text(loss))

    with pytest.raises(spmd.CaptureError, match=r"(?s)formats the value of a tensor.*prints the value.*test_logs\.py"):
        run(formats, spmd.compile, [part(0, 0)])


def logs_on_one_rank(rank: int, world: int) -> list[int]:
    """Only the first rank keeps and prints the loss, which the step returns."""

    def first_only(trainer: Trainer, x: Tensor, loss: Tensor) -> None:
        if rank == 0:
            trainer.losses.append(loss)
            print("loss", loss)

    found, step = run(first_only, spmd.compile, [part(rank, k) for k in range(3)])
    return [len(step.programs), len(found[1][0])]


def test_one_rank_alone_may_log_what_all_return(ranks: Ranks) -> None:
    (one, kept), (other, none) = ranks.run(2, logs_on_one_rank)
    assert (one, other) == (1, 1) and kept == none + 2


def step_with_logs(model: nn.Module, optimizer: Any, x: Tensor, history: list[Any], *, logs: dict[str, Any]) -> Tensor:
    """Takes its logs as arguments."""
    loss: Tensor = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    history.append({"loss": loss, "rows": x.sum(1)})
    logs["loss"] = loss.item()
    return loss


def logs_in_arguments(rank: int, world: int) -> int:
    """Compare logs that are arguments with those of the plain step on the whole batch."""
    kept = []
    compiled = spmd.compile(step_with_logs)
    for step, ranks_of_part in ((step_with_logs, range(world)), (compiled, [rank])):
        trainer, history, logs, found = Trainer(), list[Any](["start"]), dict[str, Any](), []
        for k in range(4):
            x = torch.cat([part(r, k) for r in ranks_of_part])
            step(trainer.model, trainer.optimizer, x, history, logs=logs)
            found.append(tree_flatten((history, logs)))
        kept.append(found)
    assert_equal(kept[1], kept[0], rank, world)
    return len(compiled.programs)


def test_logs_may_be_arguments(ranks: Ranks) -> None:
    assert ranks.run(2, logs_in_arguments) == [1, 1]


@pytest.mark.usefixtures("alone")
def test_an_argument_that_the_step_writes_and_reads_is_no_log() -> None:
    def step(model: nn.Module, batch: dict[str, Tensor], seen: list[Tensor]) -> Tensor:
        batch["twice"] = batch["x"] * 2
        seen.append(batch["twice"].sum())
        return model(batch["twice"]).sum() + len(seen)

    model, ends = nn.Linear(4, 3).double(), []
    for each in (step, spmd.compile(step)):
        batches = [{"x": part(0, k)} for k in range(2)]
        seen: list[Tensor] = []
        ends.append([[each(model, batch, seen).detach() for batch in batches], batches, seen])
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-9, atol=1e-10)


def trained(model: Any, optimizer: Any, x: Any) -> Any:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def objects() -> tuple[Any, Any, Any]:
    model = torch.nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 3)


@pytest.mark.usefixtures("alone")
def test_what_is_printed_is_what_it_was_then(capsys: pytest.CaptureFixture[str]) -> None:
    """A list shows the entries that it had; a tensor that changes later is refused."""

    @spmd.compile
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        numbers = [1]
        print(numbers)
        numbers.append(2)
        print(numbers)
        return trained(model, optimizer, x)

    @spmd.compile
    def sums(model: Any, optimizer: Any, x: Any) -> Any:
        total = torch.zeros(())
        print("total", total)
        total += x.sum()
        return trained(model, optimizer, x) + total

    given = objects()
    step(*given)
    capsys.readouterr()
    step(*given)
    assert capsys.readouterr().out == "[1]\n[1, 2]\n"
    with pytest.raises(spmd.CaptureError, match=r"print or log a clone\n.*print\("):
        sums(*given)


@pytest.mark.usefixtures("alone")
def test_prints_of_other_threads_are_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    given, done = objects(), threading.Event()

    def beat() -> None:
        while not done.wait(0.01):
            print("beat")

    thread = threading.Thread(target=beat)
    thread.start()
    step = spmd.compile(trained)
    step(*given)
    done.set()
    thread.join()
    assert "beat" in capsys.readouterr().out
    step(*given)
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("alone")
def test_clocks_are_refused() -> None:
    @spmd.compile
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        start = time.perf_counter()
        return trained(model, optimizer, x), time.perf_counter() - start

    @spmd.compile
    def by_its_name(model: Any, optimizer: Any, x: Any) -> Any:
        return trained(model, optimizer, x), monotonic()

    for each, name in ((step, "perf_counter"), (by_its_name, "monotonic")):
        with pytest.raises(spmd.CaptureError, match=rf"asks time.{name}\(\)"):
            each(*objects())
    assert monotonic is time.monotonic


@pytest.mark.usefixtures("alone")
def test_a_progress_bar_in_the_step_is_named_by_the_users_line() -> None:
    tqdm = pytest.importorskip("tqdm").tqdm

    @spmd.compile
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        for part in tqdm(x.chunk(2), disable=False, file=io.StringIO()):
            loss = trained(model, optimizer, part)
        return loss

    line = r"test_logs.py:\d+: for part in tqdm\(x.chunk\(2\), disable=False, file=io.StringIO\(\)\):"
    with pytest.raises(
        spmd.CaptureError, match=rf"progress bars, outside of the step\n    {line}\n    called std.py:\d+"
    ):
        step(*objects())


class Monitor:
    """Measures how long the garbage collector takes, as monitors of training do."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def note(self, phase: str, info: dict[str, int]) -> None:
        self.seconds.append(time.perf_counter() if phase == "start" else time.perf_counter() - self.seconds.pop())


@pytest.mark.usefixtures("alone")
def test_callbacks_of_the_garbage_collector_may_ask_them(monkeypatch: pytest.MonkeyPatch) -> None:
    @spmd.compile
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        gc.collect()
        return trained(model, optimizer, x)

    monitor, failures = Monitor(), list[Any]()
    monkeypatch.setattr(sys, "unraisablehook", failures.append)
    note = monitor.note
    gc.callbacks.append(note)
    try:
        step(*objects())
    finally:
        gc.callbacks.remove(note)
    assert failures == [] and monitor.seconds


@pytest.mark.usefixtures("alone")
def test_a_clock_that_a_test_has_put_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def frozen() -> float:
        return 1.0

    monkeypatch.setattr(time, "perf_counter", frozen)
    spmd.compile(trained)(*objects())
    assert time.perf_counter is frozen


GLOBAL_LOGS: dict[str, Any] = {}


@pytest.mark.usefixtures("alone")
def test_a_refused_step_leaves_logs_as_they_were() -> None:
    """The step reads the outer dict, and so may change what it holds."""
    GLOBAL_LOGS.update(losses=[], counts={"k": 0})

    @spmd.compile
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss = trained(model, optimizer, x)
        GLOBAL_LOGS["losses"].append(loss)
        GLOBAL_LOGS["counts"]["k"] += 1
        GLOBAL_LOGS["last"] = loss
        return loss

    with suppress(spmd.CaptureError):
        step(*objects())
        return  # supported after all
    assert GLOBAL_LOGS == {"losses": [], "counts": {"k": 0}}
