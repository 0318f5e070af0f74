"""``Refusal``: what an error of compiling says, in parts: the line, the op, the reason, and what to do instead."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from passes.unexpected_errors import REPORT

from ..failed_ops import describe_failed_op
from ..interpreter.source_lines import source_at, user_locations

_PLACE = r"(?P<file>[^\s:(]+\.py):(?P<line>\d+)"
_AT = re.compile(rf"^ +(?:called )?{_PLACE}(?: in (?P<module>[\w.]+))?(?:: .*)?$", re.M)
_IN_TEXT = re.compile(rf" at {_PLACE}(?:: [^\n]*?)?(?=\.? [A-Z]|, (?:which|where|and) | that |$)")
_ANY = re.compile(_PLACE)
_OP = re.compile(r"\b(?:aten|prims|_?c10d_functional|c10d|torch|spmd)\.\w+(?:\.\w+)?\b(?!\()")
_TITLE = re.compile(r"^\S+ cannot be traced into one graph: (?:it )?")
_VALUES = ("DataDependentOutputException", "GuardOnDataDependentSymNode")


@dataclass(frozen=True)
class Refusal:
    """One refusal. ``file`` and ``line``: of the user's code, else where the step is defined.

    ``op``: what is refused, empty where it is no op; ``kind``: of the error that compiling raises, such as
    ``"CaptureError"``; ``message``: all that this says. ``goes_on``: whether the check has looked at what comes behind.
    """

    file: str
    line: int
    source: str
    module: str
    op: str
    reason: str
    alternative: str
    kind: str
    message: str
    goes_on: bool = True

    @property
    def at(self) -> str:
        """The file and the line, as editors take them."""
        return f"{self.file}:{self.line}"

    @classmethod
    def of(cls, error: Exception, function: Callable[..., Any], goes_on: bool = True) -> Refusal:
        """The refusal that ``error`` is, of the step ``function``."""
        message = "\n".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])
        file, line, module = _location(message, error, function)
        reason, alternative = _sentences(message)
        where = (_shown(file), line, source_at(file, line), module)
        return cls(*where, _op(error, message), reason, alternative, type(error).__name__, message, goes_on)


def is_unexpected(error: Exception) -> bool:
    """Whether an error explains one that no code raised on purpose."""
    return REPORT in str(error)


def _location(message: str, error: Exception, function: Callable[..., Any]) -> tuple[str, int, str]:
    """(file, line, module): as the message names it, else of the traceback, else where the step is defined."""
    code = _code_of(function)
    defined = (code.co_filename, code.co_firstlineno) if code is not None else ("", 0)
    for found in (each for pattern in (_AT, _IN_TEXT, _ANY) for each in pattern.finditer(message)):
        place = _file_of(found["file"], code), int(found["line"])
        if place != defined:
            return *place, found.groupdict().get("module") or ""
    if any(frame is code for frame in _codes(error)):
        for file, line in user_locations(error.__traceback__):
            return file, line, ""
    return *defined, ""


def _codes(error: Exception) -> Iterator[CodeType]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame.f_code
        traceback = traceback.tb_next


def _code_of(function: Any) -> CodeType | None:
    function = getattr(function, "__func__", function)
    found = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return found if isinstance(found, CodeType) else None


def _file_of(name: str, code: CodeType | None) -> str:
    """The path of a file that a message names by its last part only."""
    if Path(name).is_absolute():
        return name
    loaded = [code.co_filename] if code is not None else []
    loaded += [str(getattr(module, "__file__", None) or "") for module in [*sys.modules.values()]]
    return next((each for each in loaded if Path(each).name == name), name)


def _shown(file: str) -> str:
    """A path below the current folder without that."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else file


def _op(error: Exception, message: str) -> str:
    """The op: as the error has it, or the message."""
    chain: BaseException | None = error
    while chain is not None:
        if type(chain).__name__ in _VALUES:
            return "the value of a tensor"
        if isinstance(chain, Exception) and (named := describe_failed_op(chain)):
            return named.removeprefix(" at ")
        chain = chain.__cause__ or chain.__context__
    found = _OP.search(_TITLE.sub("", message.split("\n")[0]).split(". ")[0])
    return found.group() if found else ""


def _sentences(message: str) -> tuple[str, str]:
    """(the reason, what to do instead) of a message, without lines of source."""
    text = " ".join(each for each in message.split("\n") if not each.startswith("  "))
    text = _IN_TEXT.sub("", _TITLE.sub("", text)).strip()
    for separator in (r"\. (?=\w)", r": (?=[a-z])"):
        parts = re.split(separator, text, maxsplit=1)
        if len(parts) == 2:
            return parts[0].rstrip("."), f"{parts[1][:1].upper()}{parts[1][1:]}".rstrip(".")
    return text.rstrip("."), ""
