"""Micro-batches: a mesh axis whose parts run one after the other instead of on ranks of their own.

The partitioner splits the batch over it with the rules that it has, and leaves sums along it pending; these become
accumulators. So a loss is scaled by global counts, and an update sees whole gradients, by construction.
"""

OWNS = (
    *("micro_batches", "accumulate_dtype", "chooses_runs", "gathers_once"),
    *("MicroBatches", "SplitMicroBatches", "GatherOnce", "accumulating", "opening", "idle_runs", "of_run", "in_run"),
    *("added_to", "earlier_runs", "in_time", "new_accumulators", "empty_accumulators", "sums_of_runs"),
    *("ACCUMULATOR", "GATHERED_ONCE", "REDUCED_ONCE", "RUN_NUMBER", "TIME_AXIS", "TIME_AXIS_LAST"),
)
"""Identifiers of this feature. No further file outside of it may name one (``tests/test_structure.py``)."""
