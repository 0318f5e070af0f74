"""The public names of ``spmd``, as a table: each imports what it needs at the first look at it (``__init__.py``)."""

from passes import (
    CaptureError,
    MemoryBudgetError,
    PartitionError,
    PassError,
    PlacementError,
    Program,
    RankFailedError,
    RankMismatchError,
    Report,
    SpmdError,
)

from .annotations import contract
from .annotations.apply import fully_shard, replicate
from .annotations.no_sync import no_sync
from .annotations.policies import MixedPrecisionPolicy, OffloadPolicy
from .call.rng import rng_state, seed, set_rng_state
from .capture.constraint import constrain
from .checkpoints.export import export
from .checkpoints.load import from_pretrained, load
from .checkpoints.save import save
from .checkpoints.whole import state_dict
from .decorator import compile
from .generation.generate import generate
from .initialized import materialize
from .mesh_picture import show
from .modes.auto import Auto
from .modes.base import ParallelMode, PlannedMode
from .modes.data_parallel import DataParallel
from .modes.data_rank import data_rank
from .modes.dtensor_expand import DTensorExpand
from .override import Override
from .partitioner import partition
from .partitioner.assignment import Assignment, Choice
from .partitioner.plan import Plan
from .partitioner.solvers.problem import Problem
from .partitioner.solvers.solver import Solver
from .planning.plans import Plans
from .planning.search import plan
from .publishing.publish import publish
from .publishing.subscribe import subscribe
from .ranks.agreed import pad_to_longest, shared_rng
from .ranks.world import world
from .rules import register_rule
from .step import CompiledStep
from .unsharded import unshard
from .verification.certificate import Certificate
from .verification.certify import certify
from .verification.verdict import Verdict
from .verification.verifier import verify

__all__ = [
    "Assignment",
    "Auto",
    "CaptureError",
    "Certificate",
    "Choice",
    "CompiledStep",
    "DTensorExpand",
    "DataParallel",
    "MemoryBudgetError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Override",
    "ParallelMode",
    "PartitionError",
    "PassError",
    "PlacementError",
    "Plan",
    "PlannedMode",
    "Plans",
    "Problem",
    "Program",
    "RankFailedError",
    "RankMismatchError",
    "Report",
    "Solver",
    "SpmdError",
    "Verdict",
    "certify",
    "compile",
    "constrain",
    "contract",
    "data_rank",
    "export",
    "from_pretrained",
    "fully_shard",
    "generate",
    "load",
    "materialize",
    "no_sync",
    "pad_to_longest",
    "partition",
    "plan",
    "publish",
    "register_rule",
    "replicate",
    "rng_state",
    "save",
    "seed",
    "set_rng_state",
    "shared_rng",
    "show",
    "state_dict",
    "subscribe",
    "unshard",
    "verify",
    "world",
]
