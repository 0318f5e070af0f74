"""Names in the step's code by which it could read what no guard sees: the environment, files, the host, the clock.

A compiled step keeps such a value for as long as the process lives. Another process would have another one, so a step
whose code names one of them is not cached.
"""

from __future__ import annotations

import builtins
import types
from collections.abc import Iterator
from typing import Any

from ..python_state.reads import MISSING, Reads, global_chains, names_in
from .described import check_module
from .not_cached import NotCachedError

_BUILTINS = frozenset("open input eval exec compile __import__ globals locals vars dir breakpoint id hash".split())
_UNWATCHED = frozenset(  # attributes by which code reads past what watches it
    "__dict__ __getattribute__ __closure__ cell_contents __globals__ __builtins__ f_locals f_globals f_back gi_frame "
    "__subclasses__ __annotate__".split()
)


def globals_of(reads: Reads) -> Iterator[tuple[dict[str, Any], str]]:
    """(namespace, name) of each global that code of the step names. Raises ``NotCachedError`` for what reads more."""
    seen = set[tuple[int, str]]()
    for code, namespace in zip(reads.code, reads.namespaces, strict=True):
        texts = [each for each in code.co_consts if isinstance(each, str)]
        if unwatched := _UNWATCHED.intersection((*code.co_names, *texts)):
            raise NotCachedError(f"the step's code names {min(unwatched)}, by which it reads what is not watched")
        for name in names_in(code, "IMPORT_NAME"):
            check_module(name, name)
        for chain in global_chains(code):
            value = namespace.get(chain[0], MISSING)
            if value is MISSING:
                _check_builtin(chain[0])
            for space, key in [(namespace, chain[0]), *_through_modules(chain, value)]:
                if (id(space), key) not in seen:
                    seen.add((id(space), key))
                    yield space, key


def _check_builtin(name: str) -> None:
    if name in _BUILTINS and name in vars(builtins):
        raise NotCachedError(f"the step's code calls {name}(), which may give something else in another process")


def _through_modules(chain: tuple[str, ...], value: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """(namespace, name) of each attribute of a module in ``chain``: a global, and what is read from it."""
    for name in chain[1:]:
        if not isinstance(value, types.ModuleType):
            return
        found, shown = vars(value).get(name), f"{value.__name__}.{name}"
        if not isinstance(found, types.ModuleType):
            check_module(shown, shown)
        if not isinstance(found, types.ModuleType) or found.__name__ != shown:
            yield vars(value), name
        value = found
    if isinstance(value, types.ModuleType):
        check_module(value.__name__, value.__name__)
