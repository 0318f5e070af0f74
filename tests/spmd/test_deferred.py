"""``defer_updates=True``: a call leaves its update to the next one, and a look at state finds it done."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import passes
import spmd
from spmd.deferral import pending
from spmd.running.results import Results
from tests.faults.test_late_interrupts import answered, before, sends
from tests.harness.cases import MLP, make_optimizer
from tests.harness.messages import messages
from tests.harness.oracle import Snapshot, all_unequal, plain_run, snapshot
from tests.harness.pool import Ranks

CASE = MLP(sizes=(15, 7, 7, 5), rows=6, optimizer="SGD momentum")
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Scheduled(MLP):
    """Gradients are clipped, and the learning rate is another in each step."""

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        objects[1].param_groups[0]["lr"] *= 0.5

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss


@dataclass(frozen=True)
class Averaged(MLP):
    """Two micro-batches through a batch norm, and an average of the model that follows the update."""

    def build(self) -> tuple[Any, ...]:
        model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).double()
        return model, make_optimizer(self.optimizer, model.parameters()), copy.deepcopy(model)

    @staticmethod
    def step(  # type: ignore[override]
        model: nn.Module, optimizer: torch.optim.Optimizer, average: nn.Module, x: Tensor, y: Tensor
    ) -> Tensor:
        total = torch.zeros((), dtype=x.dtype)
        for some, expected in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = F.mse_loss(model(some), expected)
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        with torch.no_grad():
            for mean, new in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(new, 0.1)
            for mean, new in zip(average.buffers(), model.buffers(), strict=True):
                mean.copy_(new)
        optimizer.zero_grad()
        return total


class Shadow:
    """Averages of parameters, as an object of the user's keeps them."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}


@dataclass(frozen=True)
class Shadowed(MLP):
    """The averages that follow the update are no state of a module."""

    def build(self) -> tuple[Any, ...]:
        model, optimizer = super().build()
        return model, optimizer, Shadow(model)

    @staticmethod
    def step(  # type: ignore[override]
        model: nn.Module, optimizer: torch.optim.Optimizer, shadow: Shadow, x: Tensor, y: Tensor
    ) -> Tensor:
        loss = MLP.step(model, optimizer, x, y)
        with torch.no_grad():
            for name, p in model.named_parameters():
                shadow.values[name].lerp_(p, 0.1)
        return loss


@dataclass(frozen=True)
class PutBack(MLP):
    """An attack on the weights, which are put back: the update reads the copy, and none of what it writes to."""

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        kept = {name: p.data.clone() for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            p.data = kept[name] + 0.01 * kept[name].sign()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for name, p in model.named_parameters():
            p.data = kept[name]
        optimizer.step()
        optimizer.zero_grad()
        return loss


class Training:
    """A compiled step on one rank, and how many calls of it were made."""

    def __init__(self, rank: int, case: MLP = CASE, **mode: Any) -> None:
        torch.manual_seed(0)
        self.rank, self.case, self.calls = rank, case, 0
        self.objects = case.build()
        self.step = spmd.compile(parallel_mode=spmd.DataParallel(**{"defer_updates": True, **mode}))(case.step)

    def call(self, times: int = 1, **options: Any) -> Any:
        for _ in range(times):
            if self.calls:  # the update of the call before is pending
                self.case.after(self.objects, self.calls - 1)
            result = self.step(*self.objects, *self.case.part(self.rank, self.calls), **options)
            self.calls += 1
        return result

    @property
    def model(self) -> Any:
        """The model."""
        return self.objects[0]

    def state(self) -> Snapshot:
        """As it lies in memory, which no hook sees."""
        return {name: _plain(p).clone() for name, p in self.model.named_parameters()}

    def is_pending(self) -> bool:
        return any(compiled.has_pending for compiled in self.step._dispatch.programs.deferred())

    def unequal(self, world: int, result: Any) -> list[str]:
        """What differs from the plain step after as many calls; the update is no longer pending."""
        assert not self.is_pending()
        expected = plain_run(self.case, world, self.calls)[-1:]
        return all_unequal(expected, [snapshot(result, self.objects)], self.rank, world)


def _plain(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


Trained = tuple[list[str], bool, list[str]]


def trained(rank: int, world: int, case: MLP, mode: dict[str, Any], *runs: int) -> Trained:
    """What differs from the plain step, whether bits are those of the step that defers nothing, and the programs.

    ``runs``: how many calls are made before the update is finished, each time.
    """
    with messages(rank):
        training, other = Training(rank, case, **mode), Training(rank, case, **mode, defer_updates=False)
        unequal, equal = list[str](), True
        for calls in runs:
            result, _ = training.call(calls), other.call(calls)
            assert training.is_pending()
            group = training.objects[1].param_groups[0]
            rate, group["lr"] = group["lr"], 123.0  # which is for the next call
            training.step.flush()
            group["lr"] = rate
            equal &= all(torch.equal(value, other.state()[name]) for name, value in training.state().items())
            unequal += training.unequal(world, result)
        names = [program.name.rpartition("-")[2] for program in training.step.programs]
        return unequal, equal, names


MODES: list[dict[str, Any]] = [{}, {"parallel_style": "fully_shard"}, {"shard_optimizer": True}]


@pytest.mark.parametrize("optimizer, mode", [("SGD", MODES[0]), ("SGD", MODES[1]), ("AdamW", MODES[2])])
def test_the_numbers_are_those_of_the_plain_step(ranks: Ranks, optimizer: str, mode: dict[str, Any]) -> None:
    case = Scheduled(sizes=(15, 7, 7, 5), rows=6, optimizer=optimizer)
    expected: Trained = ([], True, ["first", "steady", "finish"])
    assert ranks.run(2, trained, case, mode, 1, 2, 4) == [expected] * 2


def test_numbers_on_the_device_are_those_of_their_call(ranks: Ranks) -> None:
    case = Scheduled(sizes=(15, 7, 7, 5), rows=6, optimizer="SGD momentum")
    mode = {"custom_passes": passes.with_numbers_on_device(passes.default())}
    expected: Trained = ([], True, ["first", "steady", "finish"])
    assert ranks.run(2, trained, case, mode, 3) == [expected] * 2


# Each style has its numbers above. What is split is of more use here than what is whole.
SPLIT = [MODES[1], *(pytest.param(mode, marks=pytest.mark.exhaustive) for mode in MODES[::2])]


@pytest.mark.parametrize("mode", SPLIT)
def test_averages_batch_norms_and_micro_batches(ranks: Ranks, mode: dict[str, Any]) -> None:
    case = Averaged(sizes=(5, 3), rows=4, optimizer="SGD momentum")  # the bias before a batch norm has no gradient
    assert [differ for differ, _, _ in ranks.run(2, trained, case, mode, 3)] == [[]] * 2


@pytest.mark.parametrize("mode", SPLIT)
def test_weights_that_are_put_back(ranks: Ranks, mode: dict[str, Any]) -> None:
    case = PutBack(sizes=(5, 7, 3), rows=4, optimizer="SGD momentum")
    assert [differ for differ, _, _ in ranks.run(2, trained, case, mode, 1, 2)] == [[]] * 2


def _evaluate(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def _unshard(model: nn.Module) -> None:
    with spmd.unshard(model):
        pass


def _save_and_load(model: nn.Module, folder: str) -> None:
    spmd.save(folder, model=model)
    spmd.load(folder, model=model)


LOOKS: dict[str, Callable[[Training, str], Any]] = {
    "flush": lambda t, _: t.step.flush(),
    "state_dict": lambda t, _: t.model.state_dict(),
    "state_dict of a part": lambda t, _: t.model[2].state_dict(),
    "state_dict of the optimizer": lambda t, _: t.objects[1].state_dict(),
    "load_state_dict of the optimizer": lambda t, _: t.objects[1].load_state_dict(t.objects[1].state_dict()),
    "forward": lambda t, _: t.model(t.case.part(0, 0)[0]),
    "forward of a part": lambda t, _: t.model[0](t.case.part(0, 0)[0]),
    "step of the optimizer": lambda t, _: t.objects[1].step(),
    "deepcopy": lambda t, _: copy.deepcopy(t.objects),
    "pickle": lambda t, _: pickle.dumps(t.model),
    "pickle of a module around it": lambda t, _: pickle.dumps(nn.ModuleList([t.model])),
    "state_dicts, then a copy and a pickle": lambda t, _: (
        *(each.state_dict() for each in t.objects[:2]),
        copy.deepcopy(t.objects)[0].state_dict(),
        pickle.dumps(t.model),
    ),
    "another step": lambda t, _: spmd.compile(_evaluate)(t.model, t.case.part(0, 0)[0]),
    "save": lambda t, folder: spmd.save(folder, model=t.model),
    "save and load": lambda t, folder: _save_and_load(t.model, folder),
    "export": lambda t, folder: spmd.export(f"{folder}/exported", t.model),
    "unshard": lambda t, _: _unshard(t.model),
    "end of the process": lambda t, _: pending._finish_at_exit(),
}


def looked_at(rank: int, world: int, folder: str) -> tuple[list[str], int]:
    """After each call somebody else looks at state. What differs from the plain step then; the number of programs."""
    found: list[str] = []
    expected = plain_run(CASE, world, len(LOOKS))
    with messages(rank):
        training = Training(rank)
        for k, (name, look) in enumerate(LOOKS.items()):
            result = training.call()
            assert training.is_pending(), name
            look(training, folder)
            assert not training.is_pending(), name
            differ = all_unequal([expected[k]], [snapshot(result, training.objects)], rank, world)
            found += [f"{name}: {each}" for each in differ]
        left = [key for each in training.model.modules() for key in vars(each) if key == "__getstate__"]
        return found + left, training.step._dispatch.programs.compiled


def test_a_look_at_state_finds_the_update_done(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, looked_at, str(tmp_path)) == [([], 1)] * 2


def loaded(rank: int, world: int) -> list[bool]:
    """Whether what is loaded stays: the update that is pending comes before it."""
    with messages(rank):
        training = Training(rank)
        training.call(2)
        training.model.load_state_dict({name: torch.ones_like(p) for name, p in training.model.named_parameters()})
        training.step.flush()
        return [bool((value == 1).all()) for value in training.state().values()]


def test_state_that_is_loaded_is_not_updated_by_the_call_before(ranks: Ranks) -> None:
    assert ranks.run(2, loaded) == [[True] * 6] * 2


def in_turns(rank: int, world: int) -> tuple[list[str], list[str]]:
    """Another program of the step comes in between; the last call is named. What differs, and which programs ran."""
    ran = []
    with messages(rank):
        training = Training(rank)
        for k in range(6):
            training.model.train(k not in (2, 3))
            result = training.call(last_train_step=k == 5)
            program = training.step.program
            ran.append("" if program is None else program.name.rpartition("/")[2])
        return training.unequal(world, result), ran


def test_another_program_and_the_last_step_finish_the_update(ranks: Ranks) -> None:
    names = [f"program-{k}-{kind}" for k in (0, 1, 0) for kind in ("first", "steady")]
    assert ranks.run(2, in_turns) == [([], names)] * 2


def unequal_rows(rank: int, world: int) -> tuple[list[str], int]:
    """Rank 1 has fewer rows in the third call. What differs, and the number of programs that were compiled."""

    def part(of: int, k: int) -> list[Tensor]:
        return [x[:4] if (of, k) == (1, 2) else x for x in CASE.part(of, k)]

    torch.manual_seed(0)
    objects = CASE.build()
    batches = [[torch.cat(each) for each in zip(*(part(r, k) for r in range(world)), strict=True)] for k in range(4)]
    expected = [CASE.step(*objects, *batch) for batch in batches][-1]
    with messages(rank):
        training = Training(rank)
        result = [training.step(*training.objects, *part(rank, k)) for k in range(4)][-1]
        training.step.flush()
        differ = all_unequal([snapshot(expected, objects)], [snapshot(result, training.objects)], rank, world)
        return differ, training.step._dispatch.programs.compiled


def test_ranks_with_unequal_rows_finish_the_update_first(ranks: Ranks) -> None:
    assert ranks.run(2, unequal_rows) == [([], 2)] * 2


def looked_at_by_one(rank: int, world: int) -> tuple[str, list[str]]:
    """Rank 0 alone asks for a state dict, the other makes the next call. What both raise, and what differs later."""
    with messages(rank):
        training = Training(rank)
        training.call(2)
        try:
            training.model.state_dict() if rank == 0 else training.step(*training.objects, *CASE.part(rank, 2))
        except spmd.RankMismatchError as error:
            message = str(error)
        result = training.call()
        training.step.flush()
        return message, training.unequal(world, result)


def test_a_rank_that_looks_alone_raises_and_so_do_the_others(ranks: Ranks) -> None:
    for message, differ in ranks.run(2, looked_at_by_one):
        assert "the pending update of step/program-0" in message
        assert not differ


def written_to(rank: int, world: int) -> tuple[str, list[str]]:
    """A parameter is written to while its update is pending. What the next call raises, and what differs later."""
    with messages(rank):
        training = Training(rank)
        training.call(2)
        with torch.no_grad():
            training.model[0].bias.add_(1)
        for mode in (True, False):  # by the same program, and by another
            with pytest.raises(spmd.SpmdError) as caught:
                training.model.train(mode)
                training.call()
        message = str(caught.value)
        training.model.train()
        with torch.no_grad():
            training.model[0].bias.sub_(1)
        assert training.is_pending()
        training.step.flush()
        result = training.call()
        training.step.flush()
        return message, training.unequal(world, result)


def test_what_is_written_while_an_update_is_pending_is_an_error(ranks: Ranks) -> None:
    for message, differ in ranks.run(2, written_to):
        assert "model.0.bias was written to while an update of it was pending" in message
        assert not differ


def fails(rank: int, world: int) -> tuple[str, list[str]]:
    """Rank 1 fails in its third call. What it raises; later all train on from the state of the last finished update."""
    with messages(rank):
        training = Training(rank)
        training.call(2)
        before = training.state()
        batch = list(CASE.part(rank, 2))
        step, compiled = training.step, training.step._dispatch.programs.all[0]
        if rank == 1:
            compiled.deferred._executable._programs["steady"].executable.function = _raises
        message = ""
        try:
            step(*training.objects, *batch)
        except (spmd.RankFailedError, MemoryError) as error:
            message = "\n".join([str(error), *getattr(error, "__notes__", ())])
        assert not training.is_pending()
        after = training.state()
        return message, [name for name in before if not torch.equal(before[name], after[name])]


def _raises(*_: Any) -> None:
    raise MemoryError("no memory")


def test_a_call_that_fails_says_that_the_update_before_is_lost(ranks: Ranks) -> None:
    for rank, (message, _) in enumerate(ranks.run(2, fails)):
        assert "the update that the call before had left pending (step/program-0) is lost" in message, rank


def interrupted(rank: int, world: int) -> tuple[bool, list[str]]:
    """Rank 0 is interrupted in its third call, once all messages of that have left; both ranks go on."""
    torch.manual_seed(0)
    objects, raised = CASE.build(), False
    step = spmd.compile(CASE.step, parallel_mode=spmd.DataParallel(defer_updates=True))
    with messages(rank):
        for k in range(5):
            sending = before(Results, "write_python_state", sends) if k == 2 and rank == 0 else nullcontext()
            try:
                with answered(), sending:
                    result = step(*objects, *CASE.part(rank, k))
            except KeyboardInterrupt:
                raised = True
        step.flush()
    return raised, all_unequal(plain_run(CASE, world, 5)[-1:], [snapshot(result, objects)], rank, world)


def test_an_interrupt_late_in_a_call_waits_until_it_is_over(ranks: Ranks) -> None:
    assert ranks.run(2, interrupted) == [(True, []), (False, [])]


@dataclass(frozen=True)
class WithNorm(MLP):
    """The step returns what depends on all gradients."""

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        F.mse_loss(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return norm


@dataclass(frozen=True)
class KeepsGradients(MLP):
    """The step leaves its gradients."""

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss


def refused(rank: int, world: int, case: MLP) -> str:
    with messages(rank), pytest.raises(spmd.PassError) as caught:
        Training(rank, case).call()
    return str(caught.value)


@pytest.mark.parametrize(
    "case, sentence",
    [
        (WithNorm(sizes=(4, 2), rows=2), "depends on the update of the step"),
        (KeepsGradients(sizes=(4, 2), rows=2), "leaves model.0.weight.grad for the user to see"),
    ],
)
def test_what_shows_the_update_is_refused(ranks: Ranks, case: MLP, sentence: str) -> None:
    assert all(sentence in message for message in ranks.run(2, refused, case))


def not_on_all(rank: int, world: int) -> str:
    with messages(rank), pytest.raises(spmd.RankMismatchError) as caught:
        Training(rank, defer_updates=rank == 0).call()
    return str(caught.value)


def test_all_ranks_defer_or_none(ranks: Ranks) -> None:
    assert all("defer_updates=True on all ranks" in message for message in ranks.run(2, not_on_all))


def on_one_host(rank: int, world: int) -> tuple[bool, int, list[str]]:
    training = Training(rank)
    result = training.call(2)
    notes = [note for note in training.step.report().notes if "defer_updates" in note]
    return training.is_pending(), len(notes), training.unequal(world, result)


def test_on_one_host_nothing_is_deferred_and_the_report_says_so(ranks: Ranks) -> None:
    assert ranks.run(2, on_one_host) == [(False, 1, [])] * 2


def shadowed(rank: int, world: int) -> tuple[bool, int, list[str]]:
    """Whether an update is pending, how many notes say why not, and what differs from the plain step."""
    case = Shadowed(sizes=(5, 4, 3), rows=4, optimizer="SGD momentum")
    with messages(rank):
        training = Training(rank, case)
        result = training.call(3)
        notes = [note for note in training.step.report().notes if "writes shadow.values" in note]
        torch.manual_seed(0)
        objects = case.build()
        for k in range(3):
            case.step(*objects, *case.whole([case.part(each, k) for each in range(world)]))
        pairs = [(objects[2].values[name], value) for name, value in training.objects[2].values.items()]
        unequal = [f"average {k}" for k, pair in enumerate(pairs) if not torch.allclose(*pair, rtol=1e-9)]
        return training.is_pending(), len(notes), unequal + training.unequal(world, result)


def test_what_the_update_writes_beside_state_is_not_deferred(ranks: Ranks) -> None:
    assert ranks.run(2, shadowed) == [(False, 1, [])] * 2


def test_options_that_know_of_one_program_are_refused() -> None:
    mode = spmd.DataParallel(defer_updates=True)
    with pytest.raises(ValueError, match="expected no memory with defer_updates=True"):
        spmd.compile(CASE.step, parallel_mode=mode, memory="1GB")
    with pytest.raises(spmd.SpmdError, match="cannot be measured"):
        spmd.compile(CASE.step, parallel_mode=mode).profile()
    with pytest.raises(TypeError, match="expected defer_updates to be True or False"):
        spmd.DataParallel(defer_updates=1)  # type: ignore[arg-type]


@pytest.mark.processes
def test_the_end_of_a_process_finishes_the_update(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, "-m", "tests.spmd.ends_while_pending", str(rank), str(tmp_path)] for rank in range(2)]
    errors = [tmp_path / f"errors-{rank}" for rank in range(2)]
    processes = []
    for command, path in zip(commands, errors, strict=True):
        with path.open("w") as file:
            processes.append(subprocess.Popen(command, env=environment, cwd=ROOT, stderr=file))
    assert [process.wait(120) for process in processes] == [0, 0]
    assert not any("Exception ignored" in path.read_text() for path in errors)
    case = MLP(sizes=(5, 3), rows=4)
    torch.manual_seed(0)
    objects = case.build()
    for k in range(2):
        case.step(*objects, *case.whole([case.part(rank, k) for rank in range(2)]))
    for rank in range(2):
        for got, parameter in zip(torch.load(tmp_path / f"rank-{rank}.pt"), objects[0].parameters(), strict=True):
            torch.testing.assert_close(got, parameter.detach())
