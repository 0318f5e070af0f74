"""A save in the background is of the state at its call, whatever writes to that meanwhile; ranks end it together."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

import spmd
from spmd.checkpoints import background, storage
from spmd.state.background_reads import READS
from tests.harness.pool import RankError, Ranks

from .runs import PLAIN, USUAL, Run, unequal

SLOW = 0.15  # seconds before a file is written: a step of these models takes less
write, may_write = storage.save_file, threading.Event()


def slowly(tensors: dict[str, torch.Tensor], *args: Any) -> None:
    """Write what the tensors have when they should not have it any more."""
    may_write.wait(30)
    time.sleep(SLOW)
    write(tensors, *args)


@contextmanager
def held() -> Iterator[None]:
    """No file is written meanwhile, however long the machine takes for what stands here."""
    may_write.clear()
    try:
        yield
    finally:
        may_write.set()


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(storage, "save_file", slowly)
    may_write.set()
    yield
    READS.wait_for_all()


def addresses(run: Run) -> set[int]:
    tensors = [
        *run.model.parameters(),
        *(each for o in run.optimizers for s in o.state.values() for each in s.values()),
    ]
    return {(each.to_local() if isinstance(each, DTensor) else each).data_ptr() for each in tensors}


def trained_meanwhile(rank: int, world: int, layout: str, optimizer: str, folder: Path) -> list[str]:
    """What is wrong with a checkpoint after the steps that were made while it was written, and with their losses."""
    run = Run(layout, optimizer)
    run.train(rank, 0, 3)
    expected, places, read = run.state(), addresses(run), set[int]()

    def write_slowly(tensors: dict[str, torch.Tensor], *args: Any) -> None:
        read.update(tensor.data_ptr() for tensor in tensors.values())
        slowly(tensors, *args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(storage, "save_file", write_slowly)
        patched.setattr(storage, "_LEAST", 200)
        patched.setattr(storage, "_MOST", 200)
        programs = run.step.programs
        with held():
            handle = spmd.save(folder, wait=False, **run.objects)
            had_ended = handle.done()
        losses = run.train(rank, 3, 6)
        handle.wait()
    wrong = ["it had ended when the call returned"] * had_ended
    wrong += ["all was copied"] * (len(places & read) < 3)
    wrong += ["another program ran"] * (run.step.programs != programs)
    fresh = Run(layout, optimizer, seed=1)
    spmd.load(folder, **fresh.objects)
    wrong += unequal(expected, fresh.state())
    wrong += ["losses"] * (losses != fresh.train(rank, 3, 6))
    return wrong + unequal(run.state(), fresh.state())


@pytest.mark.parametrize("layout, world, optimizer", [
    ("fully_shard", 2, "Adam"),
    ("replicate", 2, "SGD"),
    pytest.param("shard_optimizer", 2, "Muon", marks=pytest.mark.exhaustive),
    *(
        pytest.param(*place, optimizer, marks=pytest.mark.exhaustive)
        for place, optimizer in zip(USUAL, cycle(("Adam", "Adafactor", "SGD", "Muon")), strict=False)
        if place != PLAIN
    ),
])  # fmt: skip
def test_steps_go_on_and_the_checkpoint_is_of_the_call(
    layout: str, world: int, optimizer: str, ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks.run(world, trained_meanwhile, layout, optimizer, tmp_path) == [[]] * world


def full(*args: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def cannot_write(rank: int, world: int, folder: Path) -> tuple[list[str], list[str]]:
    """The errors of a save that one rank cannot write, from its handle and the next save; and what then loads."""
    run = Run("fully_shard")
    run.train(rank, 0, 1)
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(storage, "save_file", full)
        handle = spmd.save(folder, step=1, wait=False, **run.objects)
        run.train(rank, 1, 2)
        expected = run.state()
        with pytest.raises(spmd.SpmdError) as raised:
            spmd.save(folder, step=2, wait=False, **run.objects)
    messages = [str(handle.error), str(raised.value)]
    spmd.save(folder, step=2, keep=1, wait=False, **run.objects)
    run.train(rank, 2, 3)
    assert spmd.load(folder, **run.objects) == 2  # which waits for the save
    return messages, unequal(expected, run.state())


def test_a_failure_is_known_to_all_ranks_and_raised_by_the_next_save(ranks: Ranks, tmp_path: Path) -> None:
    one, other = ranks.run(2, cannot_write, tmp_path)
    assert one == other == ([one[0][0], one[0][1]], [])
    why = f"saving {tmp_path}/step-1 failed: OSError: [Errno 28] No space left on device (on rank 1)"
    assert one[0] == [why, f"the save before this one failed: {why}"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def dies(rank: int, world: int, folder: Path) -> str:
    run = Run("replicate")
    run.train(rank, 0, 1)
    if rank == 1:
        storage.save_file = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    spmd.save(folder, wait=False, **run.objects).wait()
    return ""


def test_a_rank_that_dies_ends_the_save_on_all(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"exit code -9[^$]*RankFailedError: saving .* did not end: another rank"):
        ranks.run(2, dies, tmp_path)
    assert not (tmp_path / "checkpoint.json").exists()


def cannot_open_a_group(rank: int, world: int, folder: Path) -> float:
    """The seconds until a save raises on all ranks because one cannot open the group of the threads."""
    run, start = Run("replicate"), time.monotonic()
    run.train(rank, 0, 1)
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(background, "unregistered_gloo_group", full)
        with pytest.raises(spmd.RankFailedError if rank == 0 else OSError, match="No space left on device"):
            spmd.save(folder, wait=False, **run.objects)
    seconds = time.monotonic() - start
    spmd.save(folder, wait=False, **run.objects).wait()
    return seconds


def test_a_rank_that_cannot_open_the_group_is_named_at_once(ranks: Ranks, tmp_path: Path) -> None:
    assert max(ranks.run(2, cannot_open_a_group, tmp_path)) < 60


def make() -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @spmd.compile
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(2):
        step(model, optimizer, torch.ones(2, 3).double())
    return step, model, optimizer


def eager(step: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def other_backend(step: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def shrink(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)

    spmd.compile(shrink, backend=lambda gm, inputs: gm)(model)


def whole(step: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with spmd.unshard(model), torch.no_grad():
        model.weight.zero_()


WRITES: dict[str, Callable[..., Any]] = {
    "a step": lambda step, model, optimizer: step(model, optimizer, torch.ones(2, 3).double()),
    "a new program": lambda step, model, optimizer: step(model, optimizer, torch.ones(5, 3).double()),
    "an eager step": eager,
    "load_state_dict": lambda step, model, optimizer: model.load_state_dict(nn.Linear(3, 2).state_dict()),
    "another backend": other_backend,
    "unshard": whole,
    "other data": lambda step, model, optimizer: setattr(model.weight, "data", torch.zeros(2, 3).double()),
}


@pytest.mark.parametrize("what", WRITES)
def test_who_writes_waits(what: str, tmp_path: Path, alone: None) -> None:
    step, model, optimizer = make()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    handle = spmd.save(tmp_path, model=model, optimizer=optimizer, wait=False)
    WRITES[what](step, model, optimizer)
    assert any(not torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    handle.wait()
    assert not model._load_state_dict_pre_hooks and not _global_optimizer_pre_hooks
    _, model, optimizer = make()
    spmd.load(tmp_path, model=model, optimizer=optimizer)
    assert unequal(expected, dict(model.state_dict())) == []


@pytest.mark.parametrize("what", ["an eager step", "load_state_dict"])
def test_hooks_that_were_registered_after_ours_run(what: str, tmp_path: Path, alone: None) -> None:
    """torch goes through a dict of hooks: the save ends while it waits in ours, and must not change that dict."""
    step, model, optimizer = make()
    handle, seen = spmd.save(tmp_path, model=model, optimizer=optimizer, wait=False), []
    hooks = [
        model.register_load_state_dict_pre_hook(lambda *_: seen.append("load_state_dict")),
        register_optimizer_step_pre_hook(lambda *_: seen.append("an eager step")),
    ]
    try:
        WRITES[what](step, model, optimizer)
        assert seen == [what]
    finally:
        for hook in hooks:
            hook.remove()
    handle.wait()
    assert not model._load_state_dict_pre_hooks and not _global_optimizer_pre_hooks


def test_the_step_after_a_save_removes_its_hooks(tmp_path: Path, alone: None) -> None:
    step, model, optimizer = make()
    handle = spmd.save(tmp_path, model=model, optimizer=optimizer, wait=False)
    while not handle.done():
        time.sleep(0.01)
    assert model._load_state_dict_pre_hooks and _global_optimizer_pre_hooks
    WRITES["a step"](step, model, optimizer)
    assert not model._load_state_dict_pre_hooks and not _global_optimizer_pre_hooks


def test_a_write_that_does_not_wait_fails_the_save(tmp_path: Path, alone: None) -> None:
    _, model, optimizer = make()
    with held(), torch.no_grad():
        handle = spmd.save(tmp_path, model=model, optimizer=optimizer, wait=False)
        model.weight.add_(1)
    with pytest.raises(spmd.SpmdError, match=f"saving {tmp_path} failed: model.weight changed while it was saved"):
        handle.wait()
    assert not [*tmp_path.glob("data-*")]
    assert spmd.save(tmp_path, model=model, optimizer=optimizer).done()


def test_a_step_that_waits_hides_no_write_before_it(tmp_path: Path, alone: None, monkeypatch: Any) -> None:
    """Of several files, so that the thread still writes when the step has waited for the first."""
    monkeypatch.setattr(storage, "_LEAST", 1)
    monkeypatch.setattr(storage, "_MOST", 1)
    may_end, write_next = threading.Event(), storage.save_file

    def last_waits(tensors: dict[str, torch.Tensor], *args: Any) -> None:
        if next(files):
            may_end.wait(30)
        write_next(tensors, *args)

    files = iter(range(99))
    monkeypatch.setattr(storage, "save_file", last_waits)
    _, model, optimizer = make()
    with held(), torch.no_grad():
        handle = spmd.save(tmp_path, model=model, optimizer=optimizer, wait=False)
        model.weight.mul_(100)
    READS.wait(model.weight)  # as a step does before it writes
    assert not handle.done()
    may_end.set()
    with pytest.raises(spmd.SpmdError, match=r"model\.weight changed while it was saved"):
        handle.wait()


def test_an_interrupt_at_the_end_of_the_call_leaves_the_save_to_its_thread(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> None:
        start(*args)
        os.kill(os.getpid(), signal.SIGINT)

    start = background.start
    monkeypatch.setattr(background, "start", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            spmd.save(tmp_path, tensor=torch.ones(4), wait=False)
    finally:
        signal.signal(signal.SIGINT, before)
    tensor = torch.zeros(4)
    spmd.load(tmp_path, tensor=tensor)
    assert tensor.tolist() == [1] * 4


def test_a_model_can_be_copied_while_it_is_saved(tmp_path: Path, alone: None) -> None:
    _, model, optimizer = make()
    with held():
        handle = spmd.save(tmp_path, model=model, optimizer=optimizer, wait=False)
        copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert not handle.done()
    handle.wait()
    assert torch.equal(copied.weight, model.weight)
    copied.load_state_dict(model.state_dict())


def test_what_is_not_compiled_is_copied(tmp_path: Path, alone: None) -> None:
    values = {"tensor": torch.ones(4), "number": 1.0}
    handle = spmd.save(tmp_path, values=values, wait=False)
    values["tensor"].zero_()
    handle.wait()
    got: dict[str, Any] = {}
    spmd.load(tmp_path, values=got)
    assert got["tensor"].tolist() == [1] * 4


def test_a_forked_child_waits_for_nobody(tmp_path: Path, alone: None) -> None:
    step, model, optimizer = make()
    with held():
        handle = spmd.save(tmp_path, model=model, optimizer=optimizer, wait=False)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            WRITES["a step"](step, model, optimizer)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    handle.wait()


def test_a_program_ends_when_its_save_has(tmp_path: Path, alone: None) -> None:
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        spmd.save(tmp_path, tensor=torch.ones(4), wait=False)
        threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter calls when the script has ended
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    tensor = torch.zeros(4)
    spmd.load(tmp_path, tensor=tensor)
    assert tensor.tolist() == [1] * 4
