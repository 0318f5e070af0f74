"""spmd: a train step written for one device, compiled for many."""

from passes import (
    CaptureError,
    PartitionError,
    PassError,
    PlacementError,
    Program,
    RankMismatchError,
    Report,
    SpmdError,
)

from .constrain import constrain
from .data_parallel import DataParallel
from .dtensor_expand import DTensorExpand
from .modes import ParallelMode, PlannedMode
from .override import Override
from .partition import partition
from .plan import Plan
from .randomness import rng_state, seed, set_rng_state
from .rules import register_rule
from .step import CompiledStep, compile
from .world import world

__all__ = [
    "CaptureError",
    "CompiledStep",
    "DTensorExpand",
    "DataParallel",
    "Override",
    "ParallelMode",
    "PartitionError",
    "PassError",
    "PlacementError",
    "Plan",
    "PlannedMode",
    "Program",
    "RankMismatchError",
    "Report",
    "SpmdError",
    "compile",
    "constrain",
    "partition",
    "register_rule",
    "rng_state",
    "seed",
    "set_rng_state",
    "world",
]
