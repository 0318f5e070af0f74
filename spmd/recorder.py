"""``step.record``: what ``spmd replay`` needs to run the last calls again, written by each rank before a call.

``FOLDER/rank-3/`` has the programs, and a folder for each stretch of calls: the state before the first of them, and
the arguments, numbers and seed of each. A stretch ends after ``last`` calls, and wherever state is not what the call
before has left, because that failed, the user changed it, or another program ran. Stretches older than that go.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from passes import Input, PassError, SpmdError
from passes.ir.saved_program import save_program

from ._torch import local_tensor, version_of
from .interpreter.source_lines import warn_user
from .running.compiled import Compiled

Execute = Callable[[Sequence[Any]], list[Any]]
_MARK = "record.json"
STRETCH, CALL, STATE = "calls-{:08}", "call-{:08}.pt", "state.pt"


class Recorder:
    """Records the calls of one step on this rank. After an error of the file system it warns, and records no more."""

    def __init__(self, folder: Path, last: int, name: str) -> None:
        """Raises ``ValueError`` where the folder of this rank has something else in it than an earlier record.

        And ``SpmdError`` where it cannot be made.
        """
        self.folder = folder / f"rank-{dist.get_rank() if dist.is_initialized() else 0}"
        self._last, self._is_active = last, True
        self._stretches: list[int] = []  # their first calls
        # The state that the last call has left: each tensor, and its version. None where that call has failed.
        self._after: list[Any] | None = None
        self._saved: set[str] = set()  # programs
        if self.folder.exists() and not (self.folder / _MARK).exists() and any(self.folder.iterdir()):
            raise ValueError(f"expected an empty folder, or that of an earlier record, got {self.folder}")
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            self.folder.mkdir(parents=True)
            (self.folder / _MARK).write_text(json.dumps({"step": name, "last": last}))
        except OSError as error:
            raise SpmdError(f"expected a folder for the record of {name} that can be written to: {error}") from error

    def begin(self, compiled: Compiled, state: Sequence[torch.Tensor], call: int, execute: Execute | None) -> Execute:
        """A function that records a call's inputs and runs it. ``state``: the live tensors; ``call``: its number."""
        run = execute or compiled.executable

        def record(inputs: Sequence[Any]) -> list[Any]:
            goes_on, self._after = _versions(state) == self._after, None
            if self._is_active:
                try:
                    self._write(compiled, inputs, call, goes_on)
                except (OSError, RuntimeError, PassError) as error:  # torch.save says so of a full disk
                    self._is_active = False
                    warn_user(f"the record in {self.folder} ends before call {call}: {error}. Training goes on")
            return run(inputs)

        return record

    def end(self, state: Sequence[torch.Tensor]) -> None:
        """A call has gone well."""
        self._after = _versions(state)

    def _write(self, compiled: Compiled, inputs: Sequence[Any], call: int, goes_on: bool) -> None:
        program = compiled.program
        name = program.name.rpartition("/")[2]
        if name not in self._saved:
            (self.folder / f"{name}.json").write_text(json.dumps(save_program(program)), encoding="utf-8")
            self._saved.add(name)
        pairs = list(zip(program.inputs, inputs, strict=True))
        if self._stretches:  # a call that runs again, with more room for rows, is recorded as it ran last
            (self.folder / STRETCH.format(self._stretches[-1]) / CALL.format(call)).unlink(missing_ok=True)
        if not goes_on or call - self._stretches[-1] >= self._last:
            self._stretches += [call] if self._stretches[-1:] != [call] else []
            (self.folder / STRETCH.format(call)).mkdir(exist_ok=True)
            state = {n: v for each, value in pairs if each.role.is_state for n, v in parts_of(each, value).items()}
            torch.save(_copied(state), self.folder / STRETCH.format(call) / STATE)
        given = {each.name: value for each, value in pairs if not each.role.is_state}
        path = self.folder / STRETCH.format(self._stretches[-1]) / CALL.format(call)
        torch.save({"program": name, "inputs": _copied(given)}, path)
        while len(self._stretches) > 1 and call - self._stretches[1] >= self._last - 1:
            shutil.rmtree(self.folder / STRETCH.format(self._stretches.pop(0)))


def parts_of(declared: Input, value: Any) -> dict[str, Any]:
    """The values of the inputs that one holds, as views, by name."""
    if not declared.parts:
        return {declared.name: value}
    return {p.input.name: value.narrow(0, p.offset, p.numel).view(p.shape) for p in declared.parts}


def recorded_calls(folder: Path) -> dict[int, Path]:
    """The files of the calls that a rank's folder has, by number."""
    found = {
        int(match[1]): path for path in folder.glob("*/*.pt") if (match := re.fullmatch(r"call-(\d+).pt", path.name))
    }
    return dict(sorted(found.items()))


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    """Each tensor in memory of its own: a file has the whole storage of what is in it."""
    return {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in values.items()}


def _versions(state: Sequence[torch.Tensor]) -> list[Any]:
    """A DTensor and its part count writes apart."""
    return [(id(tensor), version_of(tensor), version_of(local_tensor(tensor))) for tensor in state]
