"""A train step written for one device, compiled for many. All public names; ``help(spmd.compile)`` explains one.

Compile:      compile, CompiledStep, Override, Report
Modes:        DataParallel, Auto, DTensorExpand, ParallelMode, PlannedMode, Plan
Annotations:  replicate, fully_shard, MixedPrecisionPolicy, OffloadPolicy, no_sync, constrain, contract
State:        materialize, unshard, state_dict, save, load, export
Ranks, data:  world, data_rank, pad_to_longest, shared_rng, seed, rng_state, set_rng_state
See, prove:   verify, Verdict, certify, Certificate, show, plan, Plans
Placements:   register_rule, partition, Problem, Solver, Assignment, Choice, Program
Errors:       SpmdError, CaptureError, PlacementError, PartitionError, PassError, MemoryBudgetError,
              RankMismatchError, RankFailedError
"""

import sys
from importlib import import_module
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
    """Import the public names, and torch, at the first look at one: ``spmd --help`` needs neither."""
    if name == "__all__" or not name.startswith("_"):
        public = import_module(".public", __name__)
        globals().update({each: getattr(public, each) for each in public.__all__}, __all__=public.__all__)
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(__getattr__("__all__"))


sys.modules[__name__].__class__ = _Package
