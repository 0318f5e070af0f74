"""``spmd fuzz`` draws what the covering array has: each value stands in its tables, or here with the reason.

The first value of a dimension is the plain one, and may be what stands in no table.
"""

from __future__ import annotations

import pytest

from spmd.fuzzing import modes, statements, training

from .dimensions import DIMENSIONS

# A text of the fuzzer's tables for each value that it draws.
DRAWN: dict[str, dict[str, str]] = {
    "mesh": {
        "1": "{'dp': 1}",
        "2": "{'dp': 2}",
        "3": "{'dp': 3}",
        "2x2": "{'replicate': 2, 'shard': 2}",
        "tensor": "{'dp': 2, 'tp': 2}",
        "sequence": "{'cp': 2}",
        "sequence x batch": "{'dp': 2, 'cp': 2}",
        "experts": "{'ep': 2}",
        "stages": "{'pp': 2}",
        "stages x batch": "{'pp': 2, 'dp': 2}",
    },
    "style": {
        "replicate": '"replicate"',
        "fully_shard": '"fully_shard"',
        "kept whole": '"fully_shard", reshard_after_forward=False',
        "default": '"default"',
        "shard_optimizer": '"replicate", shard_optimizer=True',
    },
    "annotations": {
        "fully_shard": "spmd.fully_shard({m})",
        "replicate": "spmd.replicate({m})",
        "offloaded": "offload_policy=spmd.OffloadPolicy()",
    },
    "wire": {
        "reduced in fp32": '"replicate", reduce_dtype=torch.bfloat16',
        "gathered in fp32": "gather_dtype=torch.bfloat16",
        "computed in fp32": "mp_policy=spmd.MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
    },
    "micro_batches": {
        "2": ", micro_batches=2",
        "3": ", micro_batches=3",
        "4": ", micro_batches=4",
    },
    "reduce": {"once": '"fully_shard"', "each": '"fully_shard", reduce_gradients="each"'},
    "bits": {"same": ', bits="same"'},
    "schedule": {
        "gpipe": 'schedule="gpipe"',
        "zb-h1": 'schedule="zb-h1"',
        "interleaved": 'schedule="interleaved"',
    },
    "attention": {
        "ring": 'attention="ring"',
        "heads": 'attention="heads"',
        "gather": 'attention="gather"',
    },
    "offload": {"yes": '"replicate", offload_policy=spmd.OffloadPolicy()'},
    "backend": {"no passes": "()"},
    "optimizer": {
        "SGD": "torch.optim.SGD({p}, lr=0.1)",
        "momentum": "torch.optim.SGD({p}, lr=0.1, momentum=0.9)",
        "AdamW": "torch.optim.AdamW({p}, lr=0.1, eps=1e-3)",
        "Adafactor": "torch.optim.Adafactor({p}, lr=0.1)",
        "two groups and a schedule": "[{'params': model[:1].parameters(), 'weight_decay': 0.1}",
    },
    "clears": {"last": "last: optimizer.zero_grad()", "first": "before: optimizer.zero_grad()"},
    "model": {
        "plain": "nn.Linear({n}, {w})",
        "tied": "{m}.weight = {o}.weight",
        "batch norm": "nn.BatchNorm1d({d})",
        "counter": "model.count += 1",
        "frozen": "{m}.requires_grad_(False)",
        "unused": "model.append(nn.Linear(2, 3))",
        "hook": "{m}.register_forward_hook(",
        "accumulation hook": "{m}.weight.register_post_accumulate_grad_hook(",
        "log": "model.queue.append(",
        "average": "model.seen.lerp_(",
        "mixture": "torch.ops.transformers.grouped_mm_fallback",
    },
    "loss": {
        "mean": "h.square().mean()",
        "masked": "(h * y).sum() / (y > 0).sum()",
        "sum": "h.sum()",
        "penalty": "create_graph=True",
    },
    "op": {
        "none": "nn.Linear({n}, {w})",
        "convolution": "nn.Conv1d({d}, {w}, {k}, padding=1)",
        "draw": "h + torch.randn_like(h)",
        "rows that the step makes": "torch.arange(len(h))",
        "causal mask": "is_causal=True",
    },
}
_LOOP = "it is of a loop, and the fuzzer verifies single calls of one batch"
_RANKS = "it is of processes, and the fuzzer has simulated ranks"
NOT_DRAWN: dict[str, dict[str, str]] = {
    "transport": dict.fromkeys(DIMENSIONS["transport"], _RANKS),
    "cache": dict.fromkeys(DIMENSIONS["cache"], _RANKS),
    "deferral": dict.fromkeys(DIMENSIONS["deferral"], _LOOP),
    "rows": dict.fromkeys(DIMENSIONS["rows"], _LOOP),
    "between": dict.fromkeys(DIMENSIONS["between"], _LOOP),
    "dynamic": dict.fromkeys(DIMENSIONS["dynamic"], _LOOP),
    "memory": dict.fromkeys(DIMENSIONS["memory"], "a budget depends on the peak, which a drawn step has no name for"),
    "watch": dict.fromkeys(DIMENSIONS["watch"], "what is looked at is not what a step computes"),
    "override": dict.fromkeys(DIMENSIONS["override"], "what replaces a module is the user's code"),
    "backend": {
        "graph copied": "it is the user's code",
        "inductor": "kernels take seconds to compile for each step",
    },
    "clears": dict.fromkeys(("each second", "each second, clipped"), _LOOP),
    "optimizer": {
        "fused AdamW": "passes fuse the one that is not",
        "step hooks": "hooks are the user's code",
    },
    "model": {
        "branch": "a branch has two programs, and each call verifies one",
        "rows alone": "rows of the drawn steps are their dim 0 alone",
    },
    "loss": {"ctc": "its targets fit one shape of values alone"},
    "op": dict.fromkeys(
        ("floor", "remainder"), "rounding that is allowed may put a number on the other side of a multiple"
    )
    | {"channels last": "drawn values have no four dims of that layout", "put back": _LOOP}
    | {"branch on a value": "a branch has two programs, and each call verifies one"},
}


def drawn() -> str:
    """All that the tables of the fuzzer hold."""
    tables = [value for module in (modes, statements, training) for value in vars(module).values()]
    return "\n".join([*(str(each) for each in modes.MESHES), *_texts(tables), *_texts(modes.pipelines())])


def _texts(value: object) -> list[str]:
    if isinstance(value, training.Training):
        return [f"{name}: {text}" for name, lines in vars(value).items() for text in _texts(lines)]
    if isinstance(value, (list, tuple)):
        return [text for each in value for text in _texts(each)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_each_value_is_drawn_or_has_a_reason(dimension: str) -> None:
    texts, reasons = DRAWN.get(dimension, {}), NOT_DRAWN.get(dimension, {})
    (_, *others), named = DIMENSIONS[dimension], texts.keys() | reasons.keys()
    assert not texts.keys() & reasons.keys() and {*others} <= named <= {*DIMENSIONS[dimension]}
    tables = drawn()
    assert [text for text in texts.values() if text not in tables] == []
