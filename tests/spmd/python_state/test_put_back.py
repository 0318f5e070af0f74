"""Weights that an object of the user's copies, moves along a gradient and puts back in one step (FGM, PGD, AWP)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from spmd.call.argument_logs import LogsFound
from spmd.capture.final_state import Incomplete
from spmd.capture.trace import Trace
from spmd.capture_call import _Tracing
from spmd.python_state.effects.carried import Carried
from tests.harness.cases import THREE_IN_TURN, in_turn
from tests.harness.oracle import Case, assert_agrees, random_generator
from tests.harness.pool import Ranks


class Words(nn.Module):
    """A classifier of bags of words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 3), nn.Linear(3, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids).mean(1))


class FGM:
    """One step along the gradient of the embedding."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.backup, self.gradients = model, {}, {}  # type: ignore[var-annotated]

    def moved(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, p) for name, p in self.model.named_parameters() if "embedding" in name)

    def attack(self) -> None:
        for name, p in self.moved():
            self.backup[name] = p.data.clone()
            p.data.add_(p.grad / torch.norm(p.grad))

    def put_back(self) -> None:
        for name, p in self.moved():
            p.data = self.backup[name]

    def restore(self) -> None:
        self.put_back()
        self.backup = {}

    def step(self, ids: Tensor, y: Tensor) -> None:
        self.attack()
        F.cross_entropy(self.model(ids), y).backward()
        self.restore()


class KeepsBackup(FGM):
    """The backup stays, and is the memory of the weights from then on."""

    def restore(self) -> None:
        self.put_back()


class PGD(FGM):
    """Several steps, each back into a ball around the start; the last gradient is added to the first."""

    def attack(self) -> None:
        for name, p in self.moved():
            p.data.add_(0.3 * p.grad / torch.norm(p.grad))
            r = p.data - self.backup[name]
            p.data = self.backup[name] + r * torch.clamp(0.5 / torch.norm(r), max=1.0)

    def step(self, ids: Tensor, y: Tensor) -> None:
        for name, p in self.moved():
            self.backup[name] = p.data.clone()
        for name, p in self.model.named_parameters():
            self.gradients[name] = p.grad.clone()  # type: ignore[union-attr]
        for k in range(3):
            self.attack()
            self.model.zero_grad()
            for name, p in self.model.named_parameters() if k == 2 else ():
                p.grad = self.gradients[name]
            F.cross_entropy(self.model(ids), y).backward()
        self.restore()


class AWP(FGM):
    """All weights move, within bounds that are kept beside them; the optimizer steps along the gradient there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.bounds: dict[str, tuple[Tensor, Tensor]] = {}

    def step(self, ids: Tensor, y: Tensor) -> None:
        for name, p in self.model.named_parameters():
            if name not in self.backup:
                self.backup[name], reach = p.data.clone(), 0.1 * p.abs().detach()
                self.bounds[name] = self.backup[name] - reach, self.backup[name] + reach
            p.data.add_(p.grad / torch.norm(p.grad) * torch.norm(p.data.detach()))
            p.data = torch.min(torch.max(p.data, self.bounds[name][0]), self.bounds[name][1])
        self.model.zero_grad()
        F.cross_entropy(self.model(ids), y).backward()
        for name, p in self.model.named_parameters():
            if name in self.backup:
                p.data = self.backup[name]
        self.backup, self.bounds = {}, {}


@dataclass(frozen=True)
class Attacked(Case):
    """A step whose second backward pass is at other weights."""

    kind: type[FGM] = FGM

    def build(self) -> tuple[Any, ...]:
        model = Words().double()
        return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), self.kind(model)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        generator = random_generator(rank, step)
        return torch.randint(0, 7, (3, 5), generator=generator), torch.randint(0, 4, (3,), generator=generator)

    @staticmethod
    def step(model: Any, optimizer: Any, attack: FGM, ids: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        loss = F.cross_entropy(model(ids), y)
        loss.backward()
        attack.step(ids, y)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()


# The second one, which leaves more behind, is compared on one rank below.
@pytest.mark.parametrize("kind", [FGM, pytest.param(KeepsBackup, marks=pytest.mark.exhaustive), PGD, AWP])
def test_weights_that_are_moved_and_put_back_train_as_in_the_plain_step(
    ranks: Ranks, request: pytest.FixtureRequest, kind: type[FGM]
) -> None:
    for style, world in in_turn(request, [FGM, KeepsBackup, PGD, AWP].index(kind), THREE_IN_TURN):
        assert_agrees(ranks, world, Attacked(kind), style)


@pytest.mark.usefixtures("alone")
def test_the_containers_of_before_get_what_the_step_wrote() -> None:
    """Also where it puts another in the place of one; and what shares memory in eager does so here."""
    ends = []
    for compiles in (False, True):
        torch.manual_seed(0)
        case, other = Attacked(FGM), Attacked(KeepsBackup)
        model, optimizer, attack = case.build()
        kept = attack.backup
        step = spmd.compile(case.step) if compiles else case.step
        step(model, optimizer, attack, *case.part(0, 0))
        objects = other.build()
        step = spmd.compile(other.step) if compiles else other.step
        for k in range(2):
            step(*objects, *case.part(0, k))
        held, weight = objects[2].backup["embedding.weight"], objects[0].embedding.weight
        assert not attack.backup and list(kept) == ["embedding.weight"]
        assert held.data_ptr() == weight.data_ptr() and not held.requires_grad
        ends.append([kept["embedding.weight"], held, weight.detach()])
    torch.testing.assert_close(ends[1], ends[0])


class Averages(FGM):
    """The step reads what it kept in the last call, too."""

    def restore(self) -> None:
        halves = {}
        for name, p in self.moved():
            p.data.copy_(self.backup[name])
            halves[name] = self.backup[name] * 0.5
        self.backup = halves

    def attack(self) -> None:
        for name, p in self.moved():
            if name in self.backup:
                p.data.add_(self.backup[name], alpha=0.01)
        super().attack()


class Moves(FGM):
    """What the step wrote into goes to another place."""

    def restore(self) -> None:
        self.put_back()
        self.gradients, self.backup = self.backup, {}


@pytest.mark.usefixtures("alone")
def test_a_container_that_is_read_and_replaced_is_state_and_one_that_is_moved_is_refused() -> None:
    case = Attacked(Averages)
    torch.manual_seed(0)
    plain = case.build()
    torch.manual_seed(0)
    objects, step = case.build(), spmd.compile(case.step)
    for k in range(3):
        torch.testing.assert_close(step(*objects, *case.part(0, k)), case.step(*plain, *case.part(0, k)))
    torch.testing.assert_close(objects[2].backup, plain[2].backup)
    with pytest.raises(spmd.CaptureError, match=r"changes the entries of attack\.backup.*reads them at .*self\.gradi"):
        spmd.compile(case.step)(*Attacked(Moves).build(), *case.part(0, 0))


@pytest.mark.usefixtures("alone")
def test_a_trace_whose_reasons_come_again_ends_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_more_log(self: Trace) -> None:
        raise Incomplete(Carried(), [("attack.backup", {})])  # made anew in each trace

    def one_more_argument(self: _Tracing) -> None:
        raise LogsFound({("0", 2)}, are_logs=False)

    case = Attacked()
    for owner, name, again in ((Trace, "graph_module", one_more_log), (_Tracing, "_for_sizes", one_more_argument)):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, again)
            with pytest.raises(
                spmd.CaptureError, match=r"is traced once more, the 6th time, because of .*in local var"
            ):
                spmd.compile(case.step)(*case.build(), *case.part(0, 0))
