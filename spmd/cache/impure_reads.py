"""Names in the step's code by which it could read what no guard sees: the environment, files, the host, the clock.

A compiled step keeps such a value for as long as the process lives. Another process would have another one, so a step
whose code names one of them is not cached.
"""

from __future__ import annotations

import builtins
import dis
import re
import types
from collections.abc import Iterable, Iterator
from typing import Any

from ..call.state import SCHEDULER_NOTES
from ..interpreter.foreign_code import is_foreign_module
from ..python_state.reads import MISSING, Reads, global_chains
from .described import UNSAFE, check_module
from .library_code import is_of_library
from .not_cached import NotCachedError

_UNWATCHED = frozenset(  # attributes by which code reads past what watches it
    "__dict__ __getattribute__ __closure__ cell_contents __globals__ __builtins__ f_locals f_globals f_back gi_frame "
    "__subclasses__ __annotate__ attrgetter methodcaller initial_seed get_rng_state from_file getLogger".split()
)
_DEFAULTS = {"defaults"}  # of an optimizer; of floats there, and among notes of schedulers, only types are compared
_READS_ATTRIBUTES = re.compile(r"\{\w*[.\[]")  # of what is formatted


def globals_of(reads: Reads) -> Iterator[tuple[dict[str, Any], str]]:
    """(namespace, name) of each global that code of the step names. Raises ``NotCachedError`` for what reads more.

    That of libraries may read more (``library_code.py``).
    """
    seen = set[tuple[int, str]]()
    for code, namespace in zip(reads.code, reads.namespaces, strict=True):
        if is_of_library(namespace.get("__name__")):
            named = {(id(namespace), chain[0]): (namespace, chain[0]) for chain in global_chains(code)}
            yield from (each for key, each in named.items() if key not in seen)
            seen |= {*named}
            continue
        texts = [each for each in code.co_consts if isinstance(each, str)]
        if unwatched := _UNWATCHED.intersection((*code.co_names, *texts)):
            raise NotCachedError(f"the step's code names {min(unwatched)}, by which it reads what is not watched")
        if of_schedulers := SCHEDULER_NOTES.intersection(texts) | _DEFAULTS.intersection(code.co_names):
            raise NotCachedError(f"the step's code names {min(of_schedulers)}, whose numbers are not compared")
        if any(map(_READS_ATTRIBUTES.search, texts)) and {"format", "format_map"} & {*code.co_names}:
            raise NotCachedError(f"{code.co_qualname} formats a text with attributes in it")
        if _computes_a_name(code):
            raise NotCachedError(f"{code.co_qualname} calls getattr with a name that is no constant, or passes it on")
        _check_imports(code)
        for chain in global_chains(code):
            value = namespace.get(chain[0], MISSING)
            if value is MISSING:
                _check_builtin(chain[0])
            for space, key in [(namespace, chain[0]), *_through_modules(chain, value)]:
                if (id(space), key) not in seen:
                    seen.add((id(space), key))
                    yield space, key


def _check_imports(code: types.CodeType) -> None:
    """Raise ``NotCachedError`` for an import of the user's own: in this process it may not have happened yet."""
    level, module = 0, ""
    instructions = [*dis.get_instructions(code)]
    for k, each in enumerate(instructions):
        if each.opname == "IMPORT_NAME":
            level, module = instructions[k - 2].argval, each.argval
            if level or not is_foreign_module(module):
                raise NotCachedError(f"{code.co_qualname} imports {module or 'from its package'} when it is called")
            check_module(module, module)
        elif each.opname == "IMPORT_FROM":
            check_module(f"{module}.{each.argval}", f"{module}.{each.argval}")


def _computes_a_name(code: types.CodeType) -> bool:
    """Whether code may read an attribute by a name that does not stand in it: of a class or a module nobody sees that.

    A name stands there if it is a constant that the call takes as it is: pushed in second place, and left alone.
    """
    instructions = [*dis.get_instructions(code)]
    return any(
        each.argval in ("getattr", "hasattr")
        and each.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        and not _has_constant_name(instructions[k + 1 :])
        for k, each in enumerate(instructions)
    )


def _has_constant_name(instructions: Iterable[dis.Instruction]) -> bool:
    """Whether the arguments of a call, which ``instructions`` begin with, have a constant in second place."""
    depth, is_constant = 0, False
    for k, each in enumerate(instructions):
        if k == 0 and each.opname == "PUSH_NULL":  # of the call itself, in 3.13
            continue
        if each.opname in ("PRECALL", "CALL") and depth == each.arg:
            return is_constant and depth in (2, 3)
        before, depth = depth, depth + dis.stack_effect(each.opcode, each.arg, jump=False)
        if depth < 1 or each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
            return False
        if depth <= 2:
            is_constant = (before, depth) == (1, 2) and each.opname == "LOAD_CONST"
    return False


def _check_builtin(name: str) -> None:
    if name in UNSAFE and name in vars(builtins):
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
