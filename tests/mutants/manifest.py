"""The manifest of mutants: what can be wrong, by which operators its wrong versions are made, and what catches them."""

from __future__ import annotations

import passes
from passes import Pass
from passes.update.split_micro_batches import SplitMicroBatches

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
