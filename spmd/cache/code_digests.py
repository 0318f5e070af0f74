"""Digests of code, equal in two processes that run the same code: bytecode, constants, names, lines.

``marshal`` writes the same code differently from process to process, and a file on disk need not be what was imported:
what is compared is the code object that would run.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Iterator
from typing import Any

_known: dict[int, tuple[types.CodeType, str]] = {}  # by id; the code is kept alive, so that ids stay unique


def code_digest(code: types.CodeType) -> str:
    """The digest of a code object, with that of all code nested in it."""
    found = _known.get(id(code))
    if found is None:
        found = _known[id(code)] = code, hashlib.sha256(repr(tuple(_parts(code))).encode()).hexdigest()[:32]
    return found[1]


def _parts(code: types.CodeType) -> Iterator[Any]:
    yield code.co_qualname, code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    yield code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    yield code.co_firstlineno, code.co_linetable, code.co_exceptiontable
    yield from map(_constant, code.co_consts)


def _constant(value: Any) -> Any:
    """A constant with its type: ``1`` is not ``1.0``, nor ``True``, and ``0.0`` is not ``-0.0``."""
    if isinstance(value, types.CodeType):
        return code_digest(value)
    if isinstance(value, tuple):
        return ("tuple", *map(_constant, value))
    if isinstance(value, frozenset):
        return ("frozenset", *sorted(map(repr, map(_constant, value))))
    return type(value).__name__, value.hex() if isinstance(value, float) else repr(value)


def nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code objects that one makes functions of, at any depth."""
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield each
            yield from nested_codes(each)
