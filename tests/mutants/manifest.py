"""The manifest of mutants: what can be wrong, how its wrong versions are made, and what catches them.

Each table has an entry for every thing of its kind that there is; the test beside it fails for one without.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import passes
from passes import Pass
from passes.ir.collectives import c10d
from passes.runtime import coalesced_collectives, message_collectives, shared_memory_collectives
from passes.update.split_micro_batches import SplitMicroBatches
from spmd.rules import RULES
from tests.spmd.verification.stream_mutants import KINDS

from .entries import COMPARISONS
from .facts import FACTS
from .graphs import OPERATORS
from .guards import GUARDS
from .lowerings import LOWERINGS
from .published import PUBLISHED
from .rules import OPERATORS as OF_RULES

PASSES: dict[type[Pass], str] = {
    passes.DropProfiler: "replicate",
    passes.DropDetach: "replicate",
    passes.FoldViews: "replicate",
    passes.MergeEqual: "replicate",
    passes.DeadCode: "replicate",
    passes.FormUnits: "replicate",
    passes.Reshard: "resharded",
    passes.BucketAllGather: "fully_shard",
    passes.BucketReduceScatter: "fully_shard",
    passes.BucketAllReduce: "hybrid",
    passes.OneStorage: "replicate",
    passes.FuseUpdate: "replicate",
    passes.FuseForeach: "RMSprop",
    passes.Realise: "hybrid",
    passes.StartEarly: "replicate",
    passes.WaitLate: "replicate",
    passes.UpdateLast: "replicate",
    passes.Overlap: "a backward",
    passes.UpdateInPlace: "replicate",
    passes.ReduceInPlace: "in place",
    passes.Canonicalize: "replicate",
    passes.FoldLayoutCopies: "a stack",
    passes.ReuseMemory: "replicate",
    SplitMicroBatches: "micro-batches",
    passes.DeviceNumbers: "numbers on the device",
    passes.FormRegions: "regions",
    passes.FormIslands: "islands",
    passes.SplitUpdate: "split update",
    passes.Recompute: "recomputed",
}
"""Each pass, and the programs on which operators make wrong versions of it. The checker or the numbers catch them."""

_MESSAGES, _MEMORY, _LAUNCHES = (
    each.OUT_VARIANTS for each in (message_collectives, shared_memory_collectives, coalesced_collectives)
)
_BY_ALGORITHM: dict[Any, str] = {
    c10d.all_reduce.default: "native",
    c10d.all_gather_into_tensor.default: "native",
    c10d.reduce_scatter_tensor.default: "native",
    message_collectives.exchange.default: "broadcast",
    message_collectives.gather_by_broadcast.default: "broadcast",
    message_collectives.swap.default: "sending",
    message_collectives.gather_by_sending.default: "sending",
    **dict.fromkeys(_MEMORY, "shared"),
    **dict.fromkeys(_LAUNCHES, "one launch"),
}
_OUT = _MESSAGES | _MEMORY | _LAUNCHES
COLLECTIVES: dict[Any, tuple[type[Pass], str]] = {
    **{op: (passes.UpdateLast, base) for op, base in _BY_ALGORITHM.items()},
    **{_OUT[op]: (passes.ReuseMemory, base) for op, base in _BY_ALGORITHM.items()},
    c10d.broadcast.default: (passes.DropDetach, "rows"),
    c10d.all_to_all_single.default: (passes.DropDetach, "rows"),
    _OUT[c10d.all_to_all_single.default]: (passes.ReuseMemory, "rows in planned memory"),
}
"""Each op that communicates, and the pass behind which a base has it. The checker or the numbers catch its mutants."""

SCHEDULED: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {},
    "zb-h1": {},
    "interleaved": {"stages": ("b", "c", "d"), "micro_batches": 4},
}
"""Each schedule, and the mode of a pipeline that has it. The proof of a bundle or the numbers catch wrong orders."""


@dataclass(frozen=True)
class Section:
    """Things of a kind, the operators that make wrong versions of each, what catches these, and its test."""

    things: Collection[Any]
    operators: Collection[str]
    caught_by: str
    test: str


def _names(functions: Any) -> list[str]:
    return [each.__name__ for each in functions]


MANIFEST: dict[str, Section] = {
    "pass": Section(PASSES, OPERATORS, "the checker, or the verifier's numbers", "mutants/test_passes.py"),
    "collective": Section(COLLECTIVES, OPERATORS, "the checker, or the verifier's numbers", "mutants/test_passes.py"),
    "published bug": Section(
        PUBLISHED, ("by hand",), "the verifier, at its stage; no certificate", "spmd/verification/test_mutants.py"
    ),
    "rule": Section({*RULES.values()}, _names(OF_RULES), "the check of all options", "mutants/test_rules.py"),
    "lowering": Section(LOWERINGS, ("by hand",), "numbers beside the plain step", "mutants/test_lowerings.py"),
    "schedule": Section(
        SCHEDULED,
        ("dropped_programs", "repeated_programs", "of_other_ranks", "backwards"),
        "the proof of the bundle, or its numbers",
        "mutants/test_schedules.py",
    ),
    "order on streams": Section(KINDS, _names(KINDS), "the proof of streams", "spmd/verification/test_streams.py"),
    "guard": Section(GUARDS, ("dropped", "stale"), "a call that must not be admitted", "mutants/test_guards.py"),
    "fact of a cache": Section(FACTS, ("dropped",), "a key that must be another", "mutants/test_facts.py"),
    "comparison of an entry": Section(
        COMPARISONS, ("dropped",), "a process that must not start warm", "mutants/test_entries.py"
    ),
}
"""All of it. What is made by hand is an edit of its own; operators make theirs at nodes drawn by seed."""
