"""``run``: execute a file that ends with ``spmd.verify``, and classify how it ended."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import traceback
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from passes import SpmdError
from passes.unexpected_errors import REPORT

from ..call.rng import random_state_kept
from ..unexpected_errors import is_expected
from ..verification.verdict import Verdict

Kind = Literal["agreed", "refused", "failed"]
_NAME = "fuzzed_step"


@dataclass(frozen=True)
class Outcome:
    """The end of a file's run. ``reason``: the refusal, or what fails, in one line, without the names of this step.

    ``details``: all that there is to know of a failure.
    """

    kind: Kind
    reason: str = ""
    details: str = ""


def run(path: Path) -> Outcome:
    """Execute the file as ``python FILE`` does, but in this process."""
    module = types.ModuleType(_NAME)
    module.__file__, before = str(path), sys.modules.get(_NAME)
    sys.modules[_NAME] = module
    try:
        with random_state_kept():
            exec(compile(path.read_text(), str(path), "exec"), vars(module))
    except AssertionError as error:
        verdict = vars(module).get("verdict")
        return _differs(verdict) if isinstance(verdict, Verdict) else _raised(error)
    except Exception as error:  # the command goes on with the next step
        return _raised(error)
    finally:
        sys.modules.pop(_NAME)
        if before is not None:
            sys.modules[_NAME] = before
    return Outcome("agreed")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Neither output nor warnings: there is one of each kind for each of many steps."""
    quiet = os.environ.get("SPMD_QUIET")
    os.environ["SPMD_QUIET"] = "1"
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.pop("SPMD_QUIET")
        if quiet is not None:
            os.environ["SPMD_QUIET"] = quiet


def _differs(verdict: Verdict) -> Outcome:
    return Outcome("failed", f"wrong values after {verdict.stage or 'the step'}", str(verdict))


def _raised(error: Exception) -> Outcome:
    """A refusal is one of our errors that explains itself, or one of wrong arguments that we raise."""
    first = str(error).partition("\n")[0]
    details = "".join(traceback.format_exception(error))
    if isinstance(error, SpmdError) and REPORT not in str(error):
        return Outcome("refused", _general(first), details)
    if isinstance(error, (TypeError, ValueError)) and is_expected(error) and _is_ours(error):
        return Outcome("refused", _general(first), details)
    return Outcome("failed", _general(f"{type(error).__name__}: {first}"), details)


def _is_ours(error: Exception) -> bool:
    """Whether this project raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return last.startswith(str(Path(__file__).parents[1]) + os.sep)


def _general(text: str) -> str:
    """Without numbers, paths and the names of values, so that two steps with one problem have one reason."""
    text = re.sub(r"\S*fuzzed\S*\.py:\d+", "FILE", text)
    return re.sub(r"_?\d[\w.]*", "#", text).strip()[:200]
