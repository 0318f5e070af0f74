"""The lower layer of ``spmd``: what a program is, how it is checked, printed, run and measured, and the passes.

Usable on its own, on any FX graph with functional collectives: ``Program.from_graph(graph_module, roles=...)``.
"""

from .base import Pass
from .bucket_all_gather import BucketAllGather
from .bucket_all_reduce import BucketAllReduce
from .bucket_reduce_scatter import BucketReduceScatter
from .check import check
from .collectives import Collective, Kind
from .costs import Table
from .dead_code import DeadCode
from .drop_detach import DropDetach
from .drop_profiler import DropProfiler
from .errors import CaptureError, PartitionError, PassError, PlacementError, RankMismatchError, SpmdError
from .fold_views import FoldViews
from .form_units import FormUnits
from .fuse_update import FuseUpdate
from .infer import fill_vals
from .interpret import interpret
from .merge_equal import MergeEqual
from .one_storage import OneStorage
from .pipeline import default
from .printer import print_program
from .program import Axis, Input, Mesh, Output, OutputKind, Part, Program
from .purity import PURE_FUNCTIONS
from .realise import Realise
from .report import Report
from .reuse_memory import ReuseMemory
from .roles import Phase, Role
from .runner import run
from .split_update import SplitUpdate
from .start_early import StartEarly
from .update_in_place import UpdateInPlace
from .wait_late import WaitLate

__all__ = [
    "PURE_FUNCTIONS",
    "Axis",
    "BucketAllGather",
    "BucketAllReduce",
    "BucketReduceScatter",
    "CaptureError",
    "Collective",
    "DeadCode",
    "DropDetach",
    "DropProfiler",
    "FoldViews",
    "FormUnits",
    "FuseUpdate",
    "Input",
    "Kind",
    "MergeEqual",
    "Mesh",
    "OneStorage",
    "Output",
    "OutputKind",
    "Part",
    "PartitionError",
    "Pass",
    "PassError",
    "Phase",
    "PlacementError",
    "Program",
    "RankMismatchError",
    "Realise",
    "Report",
    "ReuseMemory",
    "Role",
    "SplitUpdate",
    "SpmdError",
    "StartEarly",
    "Table",
    "UpdateInPlace",
    "WaitLate",
    "check",
    "default",
    "fill_vals",
    "interpret",
    "print_program",
    "run",
]
