"""Calls of ``logging`` in a step: recorded while it is traced, and made by each call of its program.

They are recorded whatever the level of the logger is, so that ranks that log at other levels have one program; each
call looks at the level anew.
"""

from __future__ import annotations

import logging
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...interpreter.foreign_code import is_foreign_file, is_library_file

_FILE = logging.Logger.info.__code__.co_filename
_LEVELS = {
    **{"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "warn": logging.WARNING},
    **{"error": logging.ERROR, "critical": logging.CRITICAL, "fatal": logging.CRITICAL, "log": None},
}

Record = Callable[["LogCall", tuple[Any, ...], dict[str, Any], types.FrameType], None]


@dataclass(frozen=True)
class LogCall:
    """A logger with a level and the user's line, which each record names."""

    logger: logging.Logger
    level: int
    file: str
    line: int
    function: str

    @property
    def name(self) -> str:
        """The name of the logger."""
        return f"the logger {self.logger.name}"

    def find(self, arguments: Any) -> LogCall:
        """Itself, whatever the arguments of a call."""
        return self

    def log(self, message: Any, *args: Any, extra: dict[str, Any] | None = None) -> None:
        """Log with the values of a call, as if its line did."""
        if self.logger.isEnabledFor(self.level):
            made = self.logger.makeRecord(
                self.logger.name, self.level, self.file, self.line, message, args, None, self.function, extra
            )
            self.logger.handle(made)


@contextmanager
def recorded_logging(record: Record) -> Iterator[None]:
    """Record what the user's own code logs, for the length of the context; libraries log at once.

    A call with ``exc_info`` or ``stack_info`` speaks of the trace, and is made at once, too.
    """
    before = {name: getattr(logging.Logger, name) for name in _LEVELS}
    for name, method in before.items():
        setattr(logging.Logger, name, _recording(method, _LEVELS[name], record))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(logging.Logger, name, method)


def _recording(method: Callable[..., Any], level: int | None, record: Record) -> Callable[..., Any]:
    thread = threading.get_ident()

    def log(logger: logging.Logger, *args: Any, **kwargs: Any) -> Any:
        frame = _caller(sys._getframe(1))
        file = frame.f_code.co_filename
        is_users = threading.get_ident() == thread and not is_foreign_file(file) and not is_library_file(file)
        if not is_users or kwargs.keys() - {"extra", "stacklevel"} or len(args) < (2 if level is None else 1):
            return method(logger, *args, **kwargs)
        kwargs.pop("stacklevel", None)
        number, given = (args[0], args[1:]) if level is None else (level, args)
        code = frame.f_code
        record(LogCall(logger, number, file, frame.f_lineno, code.co_name), given, kwargs, frame)
        return None

    return log


def _caller(frame: types.FrameType) -> types.FrameType:
    """The innermost frame that is none of ``logging`` itself."""
    while frame.f_code.co_filename == _FILE and frame.f_back is not None:
        frame = frame.f_back
    return frame
