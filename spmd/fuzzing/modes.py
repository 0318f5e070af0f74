"""Modes and their options, meshes, annotations and passes by which random steps are compiled, as text."""

from __future__ import annotations

import passes

# Options of a 1-D mesh: the arguments of ``spmd.DataParallel``. Those that exclude each other raise, and are left out.
STYLES = (
    '"replicate"',
    '"fully_shard"',
    '"default"',
    '"replicate", shard_optimizer=True',
    '"fully_shard", reshard_after_forward=True',
    '"fully_shard", reshard_after_forward=False',
    '"fully_shard", reshard_after_forward=2',
    '"fully_shard", reduce_gradients="each"',
    '"fully_shard", prefetch=(2, 2), limit_gathers=1',
    '"fully_shard", prefetch=(0, 0), reshard_after_forward=True',
    '"default", reduce_gradients="each"',
    '"replicate", shard_optimizer=True, reduce_gradients="each"',
    '"fully_shard", offload_policy=spmd.OffloadPolicy()',
    '"replicate", offload_policy=spmd.OffloadPolicy()',
    '"fully_shard", sync=False',
)
# Those that round, which makes optimizers that divide gradients by their size another step: for SGD alone.
ROUNDED = (
    '"replicate", reduce_dtype=torch.bfloat16',
    '"fully_shard", reduce_dtype=torch.bfloat16, gather_dtype=torch.bfloat16',
    '"fully_shard", mp_policy=spmd.MixedPrecisionPolicy(param_dtype=torch.bfloat16)',
    '"replicate", mp_policy=spmd.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)',
)

# Options beside a style; those that do not divide the rows raise, and the step runs as "fully_shard".
RUNS = (
    *[""] * 6,
    ", micro_batches=2",
    ", micro_batches=4",
    ", micro_batches=3",
    ', bits="same"',
    ', micro_batches=2, bits="same"',
)

MESHES = (
    *[{"dp": 2}] * 7,
    {"dp": 3},
    {"dp": 4},
    {"dp": 2, "tp": 2},
    {"tp": 2, "x": 2},  # with ``AXES``
    *[{"cp": 2}] * 2,  # with ``SEQUENCES``
    {"dp": 2, "cp": 2},
    {"replicate": 2, "shard": 2},
    {"dp": 1, "tp": 2},
    {"dp": 2, "tp": 1},
    {"replicate": 1, "shard": 3},
    {"dp": 1},
    {"ep": 2},  # with ``EXPERTS``
    {"dp": 2, "ep": 2},
    *[{"pp": 2}] * 2,  # with ``STAGES``
    {"pp": 2, "dp": 2},
)

AXES = '{"batch": "x", "tensor": "tp"}'  # roles of a mesh whose first axis does not split the batch
EXPERTS = (  # of two axes
    '{"batch": ("dp", "ep"), "experts": "ep"}',
    '{"batch": "dp", "experts": "ep"}',
    '{"batch": ("dp", "ep"), "experts": ("dp", "ep")}',
)

STAGES = ("", ', schedule="gpipe"', ', schedule="zb-h1"', ', schedule="interleaved"')  # with two micro-batches or four

# Options of a mesh whose axis ``cp`` splits sequences.
SEQUENCES = ("", ', attention="ring"', ', attention="heads"', ', attention="gather"', ", balance=False")

# Annotations of a layer ``{m}``, in the place of a style.
ANNOTATIONS = (
    "spmd.fully_shard({m})",
    "spmd.replicate({m})",
    "spmd.fully_shard({m}, reshard_after_forward=False)",
    "spmd.fully_shard({m}, reshard_after_forward=True)",
    "spmd.fully_shard({m}, shard_placement_fn=lambda p: Shard(p.ndim - 1) if p.ndim else None)",
    "spmd.fully_shard({m}, mp_policy=spmd.MixedPrecisionPolicy(reduce_dtype=torch.float32))",
)

# Placements of the batch that is no rows of dim 0, and what a user writes for it.
PLACED = ("Shard(0)", "Replicate()", "Shard(1)")


def pipelines() -> tuple[str, ...]:
    """The passes of a step: the default ones first, then fewer or with other options."""
    names = [type(each).__name__ for each in passes.default()]
    without = [f"tuple(p for p in passes.default() if not isinstance(p, passes.{name}))" for name in names]
    first = [f"passes.default()[:{k}]" for k in range(1, len(names))]
    return ("()", "passes.default(bucket_bytes=64)", *without, *first)
