"""Observe code that starts, by a trace function, and find the globals that it reads or writes."""

from __future__ import annotations

import dis
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...interpreter.collector_callbacks import callback_codes
from ...interpreter.foreign_code import is_foreign_module
from .read_sites import MISSING


class GlobalReads:
    """Calls ``on_start(frame)`` once for each function, when it first starts inside of ``watch``.

    Where that returns False, once more when the function starts again.
    """

    def __init__(self, on_start: Callable[[types.FrameType], bool]) -> None:
        self._on_start = on_start
        self._seen: dict[int, types.CodeType] = {}  # by id: a code object computes its hash anew each time
        self._before: Any = sys.gettrace()  # the trace function of a debugger, or none

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch for the length of the context; a trace function that was there before is still called."""
        before = self._before = sys.gettrace()
        self._seen |= {id(code): code for code in callback_codes()}
        sys.settrace(self._tracer(before))
        try:
            yield
        finally:
            sys.settrace(before)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not watch in here: a trace function slows down all Python code, half of which is torch's."""
        now = sys.gettrace()
        sys.settrace(self._before)
        try:
            yield
        finally:
            sys.settrace(now)

    def _tracer(self, before: Any) -> Any:
        seen, on_start = self._seen, self._on_start

        def trace(frame: types.FrameType, event: str, argument: Any) -> Any:
            code = frame.f_code
            if id(code) not in seen:
                seen[id(code)] = code
                if not on_start(frame):
                    del seen[id(code)]
            return before(frame, event, argument) if before is not None else None

        return trace


def globals_in(code: types.CodeType, variables: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """(dict, key, file or module) of each global that ``code`` reads or writes, reached through modules."""
    where = os.path.basename(code.co_filename)
    written = names_in(code, "STORE_GLOBAL")
    texts = [each for each in code.co_consts if isinstance(each, str)] if "globals" in code.co_names else []
    for chain in (*global_chains(code), *((name,) for name in (*written, *texts))):
        found = _follow(chain, variables, where)
        if found is not None and (found[0].get(found[1], MISSING) is not MISSING or chain[0] in written):
            yield found


def names_in(code: types.CodeType, opname: str) -> set[str]:
    """The names in instructions of one kind."""
    return {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == opname}


def _follow(chain: tuple[str, ...], holder: dict[str, Any], where: str) -> tuple[dict[str, Any], str, str] | None:
    """The entry that ``chain`` leads to: its last name, or the first that is no module. None within foreign modules."""
    for name in chain[:-1]:
        value = holder.get(name, MISSING)
        if not isinstance(value, types.ModuleType):
            return holder, name, where
        if is_foreign_module(value.__name__):
            return None
        holder, where = vars(value), value.__name__
    return holder, chain[-1], where


def global_chains(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Each global that ``code`` reads, with the attributes read from it: ``("settings", "TAU")``."""
    chain: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            if chain:
                yield tuple(chain)
            chain = [instruction.argval]
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain.append(instruction.argval)
        elif chain:
            yield tuple(chain)
            chain = []
