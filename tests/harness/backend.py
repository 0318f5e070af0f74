"""The backend of steps for which a test names none: ``pytest --backend inductor``, which takes all islands."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import wraps
from typing import Any

from spmd.lowering import islands
from spmd.options import Options


def take_backend() -> None:
    """Compile by the backend that ``pytest`` was given, in this process and its forks.

    Islands that are slower are taken, too, so that none has to be timed. Steps with ``bits="same"`` stay with aten.
    """
    if os.environ.get("TESTS_BACKEND", "aten") != "inductor":
        return
    checked = Options.check

    @wraps(checked)
    def check(*given: Any, **named: Any) -> Options:
        options = checked(*given, **named)
        has_other = options.backend != "aten" or options.mode.bits is not None
        return options if has_other else replace(options, backend="inductor")

    Options.check = check  # type: ignore[method-assign]
    islands._LEAST_GAIN, islands.seconds_of = 0.0, lambda island, compiles: (1.0, 1.0)
