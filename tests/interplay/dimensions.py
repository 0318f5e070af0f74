"""The dimensions of the covering array: what a train step, its mode and its loop can be, one value of each a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Row = dict[str, str]  # a value of each dimension

# The first value of a dimension is the plain one.
DIMENSIONS: dict[str, tuple[str, ...]] = {
    "mesh": ("2", "3", "1", "2x2", "tensor", "sequence", "sequence x batch", "experts", "stages", "stages x batch"),
    "style": ("replicate", "fully_shard", "kept whole", "default", "shard_optimizer"),
    "annotations": ("none", "fully_shard", "replicate", "offloaded"),
    "wire": ("own", "reduced in fp32", "gathered in fp32", "computed in fp32"),
    "micro_batches": ("1", "2", "4", "3"),
    "reduce": ("once", "each"),
    "bits": ("any", "same"),
    "schedule": ("1f1b", "gpipe", "zb-h1", "interleaved"),
    "attention": ("any", "ring", "gather", "heads"),
    "transport": ("memory", "messages", "two hosts"),
    "deferral": ("no", "yes"),
    "offload": ("no", "yes"),
    "memory": ("any", "1GB", "tight"),
    "cache": ("one rank for all", "each rank", "written", "warm"),
    "dynamic": ("found", "named"),
    "watch": ("nothing", "norms"),
    "override": ("none", "replacement", "transform"),
    "backend": ("aten", "graph copied", "no passes", "inductor"),
    "clears": ("last", "first", "each second", "each second, clipped"),
    "optimizer": ("SGD", "momentum", "AdamW", "fused AdamW", "Adafactor", "two groups and a schedule", "step hooks"),
    "model": (
        *("plain", "tied", "batch norm", "counter", "branch", "frozen", "unused", "hook", "accumulation hook", "log"),
        *("average", "mixture", "rows alone"),
    ),
    "loss": ("mean", "masked", "sum", "penalty", "ctc"),
    "op": (
        *("none", "floor", "remainder", "convolution", "channels last", "draw", "put back"),
        *("rows that the step makes", "causal mask", "branch on a value"),
    ),
    "rows": ("even", "short third", "uneven", "other length"),
    "between": (
        *("nothing", "eval", "parameter", "state in place", "state replaced", "learning rate", "freeze", "load"),
        *("copy", "second model", "gradient", "weight decay", "group added", "checkpoint", "new process"),
        *("failed call", "failed on one rank", "raised and recovered"),
    ),
}

# On whose values it depends which others are possible.
DECIDING = (
    *("mesh", "style", "micro_batches", "transport", "bits", "reduce", "deferral", "model", "loss"),
    *("annotations", "offload", "memory", "backend", "clears", "schedule", "attention"),
    *("wire", "override", "cache", "between", "op", "optimizer"),
)

# More than two values that were wrong together once: rows have these, too.
TOGETHER: tuple[Row, ...] = (
    {"transport": "messages", "style": "fully_shard", "cache": "one rank for all"},
    {"mesh": "1", "backend": "inductor", "op": "floor"},
    {"mesh": "1", "micro_batches": "3", "model": "rows alone", "op": "draw"},
    {"transport": "messages", "deferral": "yes", "between": "state replaced", "optimizer": "momentum"},
    {"transport": "messages", "deferral": "yes", "op": "put back"},
)

Excludes = Callable[[Mapping[str, str]], bool]


def is_possible(row: Mapping[str, str]) -> bool:
    """Whether these values can be written together, and run. ``row`` may lack dimensions: they are open."""
    return not any(excludes(row) for table in (UNWRITTEN, REFUSED) for excludes in table.values())


def why_impossible(row: Mapping[str, str]) -> set[str]:
    """The names of all that excludes a row."""
    return {name for table in (UNWRITTEN, REFUSED) for name, excludes in table.items() if excludes(row)}


def is_kept(row: Mapping[str, str]) -> bool:
    """Whether the cache takes the steps of a row, so that a process that starts warm traces nothing."""
    return not any(excludes(row) for excludes in NOT_KEPT.values())


def _has(row: Mapping[str, str], dimension: str, *values: str) -> bool:
    """Whether the row has a value there, which is one of these."""
    return row.get(dimension) in values


def _lacks(row: Mapping[str, str], dimension: str, *values: str) -> bool:
    """Whether the row has a value there, which is none of these."""
    return dimension in row and row[dimension] not in values


_STAGES, _SEQUENCE = ("stages", "stages x batch"), ("sequence", "sequence x batch")

# What is no step of its own, because a value has no meaning beside another.
UNWRITTEN: dict[str, Excludes] = {
    "schedules are of stages": lambda row: _lacks(row, "schedule", "1f1b") and _lacks(row, "mesh", *_STAGES),
    "attention is split with a sequence": lambda row: (
        _lacks(row, "attention", "any") and _lacks(row, "mesh", *_SEQUENCE)
    ),
    "one rank has no messages": lambda row: _has(row, "mesh", "1") and _lacks(row, "transport", "memory"),
    "gradients are reduced each where parameters are split": lambda row: (
        _has(row, "reduce", "each") and (_has(row, "style", "replicate") or _has(row, "micro_batches", "1"))
    ),
    "annotations stand in the place of a style": lambda row: (
        _lacks(row, "annotations", "none")
        and (_lacks(row, "style", "replicate") or _lacks(row, "mesh", "2", "3", "1", "2x2"))
    ),
    "gradients of the call before cannot be looked at": lambda row: (
        _has(row, "watch", "norms") and _has(row, "deferral", "yes")
    ),
    "experts are of a mixture": lambda row: _has(row, "mesh", "experts") and _lacks(row, "model", "mixture"),
    "updates are deferred over messages": lambda row: _has(row, "deferral", "yes") and _has(row, "transport", "memory"),
    "one rank has no others": lambda row: (
        _has(row, "mesh", "1")
        and (
            _has(row, "cache", "each rank")
            or _has(row, "wire", "reduced in fp32", "gathered in fp32")
            or _has(row, "between", "failed on one rank")
        )
    ),
    "a number that is rounded may have another floor": lambda row: (
        _lacks(row, "wire", "own") and _has(row, "op", "floor", "remainder")
    ),
    # What a norm takes away from a bias before it has no gradient but rounding; where all is rounded, others are small.
    "Adafactor makes rounding large that stands in the place of a gradient": lambda row: (
        _has(row, "optimizer", "Adafactor") and (_lacks(row, "wire", "own") or _has(row, "op", "channels last"))
    ),
    "a stage on one rank reduces and gathers nothing": lambda row: (
        _has(row, "mesh", "stages") and _has(row, "wire", "reduced in fp32", "gathered in fp32")
    ),
    "a pipeline computes nothing again for a budget": lambda row: (
        _has(row, "mesh", *_STAGES) and _has(row, "memory", "tight")
    ),
    "rows alone have no sequence": lambda row: (
        _has(row, "model", "rows alone")
        and _has(row, "op", "convolution", "channels last", "rows that the step makes", "causal mask")
    ),
    "the kernel of attention has no second derivative": lambda row: (
        _has(row, "model", "tied") and _has(row, "loss", "penalty")
    ),
}

# What is refused, by a part of the sentence.
REFUSED: dict[str, Excludes] = {
    "expected no defer_updates=True with micro_batches": lambda row: (
        _has(row, "deferral", "yes") and _lacks(row, "micro_batches", "1")
    ),
    'expected no defer_updates=True with bits="same"': lambda row: (
        _has(row, "deferral", "yes") and _has(row, "bits", "same")
    ),
    'adds up over ranks what is no sum of parts of the batch, which bits="same" does not': lambda row: (
        _has(row, "mesh", "tensor") and _has(row, "bits", "same")
    ),
    "it branches on the value of a tensor, which a step cannot": lambda row: (
        _has(row, "op", "branch on a value")
        and (_has(row, "deferral", "yes") or _has(row, "bits", "same") or _has(row, "mesh", *_STAGES))
    ),
    "expected no gm_transformation with stages": lambda row: (
        _has(row, "mesh", *_STAGES) and _has(row, "backend", "graph copied")
    ),
    'expected backend="aten" with bits="same", whose kernels are the same in each run': lambda row: (
        _has(row, "backend", "inductor") and _has(row, "bits", "same")
    ),
    'expected no axis with the role "stages" with bits="same"': lambda row: (
        _has(row, "mesh", *_STAGES) and _has(row, "bits", "same")
    ),
    'expected no axis with the role "sequence" with bits="same"': lambda row: (
        _has(row, "mesh", *_SEQUENCE) and _has(row, "bits", "same")
    ),
    'expected no axis with the role "experts" with bits="same"': lambda row: (
        _has(row, "mesh", "experts") and _has(row, "bits", "same")
    ),
    'expected axes to give an axis the role "shard"': lambda row: (
        _has(row, "mesh", "stages") and _has(row, "style", "fully_shard", "kept whole", "shard_optimizer")
    ),
    'expected reduce_gradients="once" with bits="same"': lambda row: (
        _has(row, "reduce", "each") and _has(row, "bits", "same")
    ),
    'expected micro_batches of 2 or more with axes["stages"]': lambda row: (
        _has(row, "mesh", *_STAGES) and _has(row, "micro_batches", "1")
    ),
    'expected reduce_gradients="once" with stages': lambda row: (
        _has(row, "mesh", *_STAGES) and _has(row, "reduce", "each")
    ),
    "expected no offload_policy with stages": lambda row: _has(row, "mesh", *_STAGES) and _has(row, "offload", "yes"),
    'expected no offload_policy with bits="same" where state is split': lambda row: (
        _has(row, "offload", "yes")
        and _has(row, "bits", "same")
        and (_lacks(row, "style", "replicate") or _has(row, "annotations", "fully_shard"))
    ),
    # The same words with no more than an annotation, which is looked at later.
    'expected no offload_policy with bits="same" where state is split: leave out one of them': lambda row: (
        _has(row, "annotations", "offloaded") and _has(row, "bits", "same")
    ),
    'expected no gather_dtype with bits="same"': lambda row: (
        _has(row, "wire", "gathered in fp32") and _has(row, "bits", "same")
    ),
    'expected gradients to be reduced in their own dtype with bits="same"': lambda row: (
        _has(row, "wire", "reduced in fp32") and _has(row, "bits", "same")
    ),
    "micro-batches divide, since Edited.transform edits one graph": lambda row: (
        _has(row, "override", "transform") and _has(row, "micro_batches", "3") and _has(row, "model", "rows alone")
    ),
    "is a number that one stage of a pipeline computes and another one reads": lambda row: (
        _has(row, "mesh", *_STAGES) and _has(row, "optimizer", "Adafactor") and _has(row, "model", "tied")
    ),
    "expected no transform with stages": lambda row: _has(row, "mesh", *_STAGES) and _has(row, "override", "transform"),
    "so that its gradients cannot be deferred": lambda row: (
        _has(row, "deferral", "yes") and (_lacks(row, "clears", "last") or _has(row, "between", "group added"))
    ),
    "expected no gm_transformation with defer_updates=True": lambda row: (
        _has(row, "deferral", "yes") and _has(row, "backend", "graph copied")
    ),
    "defer_updates=True takes a pipeline with passes.UpdateInPlace": lambda row: (
        _has(row, "deferral", "yes") and _has(row, "backend", "no passes")
    ),
    "expected no memory with defer_updates=True": lambda row: (
        _lacks(row, "memory", "any") and _has(row, "deferral", "yes")
    ),
    "is a sum over the whole batch that each micro-batch needs": lambda row: (
        _lacks(row, "micro_batches", "1")
        and (_has(row, "model", "batch norm") or _has(row, "loss", "penalty"))
        and _lacks(row, "bits", "same")
    ),
    "each part of the batch needs sums of all": lambda row: (
        _lacks(row, "micro_batches", "1")
        and (_has(row, "model", "batch norm") or _has(row, "loss", "penalty"))
        and _has(row, "bits", "same")
    ),
    '"replicate" gathers no parameters, unless it has shard_optimizer=True': lambda row: (
        _has(row, "wire", "gathered in fp32") and _has(row, "style", "replicate")
    ),
    'bits="same" with micro_batches=4 takes a virtual part for each of them': lambda row: (
        _has(row, "bits", "same") and _has(row, "micro_batches", "4") and _has(row, "mesh", "2x2")
    ),
    'expected micro_batches to divide virtual=8 with bits="same"': lambda row: (
        _has(row, "bits", "same") and _has(row, "micro_batches", "3")
    ),
    "memory= recomputes values before FormUnits": lambda row: (
        _lacks(row, "memory", "any") and _has(row, "backend", "no passes")
    ),
}

# What a cache does not take, by what docs/guide.md says of it.
NOT_KEPT: dict[str, Excludes] = {
    "overrides": lambda row: _lacks(row, "override", "none"),
    "floats that only a call knows, where programs are not kept": lambda row: (
        _has(row, "optimizer", "Adafactor")
        and (
            _has(row, "backend", "graph copied")
            or _has(row, "mesh", *_STAGES)
            or _lacks(row, "memory", "any")
            or _has(row, "deferral", "yes")
            or _has(row, "rows", "uneven")
        )
    ),
    "hooks on parameters": lambda row: _has(row, "model", "accumulation hook"),
    "logs": lambda row: _has(row, "model", "log"),
    "later programs of a step that keeps numbers": lambda row: _has(row, "model", "branch"),
    "state for what is not used": lambda row: _has(row, "model", "unused") and _lacks(row, "optimizer", "SGD"),
}
