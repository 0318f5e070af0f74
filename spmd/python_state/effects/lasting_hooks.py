"""Hooks that a step registers or removes, and leaves so: each call would do it again, and a trace does it once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from passes import CaptureError

from ..._torch import HOOK_DICTS, OPTIMIZER_HOOK_DICTS, accumulation_hooks, global_hooks, gradient_hooks
from ..lines import line_naming
from ..reads import Reads


@contextmanager
def refuse_lasting_hooks(
    owners: Iterable[tuple[str, Any]], parameters: Mapping[str, torch.Tensor], reads: Reads
) -> Iterator[None]:
    """Raise ``CaptureError`` if the step leaves other hooks than it found; ``owners`` have theirs back in any case.

    These are modules and optimizers. ``parameters`` are fakes, whose hooks end with the trace.
    """
    found = [(name, vars(owner).get(key, {})) for name, owner in owners for key in HOOK_DICTS | OPTIMIZER_HOOK_DICTS]
    found += [("all modules or optimizers", hooks) for hooks in global_hooks()]
    before = [(name, hooks, dict(hooks)) for name, hooks in found]
    of_parameters = {name: _hooks_on(parameter) for name, parameter in parameters.items()}
    try:
        yield
        changed = [name for name, hooks, entries in before if [*hooks] != [*entries]]
        changed += [name for name, hooks in of_parameters.items() if _hooks_on(parameters[name]) != hooks]
        if changed:
            line = _line(reads)
            raise CaptureError(
                f"the step registers or removes a hook of {changed[0]}{f' at {line}' if line else ''} that outlasts "
                "the call, which a compiled step would do only once, while it is traced. Register hooks before the "
                "first call and remove them between calls, or do both in the step (handle.remove())"
            )
    finally:
        for _, hooks, entries in before:
            if [*hooks] != [*entries]:
                hooks.clear()
                hooks.update(entries)


def _hooks_on(parameter: torch.Tensor) -> Sequence[Any]:
    return [*(gradient_hooks(parameter) or ()), *(accumulation_hooks(parameter) or ())]


def _line(reads: Reads) -> str:
    names = dict.fromkeys(name for code in reads.code for name in code.co_names)
    registers = [name for name in names if name.startswith("register_") and name.endswith("hook")]
    return next(filter(None, (line_naming(reads.code, name) for name in [*registers, "remove"])), "")
