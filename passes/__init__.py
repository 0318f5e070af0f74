"""The lower layer of ``spmd``: what a program is, how it is checked, printed, run and measured, and the passes.

Usable on its own, on any FX graph with functional collectives: ``Program.from_graph(graph_module, roles=...)``. All
public names; ``help(passes.run)`` explains one.

Run them:       run, default, with_islands, with_numbers_on_device, with_regions, Pass, Fact, facts_of
Programs:       Program, Input, Output, OutputKind, Part, Mesh, Axis, AxisRole, Role, InputSource, Holds, Phase, Memory,
                Region, Island
Look at one:    check, interpret, print_program, fill_vals, Diff, PURE_FUNCTIONS
Cleanup:        DeadCode, DropDetach, DropProfiler, FoldViews, MergeEqual
Communication:  BucketAllGather, BucketAllReduce, BucketReduceScatter, FormUnits, Realise, Reshard, StartEarly,
                WaitLate, Collective, Kind
Memory:         Canonicalize, FoldLayoutCopies, OneStorage, Recompute, ReduceInPlace, ReuseMemory, UpdateInPlace,
                LiveValue, PlannedMemory
Update:         DeviceNumbers, FuseForeach, FuseUpdate, SplitUpdate, UpdateLast
Schedule:       Overlap, estimate, Timeline, Table, published
Regions:        FormIslands, FormRegions
Reports:        Report, EstimatedTime, OneCollective, PassEffect
Errors:         SpmdError, CaptureError, PlacementError, PartitionError, PassError, MemoryBudgetError,
                RankMismatchError, RankFailedError
"""

import sys
from types import ModuleType
from typing import Any

from .analysis.collective_algorithms import Table
from .base import Fact, Pass, facts_of
from .cleanup.dead_code import DeadCode
from .cleanup.drop_detach import DropDetach
from .cleanup.drop_profiler import DropProfiler
from .cleanup.fold_views import FoldViews
from .cleanup.merge_equal import MergeEqual
from .communication.bucket_all_gather import BucketAllGather
from .communication.bucket_all_reduce import BucketAllReduce
from .communication.bucket_reduce_scatter import BucketReduceScatter
from .communication.form_units import FormUnits
from .communication.realise import Realise
from .communication.reshard import Reshard
from .communication.start_early import StartEarly
from .communication.wait_late import WaitLate
from .default_passes import default, with_islands, with_numbers_on_device, with_regions
from .errors import (
    CaptureError,
    MemoryBudgetError,
    PartitionError,
    PassError,
    PlacementError,
    RankFailedError,
    RankMismatchError,
    SpmdError,
)
from .ir.check import check
from .ir.collectives import Collective, Kind
from .ir.dump_diff import Diff
from .ir.infer_shapes import fill_vals
from .ir.interpret import interpret
from .ir.ops import PURE_FUNCTIONS
from .ir.printer import print_program
from .ir.program import Axis, Input, Mesh, Output, OutputKind, Part, Program
from .ir.region import Island, Region
from .ir.roles import AxisRole, Holds, InputSource, Memory, Phase, Role
from .memory.canonicalize import Canonicalize
from .memory.fold_layout_copies import FoldLayoutCopies
from .memory.one_storage import OneStorage
from .memory.peak_memory import LiveValue, PlannedMemory
from .memory.recompute import Recompute
from .memory.reduce_in_place import ReduceInPlace
from .memory.reuse_memory import ReuseMemory
from .memory.update_in_place import UpdateInPlace
from .regions.form_islands import FormIslands
from .regions.form_regions import FormRegions
from .report import EstimatedTime, OneCollective, PassEffect, Report
from .runner import run
from .schedule.estimate import estimate
from .schedule.gpus import published
from .schedule.overlap import Overlap
from .schedule.simulation import Timeline
from .update.device_numbers import DeviceNumbers
from .update.fuse_foreach import FuseForeach
from .update.fuse_update import FuseUpdate
from .update.split_update import SplitUpdate
from .update.update_last import UpdateLast

__all__ = [
    "PURE_FUNCTIONS",
    "Axis",
    "AxisRole",
    "BucketAllGather",
    "BucketAllReduce",
    "BucketReduceScatter",
    "Canonicalize",
    "CaptureError",
    "Collective",
    "DeadCode",
    "DeviceNumbers",
    "Diff",
    "DropDetach",
    "DropProfiler",
    "EstimatedTime",
    "Fact",
    "FoldLayoutCopies",
    "FoldViews",
    "FormIslands",
    "FormRegions",
    "FormUnits",
    "FuseForeach",
    "FuseUpdate",
    "Holds",
    "Input",
    "InputSource",
    "Island",
    "Kind",
    "LiveValue",
    "Memory",
    "MemoryBudgetError",
    "MergeEqual",
    "Mesh",
    "OneCollective",
    "OneStorage",
    "Output",
    "OutputKind",
    "Overlap",
    "Part",
    "PartitionError",
    "Pass",
    "PassEffect",
    "PassError",
    "Phase",
    "PlacementError",
    "PlannedMemory",
    "Program",
    "RankFailedError",
    "RankMismatchError",
    "Realise",
    "Recompute",
    "ReduceInPlace",
    "Region",
    "Report",
    "Reshard",
    "ReuseMemory",
    "Role",
    "SplitUpdate",
    "SpmdError",
    "StartEarly",
    "Table",
    "Timeline",
    "UpdateInPlace",
    "UpdateLast",
    "WaitLate",
    "check",
    "default",
    "estimate",
    "facts_of",
    "fill_vals",
    "interpret",
    "print_program",
    "published",
    "run",
    "with_islands",
    "with_numbers_on_device",
    "with_regions",
]


class _Package(ModuleType):
    """This package, of which ``help`` shows the docstring: ``pydoc`` would list all files, and what each name has."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("__path__", "__all__") and sys._getframe(1).f_globals.get("__name__") == "pydoc":
            if name == "__path__":
                raise AttributeError(name)
            return ()
        return super().__getattribute__(name)


def __dir__() -> list[str]:
    return sorted(__all__)


sys.modules[__name__].__class__ = _Package
