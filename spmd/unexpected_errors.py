"""Turn an exception inside spmd that no code raised on purpose into one of ours, which says where and how to report it.

What the user's step raises stays as it is, and so does what tells users what they can do: our errors, wrong arguments,
a lost rank, memory or a file that is not to be had. What an extension of the user's raises, such as a rule or a mode,
becomes the cause of an error of ours that names the extension.
"""

from __future__ import annotations

import dis
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import TypeGuard

import torch
import torch.distributed as dist

import passes
from passes import CaptureError, PartitionError, PassError, SpmdError
from passes.runtime.peer_connection import PeerLostError
from passes.unexpected_errors import describe_op, explained

from .interpreter.foreign_code import is_foreign_frame
from .interpreter.source_lines import source_at, user_locations

_OURS = tuple(f"{path.absolute()}{os.sep}" for path in (Path(__file__).parent, Path(passes.__file__).parent))
_PROGRAM = "<spmd program"  # the file of generated code
_OF_NO_EXTENSION = (SpmdError, PeerLostError, dist.DistError, MemoryError, torch.OutOfMemoryError)
_EXPECTED = (*_OF_NO_EXTENSION, OSError)
_WRONG_ARGUMENTS = (TypeError, ValueError)
# The stages that call the user's rules, modes, overrides, transforms and backends, which raise errors of their own.
_DOES = {"capture": "captured", "partition": "partitioned", "passes": "rewrote", "lower": "lowered"}
_KINDS = {"capture": CaptureError, "partition": PartitionError, "passes": PassError, "lower": PassError}
_USERS = "_spmd_users"  # the attribute of an error that the user's own code raised while it was traced
_EXTENSION = "_spmd_extension"  # the attribute of an error of ours that an error of a user's extension is the cause of


@contextmanager
def unexpected_errors(
    stage: str, name: str, where: str = "", before: Callable[[], Iterable[str]] = tuple
) -> Iterator[None]:
    """Raise one of our errors for an unexpected one in a stage of ``name``, with ``before`` as notes.

    ``where`` is added if no op is known that the stage was at.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, PassError):  # the runner knows no step
            _note(error, f"while {name} was compiled{where}")
        if is_expected(error):
            is_its_own = not isinstance(error, _EXPECTED) and not is_ours(deepest_frame(error))
            is_its_own = is_its_own or vars(error).get(_EXTENSION, False)
            if stage in _DOES and is_its_own and not is_users(error):
                op = describe_op(error.__traceback__, where)
                _note(error, f"raised while spmd {_DOES[stage]} {name}{op}\nnothing was changed")
            raise
        raise explained(_KINDS.get(stage, SpmdError), f"{stage} of {name}", error, where, before()) from error


@contextmanager
def errors_of(kind: type[SpmdError], extension: str, may_be_ours: bool = False) -> Iterator[None]:
    """Raise an error of ``kind`` from what a user's ``extension`` raises: its name, the error, and the line.

    Errors of ours pass, and a lost rank or memory. ``may_be_ours``: the body is no code of the user's alone, and what
    code of ours raises is no error of the extension.
    """
    try:
        yield
    except _OF_NO_EXTENSION as error:
        vars(error).setdefault(_EXTENSION, not may_be_ours)
        raise
    except Exception as error:
        if may_be_ours and is_ours(deepest_frame(error)):
            raise
        own = user_locations(error.__traceback__)
        line = f"\n    {own[0][0]}:{own[0][1]}: {source_at(*own[0])}" if own else ""
        raised = kind(f"{extension} raised {type(error).__name__}: {error}".removesuffix(": ") + line)
        vars(raised)[_EXTENSION] = True
        raise raised from error


def _note(error: Exception, sentence: str) -> None:
    """Add a note once: stages are nested."""
    if sentence not in getattr(error, "__notes__", []):
        error.add_note(sentence)


def is_expected(error: Exception) -> bool:
    """Whether an error is the user's own, or says what the user can do."""
    if isinstance(error, _EXPECTED) or _USERS in vars(error):
        return True
    if not is_ours(deepest_frame(error)):
        return True  # the user's code, or an op of the program: on the data of this call
    *_, (last, instruction) = _frames(error.__traceback__)
    is_raised = dis.opname[last.f_code.co_code[instruction]] == "RAISE_VARARGS"
    return isinstance(error, _WRONG_ARGUMENTS) and is_ours(last) and is_raised


def deepest_frame(error: Exception) -> FrameType | None:
    """The innermost frame of an error's traceback that is not of torch or of Python's library."""
    frames = [frame for frame, _ in _frames(error.__traceback__) if not _is_foreign(frame)]
    return frames[-1] if frames else None


def is_ours(frame: FrameType | None) -> TypeGuard[FrameType]:
    """Whether a frame runs code of this project."""
    return frame is not None and frame.f_code.co_filename.startswith(_OURS)


def mark_as_users(error: Exception) -> None:
    """Note that the user's own code raised an error."""
    vars(error)[_USERS] = True


def is_users(error: Exception) -> bool:
    """Whether an error is known to be of the user's own code."""
    return _USERS in vars(error)


def _frames(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """The frames from the outermost on, each with the instruction that it was at."""
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lasti
        traceback = traceback.tb_next


def _is_foreign(frame: FrameType) -> bool:
    """Whether a frame is of torch or of Python's library, which raise on behalf of who called them."""
    return is_foreign_frame(frame) and not frame.f_code.co_filename.startswith((*_OURS, _PROGRAM))
