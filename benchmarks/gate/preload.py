"""Import into this process what both arms import of torch and others, so that it is neither waited for nor measured.

It is most of an import of spmd: two seconds of three. The rest, an arm's own modules and what only one arm imports, is
the figure. Where one arm imports early what the other imports late, nothing of the latter kind is imported here.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Imported:
    """Names of modules, in the order of their imports: after the import of spmd, and after steps were compiled."""

    early: Sequence[str]
    all: Sequence[str]


def common(a: Imported, b: Imported) -> list[str]:
    """The modules that both arms import, and at the same time."""
    same_time = set(a.early) == set(b.early)
    others = set(b.all if same_time else b.early)
    return [name for name in (a.all if same_time else a.early) if name in others]


def preload(names: Sequence[str]) -> None:
    """Import these modules, and keep them out of the way of the collector in forks."""
    for name in names:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
