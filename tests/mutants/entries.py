"""The comparisons by which an entry of the cache is bound, and for each a change that no other one sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import spmd
from spmd.cache import compile_cache, read_data
from spmd.cache.compile_cache import Lookup
from spmd.cache.read_data import Placed
from spmd.capture.hyper_conditions import HyperGuards
from tests.spmd.cache.test_stale_hits import CHANGES, EDITS
from tests.spmd.cache.trainer import FILES, TracedError, Trainer, batch

Wrong = Callable[[Any], Callable[..., Any]]


def without(position: int) -> Wrong:
    """Leave out what a row has at a position."""

    def wrong(original: Any) -> Any:
        def row(*given: Any) -> Any:
            found = [*original(*given)]
            found[position] = None
            return found

        return row

    return wrong


def always(value: Any) -> Wrong:
    """Give the same for everything."""
    return lambda _: lambda *_: value


def names_alone(original: Any) -> Any:
    """Leave a module's name, and nothing of what it defines."""
    return lambda *given: [original(*given)[0]]


@dataclass(frozen=True)
class Comparison:
    """``owner.name`` compares, or makes what is compared; ``change``: of the next process, which must not start warm.

    ``step``: an edit of the file of the step, in both processes; ``edit``: one of ``EDITS``, in the next.
    """

    owner: Any
    name: str
    wrong: Wrong
    change: Callable[..., object] = lambda *_: None  # of modules, model, optimizer and patches
    step: tuple[str, str] = ("", "")
    edit: str = ""
    kwargs: tuple[tuple[str, Any], ...] = ()

    def starts_warm(self, trainer: Trainer, cache: Path) -> bool:
        """Whether a process that starts now finds an entry, once it has changed."""
        before, after = self.step
        trainer.write(cached_step=FILES["cached_step"].replace(before, after, 1))
        if self.edit:
            name, before, after = EDITS[self.edit]
            trainer.write(**{name: FILES[name].replace(before, after, 1)})
        with pytest.MonkeyPatch.context() as patched:
            trainer.monkeypatch = patched
            module = trainer.start()
            model, optimizer = module.build()
            trainer.refuse_traces()
            self.change(trainer.modules, model, optimizer, patched)
            try:
                spmd.compile(module.step, cache=cache)(model, optimizer, *batch(), **dict(self.kwargs))
            except TracedError:
                return False
        return True

    def store(self, trainer: Trainer, cache: Path) -> None:
        """Write the entry of a process in which nothing has changed."""
        before, after = self.step
        trainer.write(cached_step=FILES["cached_step"].replace(before, after, 1))
        module = trainer.start()
        step = spmd.compile(module.step, cache=cache)
        step(*module.build(), *batch())
        assert cache.is_dir() and len(list(cache.iterdir())) == 1, step.report().notes


HEAD = next(f"{line}\n" for line in FILES["cached_step"].splitlines() if line.startswith("def step("))
COMPARISONS: dict[str, Comparison] = {
    "values at sites": Comparison(read_data, "_site", without(5), CHANGES["an attribute of an object"]),
    "which objects are one": Comparison(
        Placed,
        "shared",
        always([]),
        lambda modules, *_: setattr(modules["cached_step"], "B", modules["cached_step"].A),
        (HEAD, f"A, B = torch.ones(1), torch.ones(1)\n\n\n{HEAD}    smoothing = 0.2 if A is B else smoothing\n"),
    ),
    "globals": Comparison(read_data, "_global", always(None), CHANGES["an imported module"]),
    "code of modules": Comparison(read_data, "_module", names_alone, edit="a comment"),
    "values of arguments": Comparison(Lookup, "_values", always([]), kwargs=(("reduction", "sum"),)),
    "branches on numbers": Comparison(
        HyperGuards,
        "hold",
        always(True),
        lambda modules, model, optimizer, _: optimizer.param_groups[0].update(lr=0.5),
        ("    loss = F", "    smoothing = 0.2 if optimizer.param_groups[0]['lr'] > 0.1 else smoothing\n    loss = F"),
    ),
    "functions of torch": Comparison(compile_cache, "same_functions", always(""), CHANGES["a method of tensors"]),
}
"""Each comparison, its wrong version, and the change."""
