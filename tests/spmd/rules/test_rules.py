"""Every option that a rule claims is right, those that matter are there, and every rule is tried."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Shard

from passes.ir.ops import find
from spmd._torch import OpOverload, OpOverloadPacket
from spmd.placements import Interleaved
from spmd.rules import RULES, P, R, S, rule_of
from spmd.rules.einsum_labels import widens
from spmd.rules.optional_ops import ABSENT

from .engine import Sample, check, options_of, unusual
from .samples import SOURCES, f, ints, samples, samples_of, u

SAMPLES = samples()

# Not in every torch from 2.11 to 2.15, or never: the tables name them by pattern.
MAY_BE_ABSENT = {
    "_adaptive_avg_pool1d",
    "_adaptive_avg_pool1d_backward",
    "_scaled_mm_v2",
    "_upsample_lanczos2d_aa",
    "_upsample_lanczos2d_aa_backward",
    "adaptive_max_pool1d_backward",
    "avg_pool1d_backward",
    "cholesky",
    "hash_tensor",
    "max_pool1d_with_indices_backward",
}

# Neither the CPU nor torch's meta functions can run these.
UNTRIED = {
    "addmm.dtype",
    "baddbmm.dtype",
    "cudnn_batch_norm",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_fused_attention_overrideable_backward",
}


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_options_are_right(sample: Sample, pytestconfig: pytest.Config) -> None:
    """Three ranks have parts of unequal lengths, and some of them none, as four have: those only if exhaustive."""
    for size in (2, 3, 4) if pytestconfig.getoption("--exhaustive") else (2, 3):
        check(sample, size)


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_options_are_right_of_empty_dims_and_equal_rows(source: Any, pytestconfig: pytest.Config) -> None:
    """Of three ops of each rule, and of all if exhaustive."""
    ops = defaultdict[Any, set[Any]](set)
    for sample in samples_of(source):
        of_rule = ops[rule_of(sample.op)]
        if sample.op in of_rule or len(of_rule) < 3 or pytestconfig.getoption("--exhaustive"):
            of_rule.add(sample.op)
            for each in unusual(sample):
                check(each, 2)


def _tagged() -> list[Any]:
    """Every functional aten op with the tag ``pointwise`` that takes tensors and numbers alone."""
    packets = [getattr(torch.ops.aten, name, None) for name in dir(torch.ops.aten)]
    ops = [getattr(p, name) for p in packets if isinstance(p, OpOverloadPacket) for name in p.overloads()]
    return [op for op in ops if torch.Tag.pointwise in op.tags and not op._schema.is_mutable]


def guessed(op: OpOverload, fill: Any) -> Sample | None:
    """A call of ``op`` with tensors of broadcasting shapes and small numbers; None if it cannot be guessed."""
    shapes = iter([(4, 6), (6,), (4, 1), (4, 6)])
    values: dict[str, Callable[[], Any]] = {
        "Tensor": lambda: fill(*next(shapes)),
        "number": lambda: 1,
        "int": lambda: 1,
        "float": lambda: 0.5,
    }
    required = [a for a in op._schema.arguments if not a.has_default_value() and not a.kwarg_only]
    if any(str(a.type) not in values for a in required):
        return None
    sample = Sample(op, tuple(values[str(a.type)]() for a in required))
    try:
        op(*sample.args)
    except (RuntimeError, NotImplementedError, IndexError):
        return None
    return sample


@pytest.mark.slow
@pytest.mark.parametrize("op", _tagged(), ids=str)
def test_options_of_tagged_ops_are_right(op: OpOverload) -> None:
    tried = [sample for fill in (u, lambda *shape: ints(9, *shape) + 1) if (sample := guessed(op, fill)) is not None]
    if not tried:
        pytest.skip("arguments not guessed")
    if not any(returns.type.isSubtypeOf(torch.TensorType.get()) for returns in op._schema.returns):
        pytest.skip("returns no tensor")
    for sample in tried:
        assert check(sample, 2) >= 2, "each dim may be split"
        check(sample, 3)


def test_every_rule_is_tried() -> None:
    tried = {sample.op for sample in SAMPLES} | set(_tagged())
    claiming = {op for op, rule in RULES.items() if rule is not RULES[torch.ops.aten.eye.default]}
    names = {op.name().removeprefix("aten::") for op in claiming - tried}
    copies = {name for name in names if "_copy" in name}
    assert names - copies <= UNTRIED, "a rule without a sample; the ops called _copy are their views' twins"


def test_names_in_the_tables_exist() -> None:
    assert ABSENT <= MAY_BE_ABSENT


def _has(name: str, *args: Any, size: int = 2, **kwargs: Any) -> set[tuple[Any, Any]]:
    """The options of a call, as pairs of operands and results; those in runs of rows are left out."""
    found = {(option.operands, option.results) for option in options_of(Sample(find(name), args, kwargs), size)}
    return {pair for pair in found if not any(isinstance(p, Interleaved) for placed in pair for p in placed)}


def test_products_have_rows_columns_contraction_and_partial_factors() -> None:
    pairs = {(S(0), R): S(0), (R, S(1)): S(1), (S(1), S(0)): P, (P, R): P, (R, P): P}
    assert {(pair, (result,)) for pair, result in pairs.items()} == _has("mm", f(4, 6), f(6, 8))


def test_a_product_that_is_added_to() -> None:
    found = _has("addmm", f(8), f(4, 6), f(6, 8))
    assert ((R, S(0), R), (S(0),)) in found
    assert ((S(0), R, S(1)), (S(1),)) in found
    assert ((P, S(1), S(0)), (P,)) in found
    assert ((R, S(1), S(0)), (P,)) not in found


def test_partial_sums_pass_only_through_linear_ops() -> None:
    x = f(4, 6)
    for name, args in (("add.Tensor", (x, 1.0)), ("add.Tensor", (x, f(4, 6))), ("exp", (x,)), ("mul.Tensor", (x, x))):
        for operands, results in _has(name, *args):
            partial = [p for p in operands if isinstance(p, Partial)]
            assert not partial or (results == (P,) and (name, len(partial)) in {("add.Tensor", 2), ("mul.Tensor", 1)})
    assert not any(P in operands for operands, _ in _has("expand", f(1, 6), [4, 6]))
    assert ((P,), (P,)) in _has("expand", f(4, 6), [4, 6])


def test_uneven_parameters_are_updated_in_shards() -> None:
    for name in ("add.Tensor", "mul.Tensor", "sub.Tensor"):
        assert ((S(0), S(0)), (S(0),)) in _has(name, f(7), f(7), size=4)
        assert ((S(0), R), (S(0),)) in _has(name, f(7), f(), size=4)
    assert ((S(0), S(0), S(0)), (S(0),)) in _has("addcdiv", f(3), f(3), f(3), size=4)


def test_views_keep_splits_of_rows() -> None:
    assert ((S(0),), (S(0),)) in _has("view", f(4, 6, 5), [24, 5])
    assert ((S(1),), (S(0),)) not in _has("view", f(4, 6, 5), [24, 5])
    assert ((S(1),), (S(1),)) in _has("view", f(4, 7), [4, 7, 1])
    assert ((S(2),), (S(2),)) in _has("view", f(4, 6, 8), [4, 6, 2, 4])
    assert ((S(2),), (S(2),)) not in _has("view", f(4, 6, 9), [4, 6, 3, 3])


def test_attention_splits_over_batch_and_heads() -> None:
    q = f(4, 6, 5, 8)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
    forward = _has("_scaled_dot_product_flash_attention_for_cpu", q, q, q)
    backward = _has("_scaled_dot_product_flash_attention_for_cpu_backward", out, q, q, q, out, lse, 0.0, False)
    for split in (S(0), S(1)):
        assert ((split,) * 3, (split,) * 2) in forward
        assert ((split,) * 6, (split,) * 3) in backward


def test_flattened_rows_are_in_runs_and_can_be_unflattened() -> None:
    def claimed(shape: tuple[int, ...], after: list[int]) -> set[tuple[Any, Any]]:
        return {(o.operands[0], o.results[0]) for o in options_of(Sample(find("view"), (f(*shape), after)), 2)}

    assert (S(1), Interleaved(0, 3)) in claimed((3, 4, 5), [12, 5])
    assert (Interleaved(0, 3), S(1)) in claimed((12, 5), [3, 4, 5])
    assert (Interleaved(0, 2), S(1)) in claimed((12, 5), [2, 6, 5])
    assert (Interleaved(0, 6), Interleaved(1, 3)) in claimed((12, 5), [2, 6, 5])
    assert (S(2), Interleaved(0, 6)) in claimed((2, 3, 4), [24])
    assert (S(1), Interleaved(0, 2)) in claimed((2, 4, 3), [8, 3])
    assert not [pair for pair in claimed((3, 5, 4), [15, 4]) if pair[0] == S(1)]
    assert not [pair for pair in claimed((4, 6), [3, 8]) if pair[0] == Interleaved(0, 2)]


_KEEPS_BATCH = (
    "native_layer_norm _fused_rms_norm embedding gelu silu gelu_backward silu_backward bmm native_dropout "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward "
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_softmax _log_softmax _log_softmax_backward_data nll_loss_forward nll_loss_backward convolution"
).split()


@pytest.mark.parametrize("name", _KEEPS_BATCH)
def test_ops_of_a_gpt_keep_the_batch_split(name: str) -> None:
    """Activations stay sharded along dim 0 through all ops of a language model."""
    called = [sample for sample in SAMPLES if sample.op is find(name)]
    assert called
    for sample in called:
        _keeps_batch(sample, name)


def _keeps_batch(sample: Sample, name: str) -> None:
    found = options_of(sample, 2)
    if name.startswith("nll_loss_forward") and (sample.args[3] == 1 or sample.args[0].ndim == 1):
        assert found == []  # a mean is decomposed, and without rows there is nothing to split
        return
    assert any(Shard(0) in option.operands and option.results[0] in (Shard(0), P) for option in found)


def test_batches_of_systems_are_solved_in_shards() -> None:
    for right in (f(4, 3, 2), f(4, 3)):
        assert ((S(0), S(0)), (S(0),) * 4) in _has("_linalg_solve_ex", f(4, 3, 3), right)
    assert not _has("_linalg_solve_ex", f(4, 4, 4), f(4, 2)), "one right-hand side for all"


def test_gradients_of_weights_are_partial_sums() -> None:
    assert ((S(0), S(0)), (P,)) in _has("embedding_dense_backward", f(4, 5, 6), ints(7, 4, 5), 7, -1, False)
    stats = torch.ops.aten.native_layer_norm(f(4, 6), [6], f(6), f(6), 1e-5)[1:]
    args = (f(4, 6), f(4, 6), [6], *stats, f(6), f(6), [True, True, True])
    assert ((S(0), S(0), S(0), S(0), R, R), (S(0), P, P)) in _has("native_layer_norm_backward", *args)
    rest = [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]
    args = (f(4, 8, 3, 3), f(4, 6, 3, 3), f(8, 6, 1, 1), [8], *rest)
    assert ((S(0), S(0), R), (S(0), P, P)) in _has("convolution_backward", *args)


def test_ops_of_users_have_no_rule_by_tag() -> None:
    assert rule_of(torch.ops.aten.cosh.default) is not None
    assert rule_of(torch.ops.aten.cosh_.default) is None
    assert rule_of("cosh") is None


def test_ragged_rows_are_split_evenly_also_within_a_group() -> None:
    offs, rows, other = torch.tensor([3, 5], dtype=torch.int32), f(5, 16).float(), f(5, 48).float()
    weights = f(2, 16, 48).float()
    assert ((S(0), R, R), (S(0),)) in _has("_grouped_mm", rows, weights, offs)
    assert ((R, S(1), R), (S(1),)) in _has("_grouped_mm", weights.mT, rows.t(), offs)
    assert ((S(1), S(0), R), (P,)) in _has("_grouped_mm", rows.t(), other, offs), "a gradient of weights"
    assert ((R, S(2), R), (S(1),)) in _has("_grouped_mm", rows, weights, offs)
    assert ((S(1), S(1), R), (P,)) in _has("_grouped_mm", rows, weights, offs)
    assert ((R, S(2), R), (S(1),)) not in _has("_grouped_mm", rows, f(2, 16, 12).float(), offs), "rows of 24 bytes"


def test_sampling_counting_and_lookup_keep_the_batch_split() -> None:
    image, grid, grad = f(4, 6, 8, 8), u(4, 8, 8, 2), f(4, 6, 8, 8)
    assert ((S(0), S(0)), (S(0),)) in _has("grid_sampler_2d", image, grid, 0, 0, False)
    args = (grad, image, grid, 0, 0, False, [True, True])
    assert ((S(0),) * 3, (S(0), S(0))) in _has("grid_sampler_2d_backward", *args)
    assert ((S(1), S(1), R), (S(1), P)) in _has("grid_sampler_2d_backward", *args)
    assert ((S(0),), (P,)) in _has("histc", f(4, 6), 5, -1, 1)
    assert not _has("histc", f(4, 6), 5), "bounds are left to the data"
    assert ((R, S(0)), (S(0),)) in _has("searchsorted.Tensor", f(7).sort().values, f(4, 6))
    assert ((S(0), R, S(0)), (S(0),)) in _has("_trilinear", f(6, 4), f(5, 4, 3), f(6, 3), [1, 3], [0], [1, 2], [2, 3])
    assert ((S(0), S(0)), (S(0), S(0))) in _has("fractional_max_pool2d", image, [2, 2], [3, 3], u(4, 6, 2))
    assert ((S(0),), (S(0),)) in _has("_upsample_bilinear2d_aa", image, [5, 4], False)
    assert ((S(0),), (S(0),)) in _has("linalg_pinv.atol_rtol_tensor", f(4, 3, 2))


def test_a_dtype_that_torch_does_not_promote_is_no_error() -> None:
    assert widens(torch.float8_e4m3fn, torch.float32) and not widens(torch.float32, torch.float8_e4m3fn)
    assert widens(torch.float32, torch.complex64) and not widens(torch.int64, torch.float64)
    assert not widens(torch.float16, torch.bfloat16) and not widens(torch.bool, torch.bool)
