"""For each fact in the key of a cached step, a change of a call that shows in it: without it an entry is stale."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import spmd
from spmd.answers.answer import Answer
from spmd.cache import compile_cache
from spmd.dispatch import Dispatch
from spmd.running.kept_programs import KeptPrograms
from spmd.watching.watch import Spec
from tests.spmd.cache.test_stale_hits import CHANGES
from tests.spmd.cache.trainer import FILES, TracedError, Trainer, batch


@dataclass(frozen=True)
class Call:
    """A call of the trainer's step, as changed: its files, objects, arguments and options."""

    edit: tuple[str, str] | None = None  # of the file of the step
    change: Callable[..., object] | None = None  # of modules, model and optimizer
    args: Callable[[], tuple[Any, ...]] = batch
    kwargs: tuple[tuple[str, Any], ...] = ()
    mode: Callable[[], Any] = lambda: None

    def facts(self, trainer: Trainer, folder: Any) -> dict[str, Any]:
        """The facts by which an entry of the call is found."""
        found = list[dict[str, Any]]()
        original = compile_cache.facts_of_call

        def keep(*given: Any) -> dict[str, Any]:
            found.append(original(*given))
            return found[-1]

        text = FILES["cached_step"]
        trainer.write(cached_step=text.replace(*self.edit) if self.edit else text)
        module = trainer.start()
        model, optimizer = module.build()
        with pytest.MonkeyPatch.context() as patched, pytest.raises(TracedError):
            trainer.monkeypatch = patched
            trainer.refuse_traces()
            patched.setattr(compile_cache, "facts_of_call", keep)
            if self.change is not None:
                self.change(trainer.modules, model, optimizer, patched)
            step = spmd.compile(module.step, cache=folder, parallel_mode=self.mode())
            step(model, optimizer, *self.args(), **dict(self.kwargs))
        facts: dict[str, Any] = json.loads(json.dumps(found[0]))
        return facts


@dataclass(frozen=True)
class Fact:
    """A change that shows in a fact, and in those of ``also``; from the call ``of``, the usual one by default."""

    call: Call
    also: frozenset[str] = frozenset()
    of: Call = Call()


def renamed(modules: Any, *_: Any) -> None:
    modules["cached_step"].step.__name__ = "another"


def rows(count: int) -> torch.Tensor:
    return torch.ones(count, 4, dtype=torch.float64)


def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, x


def on_another_mesh() -> spmd.DataParallel:
    return spmd.DataParallel(mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("x",)))


def clears_first(modules: Any, model: Any, optimizer: Any, patched: pytest.MonkeyPatch) -> None:
    patched.setattr(KeptPrograms, "cleared_first", lambda *_: frozenset({"model.first.weight"}))


def of_call(name: str, value: Any) -> Callable[..., None]:
    """A change of what a call was found to be before it looks for an entry."""

    def change(modules: Any, model: Any, optimizer: Any, patched: pytest.MonkeyPatch) -> None:
        original = Dispatch._call

        def call(*given: Any) -> Any:
            found = original(*given)
            setattr(found, name, value)
            return found

        patched.setattr(Dispatch, "_call", call)

    return change


USES = ("    loss = F", "    HELD\n    loss = F")


def hold(make: Callable[[Any], Any]) -> Callable[..., None]:
    """A change that lets the module of the step have an object of a name that the step uses."""
    return lambda modules, *_: setattr(modules["cached_step"], "HELD", make(modules["cached_step"]))


FACTS: dict[str, Fact] = {
    "name": Fact(Call(change=renamed), frozenset({"function"})),
    "function": Fact(Call(("loss.backward()", "(loss * 2).backward()"))),
    "structure": Fact(Call(args=lambda: (batch()[0], [batch()[1]])), frozenset({"leaves", "inputs"})),
    "leaves": Fact(Call(args=lambda: (batch()[0].requires_grad_(), batch()[1]))),
    "found": Fact(
        Call(USES, hold(lambda module: module.Net().double())),
        frozenset({"modules", "state"}),
        Call(USES, hold(lambda _: None)),
    ),
    "modules": Fact(Call(change=CHANGES["evaluation"])),
    "optimizers": Fact(Call(change=CHANGES["a flag of a group"])),
    "state": Fact(Call(change=CHANGES["a frozen parameter"])),
    "numbers": Fact(Call(change=CHANGES["state of an optimizer"]), frozenset({"optimizers"})),
    "one tensor": Fact(Call(args=lambda: twice(rows(6))), of=Call(args=lambda: (rows(6), rows(6)))),
    "inputs": Fact(Call(args=lambda: (rows(5), rows(5))), frozenset({"leaves"}), Call(args=lambda: (rows(6), rows(6)))),
    "annotations": Fact(
        Call(change=lambda m, model, *_: spmd.fully_shard(model.first, reshard_after_forward=True)),
        of=Call(change=lambda m, model, *_: spmd.fully_shard(model.first, reshard_after_forward=False)),
    ),
    "without gradient": Fact(Call(change=clears_first)),
    "answers": Fact(Call(change=of_call("answers", (Answer(True, "here"),)))),
    "watched": Fact(Call(change=of_call("watched", (Spec("*.grad", ("norm",), as_one=False),)))),
    "live": Fact(Call(kwargs=(("smoothing", 0),)), frozenset({"leaves"})),
    "settings": Fact(Call(change=CHANGES["the default dtype"])),
    "mesh": Fact(Call(mode=on_another_mesh), frozenset({"options"})),
    "options": Fact(Call(mode=lambda: spmd.DataParallel("fully_shard"))),
}
