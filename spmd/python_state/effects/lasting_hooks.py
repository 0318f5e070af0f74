"""Hooks that a step registers or removes, and leaves so: each call would do it again, and a trace does it once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from passes import CaptureError

from ..._torch import HOOK_DICTS, OPTIMIZER_HOOK_DICTS, accumulation_hooks, global_hooks, gradient_hooks
from ...call.refusals import refuse
from ...interpreter.foreign_code import is_library_file
from ..lines import line_naming
from ..reads import Reads


@contextmanager
def refuse_lasting_hooks(
    owners: Iterable[tuple[str, Any]],
    live: Mapping[str, torch.Tensor],
    fakes: Mapping[str, torch.Tensor],
    reads: Reads,
    left: list[tuple[dict[Any, Any], Any]],
) -> Iterator[None]:
    """Raise ``CaptureError`` if the step leaves other hooks than it found; all but fakes have theirs back in any case.

    ``owners`` are modules and optimizers. The step registers hooks on ``fakes`` of state, whose hooks end with the
    trace, and may remove those of the ``live`` tensors. Hooks of libraries stay, which put them on once and note it;
    ``left`` becomes these, each as (hooks, key).
    """
    found = [(name, vars(owner).get(key, {})) for name, owner in owners for key in HOOK_DICTS | OPTIMIZER_HOOK_DICTS]
    found += [("all modules or optimizers", hooks) for hooks in global_hooks()]
    of_live = ((name, of(x)) for name, x in live.items() for of in (gradient_hooks, accumulation_hooks))
    found += [(name, hooks) for name, hooks in of_live if hooks]
    before = [(name, hooks, dict(hooks)) for name, hooks in found]
    of_fakes = {name: _hooks_on(fake) for name, fake in fakes.items()}
    try:
        yield
        changed = [name for name, hooks, entries in before if _differ(hooks, entries)]
        changed += [name for name, hooks in of_fakes.items() if _hooks_on(fakes[name]) != hooks]
        if changed:
            line = _line(reads)
            refuse(
                CaptureError,
                f"the step registers or removes a hook of {changed[0]}{f' at {line}' if line else ''} that outlasts "
                "the call, which a compiled step would do only once, while it is traced. Register hooks before the "
                "first call and remove them between calls, or do both in the step (handle.remove())",
            )
    finally:
        for _, hooks, entries in before:
            stay = {key: hook for key, hook in hooks.items() if key not in entries and _is_of_a_library(hook)}
            left += [(hooks, key) for key in stay]
            if _differ(hooks, entries):
                hooks.clear()
                hooks.update(entries | stay)


def _differ(hooks: Mapping[Any, Any], entries: Mapping[Any, Any]) -> bool:
    """Whether hooks have gone, or other ones than those of libraries have come."""
    added = [hook for key, hook in hooks.items() if key not in entries]
    return not all(map(_is_of_a_library, added)) or any(key not in hooks for key in entries)


def _is_of_a_library(hook: Any) -> bool:
    code = getattr(hook, "__code__", None)
    return code is not None and is_library_file(code.co_filename)


def _hooks_on(parameter: torch.Tensor) -> Sequence[Any]:
    return [*(gradient_hooks(parameter) or ()), *(accumulation_hooks(parameter) or ())]


def _line(reads: Reads) -> str:
    names = dict.fromkeys(name for code in reads.code for name in code.co_names)
    registers = [name for name in names if name.startswith("register_") and name.endswith("hook")]
    return next(filter(None, (line_naming(reads.code, name) for name in [*registers, "remove"])), "")
