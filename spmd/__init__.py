"""A train step written for one device, compiled for many. All public names; ``help(spmd.compile)`` explains one.

Compile:      compile, CompiledStep, Override, Report
Modes:        DataParallel, Auto, DTensorExpand, ParallelMode, PlannedMode, Plan
Annotations:  replicate, fully_shard, MixedPrecisionPolicy, OffloadPolicy, no_sync, constrain, contract
State:        materialize, from_pretrained, unshard, generate, state_dict, save, load, export,
              publish, subscribe
Ranks, data:  world, data_rank, pad_to_longest, shared_rng, seed, rng_state, set_rng_state
See, prove:   verify, Verdict, certify, Certificate, show, plan, Plans
Placements:   register_rule, partition, Problem, Solver, Assignment, Choice, Program
Errors:       SpmdError, CaptureError, PlacementError, PartitionError, PassError, MemoryBudgetError,
              RankMismatchError, RankFailedError
"""

import ast
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from .public import *  # noqa: F403 (its names are listed there)


class _Package(ModuleType):
    """This package, of which ``help`` shows the docstring: ``pydoc`` would list all files, and what each name has."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("__path__", "__all__") and sys._getframe(1).f_globals.get("__name__") == "pydoc":
            if name == "__path__":
                raise AttributeError(name)
            return ()
        return super().__getattribute__(name)


def __getattr__(name: str) -> Any:
    """Import what one public name needs, at the first look at it: ``spmd --help`` needs nothing, not even torch."""
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _without_collections():
        place = _places().get(name, "public")
        found = __import__(place if place == "passes" else f"{__name__}.{place}", fromlist=[name])
        if place == "public":  # a list of all names, or a module of this package
            globals()["__all__"] = found.__all__
    if name not in globals():
        if not hasattr(found, name):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = getattr(found, name)
    return globals()[name]


@cache
def _places() -> dict[str, str]:
    """The module of each public name, as ``public.py`` imports it, which is read here and not run."""
    tree = ast.parse(Path(__file__).with_name("public.py").read_text(encoding="utf-8"))
    imports = [line for line in tree.body if isinstance(line, ast.ImportFrom)]
    return {each.name: line.module or "" for line in imports for each in line.names}


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keep the collector of garbage from all that torch has made, which imports would have it look through: 0.2 s."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def __dir__() -> list[str]:
    return sorted(__getattr__("__all__"))


sys.modules[__name__].__class__ = _Package
