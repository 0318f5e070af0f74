"""Sample calls for every rule: even and uneven dims, broadcasting, dims of size 1 and smaller than the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from passes.ir.ops import find
from passes.runtime.ctc_loss import ctc_loss, ctc_loss_backward
from passes.runtime.places_in_rows import places

from .engine import Sample

RANDOM = ("rand", "bernoulli", "dropout", "empty", "uniform", "normal", "exponential", "geometric", "cauchy")


def f(*shape: int) -> torch.Tensor:
    """Random doubles away from zero and from one another's multiples."""
    return torch.randn(shape, dtype=torch.float64)


def u(*shape: int) -> torch.Tensor:
    """Random doubles between 0.1 and 0.9."""
    return torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1


def ints(high: int, *shape: int) -> torch.Tensor:
    """Random indices below ``high``."""
    return torch.randint(0, high, shape)


def b(*shape: int) -> torch.Tensor:
    """A random mask."""
    return torch.rand(shape) > 0.5


def samples() -> list[Sample]:
    """All samples, drawn anew from one seed."""
    torch.manual_seed(0)
    return [sample for source in SOURCES for sample in samples_of(source)]


def samples_of(source: Callable[[], Iterator[tuple[Any, ...]]]) -> Iterator[Sample]:
    """The samples of one of the functions below."""
    for name, *args in source():
        op = find(name) if isinstance(name, str) else name
        kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
        if op is not None:
            values = not any(word in str(name) for word in RANDOM)
            yield Sample(op, tuple(args), kwargs, values)


def pointwise() -> Iterator[tuple[Any, ...]]:
    x, y, row, column, one = f(4, 6, 5), f(4, 6, 5), f(5), f(6, 1), f(1, 6, 5)
    scalar = f()
    for name in (
        "add.Tensor",
        "sub.Tensor",
        "mul.Tensor",
        "div.Tensor",
        "maximum",
        "eq.Tensor",
        "atan2",
        "rsub.Tensor",
    ):
        yield from ((name, x, other) for other in (y, row, column, one, scalar))
        yield from ((name, other, x) for other in (row, column, one, scalar))
        yield name, column, row
        yield name, f(1), f(1)
        yield name, scalar, scalar
    yield from (
        (name, x, 2.0) for name in ("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "pow.Tensor_Scalar")
    )
    yield "add.Tensor", x, y, {"alpha": 0.5}
    yield "div.Tensor_mode", x, y, {"rounding_mode": "floor"}
    yield from ((name, x) for name in ("neg", "exp", "relu", "clone", "detach", "alias", "sigmoid", "gelu", "silu"))
    yield "neg", f()
    yield from ((name, x) for name in ("zero", "lift_fresh_copy", "lift", "lift_fresh", "resolve_conj", "resolve_neg"))
    yield "fill.Scalar", x, 2.0
    yield "_to_copy", x, {"dtype": torch.float32}
    yield "_to_copy", x, {"dtype": torch.float64}
    yield "_to_copy", ints(9, 4, 5).float(), {"dtype": torch.float64}
    yield "_to_copy", ints(9, 4, 5), {"dtype": torch.float64}
    yield "copy", x, y
    yield "copy", x, row
    yield "where.self", b(4, 6, 5), x, y
    yield "where.self", b(5), x, scalar
    yield "where.ScalarOther", b(4, 6, 5), x, 0
    yield "where.ScalarOther", b(4, 6, 5), x, 1.5
    yield "where.ScalarSelf", b(4, 6, 5), 0.5, x
    yield "where.Scalar", b(4, 6, 5), 0.5, 0.2
    yield from (("masked_fill.Scalar", x, b(6, 5), value) for value in (0, 1.5, float("-inf")))
    yield "masked_fill.Tensor", x, b(4, 1, 5), scalar
    yield "lerp.Scalar", x, y, 0.3
    yield "lerp.Tensor", x, y, scalar
    yield "addcmul", x, y, row, {"value": 0.5}
    yield "addcdiv", x, y, column, {"value": 0.5}
    yield "clamp", x, -0.5, 0.5
    yield "clamp.Tensor", x, row, None
    for name in ("silu", "gelu", "leaky_relu", "hardswish", "mish", "sigmoid", "tanh"):
        yield f"{name}_backward", x, y, *([0.1, False] if name == "leaky_relu" else [])
    yield "leaky_relu", x, 0.1
    yield "threshold_backward", x, y, 0.0
    yield "elu_backward", x, 1.0, 1.0, 1.0, False, y
    yield "hardtanh_backward", x, y, -1.0, 1.0
    yield "hardsigmoid_backward", x, y
    yield "softplus_backward", x, y, 1.0, 20.0
    yield "logit_backward", x, u(4, 6, 5), None
    yield "softshrink_backward", x, y, 0.5
    yield "hardshrink_backward", x, y, 0.5
    yield "log_sigmoid_forward", x
    yield "log_sigmoid_backward", x, y, u(4, 6, 5)
    yield "native_dropout_backward", x, b(4, 6, 5), 2.0
    yield "complex", x, y
    yield "polar", x, y
    yield "real", torch.complex(x, y)
    yield "imag", torch.complex(x, y)
    yield "_conj", torch.complex(x, y)
    yield from (("prelu", source, weight) for source, weight in ((x, f(1)), (x, f(6)), (f(4, 6, 6), f(6)), (x, f())))
    yield "_prelu_kernel", x, f(1, 6, 1)
    yield "_prelu_kernel_backward", x, y, f(1, 6, 1)
    yield "floor_divide", x, row
    yield "floor_divide.Scalar", x, 0.3
    yield "nan_to_num", x
    yield "hardswish", x
    yield "round.decimals", x, {"decimals": 1}
    yield "rsub.Scalar", x, 1.0


def factories() -> Iterator[tuple[Any, ...]]:
    x, size = f(4, 5), [6, 5]
    double = {"dtype": torch.float64}
    yield from ((name, size, double) for name in ("zeros", "ones", "empty.memory_format", "rand", "randn"))
    yield "full", size, 0, double
    yield "full", size, 1.5, double
    yield "full", [], 1.5, double
    yield from ((name, size, {"generator": None}) for name in ("rand.generator", "randn.generator"))
    yield "randint", 9, size
    yield "randint.low", 3, 9, size
    yield "randint.generator", 9, size, {"generator": None}
    yield "randint.low_generator", 3, 9, size, {"generator": None}
    yield "empty_permuted", size, [1, 0]
    yield "empty_strided", size, [1, 6]
    yield "new_empty_strided", x, size, [5, 1]
    yield from ((name, x, size) for name in ("new_zeros", "new_ones", "new_empty"))
    yield "new_zeros", f(8, 5), [8, 3]
    yield "new_full", x, size, 2.0
    yield "new_full", x, size, 0.0
    for name in ("zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "bernoulli.p"):
        yield name, x, *([0.5] if name == "bernoulli.p" else [])
    yield "full_like", x, 3.0
    yield "full_like", x, 0
    yield "randint_like", x, 9
    yield "randint_like.low_dtype", x, 3, 9
    undrawn = {"generator": None}
    yield from ((name, x, undrawn) for name in ("rand_like.generator", "randn_like.generator"))
    yield "randint_like.generator", x, 9, undrawn
    yield "randint_like.low_generator_dtype", x, 3, 9, undrawn
    yield from ((name, x) for name in ("uniform", "normal_functional", "exponential", "log_normal", "cauchy", "random"))
    yield "geometric", x, 0.5
    yield "random.from", x, 0, 9
    yield "random.to", x, 9
    yield "bernoulli", u(4, 5)
    yield "native_dropout", x, 0.5, True


def views() -> Iterator[tuple[Any, ...]]:
    x = f(4, 6, 5)
    for size in ([24, 5], [4, 30], [120], [2, 2, 6, 5], [4, 2, 3, 5], [4, 6, 1, 5], [6, 4, 5], [1, 4, 6, 5], [8, 3, 5]):
        yield from ((name, x, size) for name in ("view", "_unsafe_view", "reshape", "view_copy"))
    yield "view", x, [-1, 5]
    yield "view", f(7, 5), [7, 5, 1]
    yield "view", f(6), [6]
    yield "view", f(1), []
    yield "view", f(1, 1), [1]
    yield "view", f(0, 4), [0, 2, 2]
    yield "view.dtype", x, torch.int64
    yield "view.dtype", x, torch.float32
    yield from (("t", m) for m in (f(4, 7), f(5), f()))
    yield "transpose.int", x, -1, 0
    yield "permute", x, [2, 0, -2]
    yield from (("unsqueeze", x, d) for d in (0, 1, -1))
    yield "unsqueeze", f(), 0
    yield from (("squeeze", t) for t in (f(4, 1, 5), f(2, 1, 3), f(3, 6, 1)))
    yield from (("squeeze.dim", f(2, 1, 6), d) for d in (0, 1, -1))
    yield from (("squeeze.dims", f(2, 1, 6), d) for d in ([0, 1], [1], [-1, -2]))
    for source, size in ((f(1, 6, 1), [4, 6, 5]), (f(5), [4, 5]), (x, [4, 6, 5]), (f(), [3, 4]), (f(1, 5), [1, -1])):
        yield "expand", source, size
        yield "expand_copy", source, size
    yield "view_as_real", torch.complex(x, x)
    yield "view_as_complex", f(4, 5, 2)


def splits_and_cats() -> Iterator[tuple[Any, ...]]:
    x, y = f(4, 6, 5), f(4, 6, 5)
    yield "slice.Tensor", x, 1, 0, 3
    yield "slice.Tensor", x, 1, 0, 9223372036854775807
    yield "slice.Tensor", x, -1, 1, 5, 2
    yield "slice.Tensor", x
    yield "select.int", x, 1, 2
    yield "narrow", x, 1, 2, 3
    yield "split.Tensor", x, 4, 1
    yield "split_with_sizes", x, [2, 4], 1
    yield "split.sizes", x, [2, 3], -1
    yield "chunk", x, 3, 1
    yield "unbind.int", x, -1
    yield "cat", [x, f(4, 2, 5), y], 1
    yield "cat", [x, f(0)], 1
    yield "cat", [f(8, 3), f(8, 3)], 0
    yield "split.Tensor", f(12, 3), 4, 0
    yield "split_with_sizes", f(12, 2), [4, 8], 0
    yield "slice.Tensor", f(12, 2), 0, 4, 12
    yield "stack", [x, y], 1
    yield "stack", [x, y], -1
    yield "flip", x, [0, 2]
    yield "roll", x, [1], [1]
    yield "roll", x, [1]
    yield "repeat", x, [2, 1, 1, 3]
    yield "repeat", x, [1, 1, 1]
    yield "repeat", f(4, 6), [2, 3, 2]
    yield "repeat_interleave.self_int", x, 2, 1
    yield "unfold", x, 1, 2, 2
    yield "unfold_backward", f(4, 3, 5, 2), [4, 6, 5], 1, 2, 2
    for shape in ((6, 6), (7, 4), (4, 7), (3, 5, 8), (6, 2, 6)):
        for offset in (0, 1, -2):
            cut = f(*shape).diagonal(offset, 0, -1)
            yield "diagonal", f(*shape), offset, 0, -1
            yield "diagonal_backward", f(*cut.shape), list(shape), offset, 0, -1
            yield "diagonal_scatter", f(*shape), f(*cut.shape), offset, 0, -1
    yield "tril", x
    yield "triu", f(6, 5), 1
    yield "constant_pad_nd", x, [1, 2], 0.0
    yield "constant_pad_nd", x, [0, 0, 1, 0], 1.0
    yield "slice_backward", f(4, 3, 5), [4, 6, 5], 1, 0, 3, 1
    yield "slice_backward", x, [4, 6, 5], 1, 0, 9223372036854775807, 1
    yield "select_backward", f(4, 5), [4, 6, 5], 1, 2
    yield "slice_scatter", x, f(4, 3, 5), 1, 0, 3
    for start, end in ((0, 4), (4, 12), (8, 9223372036854775807), (-8, -4), (2, 6), (3, 3)):
        rows = torch.ops.aten.slice.Tensor(f(12, 2), 0, start, end)
        yield "slice_backward", rows, [12, 2], 0, start, end, 1
        yield "slice_scatter", f(12, 2), rows, 0, start, end
    yield "slice_backward", f(8, 2), [24, 2], 0, 4, 20, 2
    yield "cat", [f(4, 2), f(12, 2), f(0)], 0
    yield "cat", [f(8, 2), f(12, 2), f(0, 2)], 0
    yield "select_scatter", x, f(4, 5), 1, 2
    yield "diagonal", x
    yield "diagonal_scatter", x, f(5, 4)


def reductions() -> Iterator[tuple[Any, ...]]:
    x = f(4, 6, 5)
    dims: tuple[list[int] | None, ...] = ([0], [1, 2], [-1], [], None)
    yield from (("sum.dim_IntList", x, d, keep) for d in dims for keep in (False, True))
    yield from (("mean.dim", x, d, keep) for d in dims for keep in (False, True))
    yield from ((name, x, d, keep) for name in ("amax", "amin") for d in dims[:-1] for keep in (False, True))
    yield from ((name, x) for name in ("sum", "mean", "max", "min", "prod", "var", "std", "argmax"))
    yield "sum", f()
    yield "sum", b(4, 6)
    yield "sum.dim_IntList", ints(9, 4, 5).float(), [0], {"dtype": torch.float64}
    yield "any", b(4, 6)
    yield "all", b(4, 6)
    for name in ("any", "all"):
        yield f"{name}.dim", b(4, 6), 1
        yield f"{name}.dims", b(4, 6, 5), [0, 2], True
    yield from ((name, x, 1, keep) for name in ("max.dim", "min.dim", "argmax", "argmin") for keep in (False, True))
    yield from ((name, x, 1) for name in ("prod.dim_int", "median.dim", "mode"))
    yield "kthvalue", x, 2, 1
    yield from ((name, x) for name in ("median", "nanmedian"))
    yield "nanmedian.dim", x, 1, True
    yield from (("histc", x, 5, *bounds) for bounds in ((-1, 1), (), (0.5, 0.5)))
    yield "logsumexp", x, [1, 2], True
    small = f(2, 3)
    for name in ("sum.dim_IntList", "mean.dim", "amax", "logsumexp", "var.correction", "linalg_vector_norm"):
        yield name, small, *([2.0, [1]] if name == "linalg_vector_norm" else [[1]])
    yield from ((name, small, 1) for name in ("max.dim", "min.dim", "argmax", "prod.dim_int", "median.dim", "mode"))
    yield "kthvalue", small, 2, 1
    yield "count_nonzero.dim_IntList", b(4, 6), [0]
    for name in ("var", "std", "var_mean", "std_mean"):
        yield f"{name}.correction", x, [0, 1], {"correction": 1, "keepdim": True}
    for name in ("var", "std", "var_mean"):
        yield f"{name}.dim", x, [1]
    yield "var_mean", x
    yield "std_mean", x
    yield "norm.Scalar", x, 2
    yield "norm.ScalarOpt_dim", x, 2, [1]
    yield "norm.ScalarOpt_dim_dtype", x, 2, [1], False, {"dtype": torch.float64}
    yield "norm.ScalarOpt_dtype", x, 2, {"dtype": torch.float64}
    yield "linalg_vector_norm", x
    yield "linalg_vector_norm", x, 2, [0, 1], True


def scans() -> Iterator[tuple[Any, ...]]:
    x, y, small = f(4, 6, 5), u(4, 6, 5), f(2, 3)
    yield from ((name, small, -1, False) for name in ("_softmax", "_log_softmax"))
    yield from ((name, small, 1) for name in ("cumsum", "cumprod", "logcumsumexp", "cummax", "sort", "argsort"))
    yield "topk", small, 2
    yield "_softmax_backward_data", small, small, -1, torch.float64
    yield "_log_softmax_backward_data", small, small, -1, torch.float64
    yield from ((name, x, d, False) for name in ("_softmax", "_log_softmax") for d in (-1, 1))
    yield from ((name, x, 1) for name in ("softmax.int", "log_softmax.int", "_safe_softmax"))
    for name in ("_softmax_backward_data", "_log_softmax_backward_data"):
        yield name, x, y, -1, torch.float64
    yield from ((name, x, 1) for name in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "argsort"))
    yield "sort.stable", x, {"stable": True, "dim": 1}
    yield "argsort.stable", x, {"stable": True, "dim": 1}
    yield "topk", x, 2, 1
    yield "glu", x, 1
    yield "glu_backward", f(4, 3, 5), x, 1


def transforms() -> Iterator[tuple[Any, ...]]:
    x = f(4, 6, 5)
    waves = torch.complex(x, f(4, 6, 5))
    yield "_fft_r2c", x, [1], 0, True
    yield "_fft_r2c", x, [0, 2], 1, False
    yield "_fft_c2c", waves, [1], 2, False
    yield "_fft_c2r", waves, [2], 0, 8


def distances() -> Iterator[tuple[Any, ...]]:
    for shape in ((), (4,), (3, 2)):
        x, y = f(*shape, 6, 3), f(*shape, 5, 3)
        for p in (1.0, 2.0, 3.0):
            between = torch.cdist(x, y, p, compute_mode="donot_use_mm_for_euclid_dist")
            yield "_cdist_forward", x, y, p, 2
            yield "_cdist_backward", f(*shape, 6, 5), x, y, p, between
    yield "_cdist_forward", f(4, 6, 3), f(5, 3), 2.0, None
    yield "_pdist_forward", f(4, 3), 2.0
    yield "_pdist_backward", f(6), f(4, 3), 2.0, torch.pdist(f(4, 3))


def matmul() -> Iterator[tuple[Any, ...]]:
    for m, k, n in ((4, 6, 5), (6, 5, 7), (1, 2, 6)):
        yield "mm", f(m, k), f(k, n)
        yield "bmm", f(4, m, k), f(4, k, n)
        yield "mv", f(m, k), f(k)
        yield "dot", f(k), f(k)
        yield "vdot", f(k), f(k)
        yield "outer", f(m), f(n)
        yield from (("addmm", bias, f(m, k), f(k, n), {"alpha": 0.5}) for bias in (f(n), f(m, n), f(m, 1), f()))
        yield from (("baddbmm", bias, f(4, m, k), f(4, k, n), {"beta": 2}) for bias in (f(4, m, n), f(n), f(4, 1, 1)))
        yield "addbmm", f(m, n), f(4, m, k), f(4, k, n)
        yield "addmv", f(m), f(m, k), f(k)
        yield "addr", f(m, n), f(m), f(n)
        yield "linear", f(4, m, k), f(n, k)
        yield "linear", f(m, k), f(n, k), f(n)
    yield "linear", f(4, 6), f(6)
    half, wide = (meta(4, 6), meta(6, 5)), torch.float32
    yield "mm.dtype", *half, wide
    yield "bmm.dtype", meta(4, 3, 6), meta(4, 6, 5), wide
    yield "_trilinear", f(6, 4), f(5, 4, 3), f(6, 3), [1, 3], [0], [1, 2], [2, 3]
    yield "_trilinear", f(6, 4), f(6, 5), f(6, 3), [1, 3], [2, 3], [1, 2], [0]
    yield "_trilinear", f(1, 3), f(4, 3), f(4, 3), [], [], [], []


def grouped() -> Iterator[tuple[Any, ...]]:
    """Groups of no, one and several rows, whose ends no rank's part need meet; whole numbers, for there is no fp64."""
    for ends in ([3, 3, 4, 11], [0, 0, 0, 11], [2, 5, 9, 11]):
        offs = torch.tensor(ends, dtype=torch.int32)
        yield "_grouped_mm", whole(11, 16), whole(4, 16, 48), offs
        yield "_grouped_mm", whole(4, 48, 16), whole(11, 16).t(), offs
        yield "_grouped_mm", whole(11, 16).t(), whole(11, 48), offs
    offs = torch.tensor([2, 3], dtype=torch.int32)
    yield "_grouped_mm", whole(3, 16), whole(2, 48, 16).transpose(1, 2), offs
    yield "_grouped_mm", whole(3, 16).t(), whole(3, 16), offs
    yield "_grouped_mm", whole(4, 48, 16), whole(4, 16, 12)


def whole(*shape: int) -> torch.Tensor:
    """Small whole numbers in fp32, whose products and sums are exact."""
    return ints(9, *shape).float() - 4


def indexing() -> Iterator[tuple[Any, ...]]:
    x = f(4, 6, 5)
    yield "embedding", f(7, 6), ints(7, 4, 5)
    yield "embedding", f(7, 6), ints(7, 4), 2
    yield "embedding_dense_backward", f(4, 5, 6), ints(7, 4, 5), 7, -1, False
    yield "embedding_dense_backward", f(4, 6), ints(7, 4), 7, 2, False
    yield "embedding_dense_backward", f(4, 6), ints(7, 4), 7, -1, True
    yield "gather", x, 1, ints(6, 4, 3, 5)
    yield "gather", x, -1, ints(5, 4, 2, 6)
    yield "gather", f(6, 1), 0, ints(6, 4, 1)
    for d, index in ((1, torch.stack([torch.randperm(6)[:3] for _ in range(20)]).view(4, 5, 3).transpose(1, 2)),):
        yield "scatter.src", x, d, index, f(4, 3, 5)
        yield "scatter.value", x, d, index, 1.5
        yield "scatter_add", x, d, index, f(4, 3, 5)
        yield "scatter.reduce", x, d, index, f(4, 3, 5), {"reduce": "add"}
        yield "scatter.value_reduce", x, d, index, 2.0, {"reduce": "multiply"}
        yield "scatter_reduce.two", x, d, index, f(4, 3, 5), "amax"
    yield "scatter_add", x, 0, ints(4, 2, 1, 5), f(2, 1, 5)
    yield "scatter.value", x, 1, ints(6, 1, 2, 5), 0.5
    yield "index_select", x, 1, ints(6, 4)
    yield "index_select", x, 1, torch.tensor(3)
    yield "index_add", x, 1, ints(6, 4), f(4, 4, 5)
    yield "index_copy", x, 1, torch.tensor([3, 0, 5]), f(4, 3, 5)
    yield "index_reduce", x, 1, ints(6, 4), f(4, 4, 5), "amax", {"include_self": False}
    yield "index_fill.int_Scalar", x, 1, ints(6, 4), 2.0
    yield "index_fill.int_Tensor", x, 1, ints(6, 4), f()
    i, j, k = ints(4, 6), ints(6, 6), ints(5, 4, 1)
    for indices in (
        [i],
        [None, j],
        [None, None, k],
        [i, j],
        [i, None, ints(5, 6)],
        [None, j, k],
        [ints(4, 4, 6), j],
        [b(4)],
    ):
        yield "index.Tensor", x, indices
        yield from (
            [("_unsafe_index.Tensor", x, indices)] if indices[0] is None or indices[0].dtype == torch.int64 else []
        )
        values = torch.ops.aten.index.Tensor(x, indices).clone().normal_()
        yield "index_put", x, indices, values, True
        yield "index_put", x, indices, f(), True
        yield "_unsafe_index_put", x, indices, values, True
    rows, last = torch.arange(4), torch.arange(6)
    for indices in (
        [rows, ints(6, 4)],
        [rows[:, None], ints(6, 4, 3)],
        [rows[:, None, None], None, ints(5, 1, 2, 3)],
        [ints(4, 6), last],
        [rows[:, None].expand(4, 6), last],
        [torch.arange(3), torch.arange(3)],
        [None, torch.arange(6).view(1, 6), torch.arange(5).view(5, 1)],
    ):
        yield "index.Tensor", x, indices
        values = torch.ops.aten.index.Tensor(x, indices).clone().normal_()
        yield "index_put", x, indices, values, True
        yield "index_put", x, indices, f(), True
    yield "index_put", x, [rows, None, torch.arange(5)[:4]], f(4, 6)
    yield "index_put", x, [rows, ints(6, 4)], f(4, 5)
    yield "index_put", x, [None, torch.tensor([0, 3])], f(4, 2, 5)
    yield "index_put", x, [torch.tensor([0, 3])], f(6, 5)
    yield places, torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1], [1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 1, 1]]) == 1, 2, "op"
    yield "one_hot", ints(7, 4, 5), 7
    yield "one_hot", ints(7, 4, 5)
    yield "bucketize.Tensor", x, torch.linspace(-1, 1, 4, dtype=torch.float64)
    bounds = torch.linspace(-1, 1, 4, dtype=torch.float64)
    yield "bucketize.Scalar", 0.5, bounds
    yield "searchsorted.Scalar", bounds, 0.5
    yield "searchsorted.Tensor", bounds, x, {"right": True}
    rows, order = x.sort()
    yield "searchsorted.Tensor", rows, f(4, 6, 7)
    yield "searchsorted.Tensor", x, f(4, 6, 7), {"sorter": order}
    yield "isin.Tensor_Tensor", ints(7, 4, 5), ints(7, 3)
    yield "isin.Tensor_Scalar", ints(7, 4, 5), 3


def normalization() -> Iterator[tuple[Any, ...]]:
    x, grad = f(4, 6, 5), f(4, 6, 5)
    for shape in ([5], [6, 5]):
        w, bias = f(*shape), f(*shape)
        _, mean, rstd = torch.ops.aten.native_layer_norm(x, shape, w, bias, 1e-5)
        yield "native_layer_norm", x, shape, w, bias, 1e-5
        yield "native_layer_norm", x, shape, None, None, 1e-5
        yield "native_layer_norm_backward", grad, x, shape, mean, rstd, w, bias, [True, True, True]
        yield "native_layer_norm_backward", grad, x, shape, mean, rstd, w, bias, [False, True, False]
        yield "native_layer_norm_backward", grad, x, shape, mean, rstd, None, None, [True, False, False]
        yield "_fused_rms_norm", x, shape, w, 1e-5
        rstd = torch.ops.aten._fused_rms_norm(x, shape, w, 1e-5)[1].to("meta")
        yield "_fused_rms_norm_backward", grad.to("meta"), x.to("meta"), shape, rstd, w.to("meta"), [True, True]
    image, grad = f(6, 4, 3, 2), f(6, 4, 3, 2)
    w, bias = f(4), f(4)
    yield "native_group_norm", image, w, bias, 6, 4, 6, 2, 1e-5
    _, mean, rstd = torch.ops.aten.native_group_norm(image, w, bias, 6, 4, 6, 2, 1e-5)
    for mask in ([True, True, True], [False, True, True]):
        yield "native_group_norm_backward", grad, image, mean, rstd, w, 6, 4, 6, 2, mask
    mean, var = f(4), u(4)
    for training in (False, True):
        yield "native_batch_norm", image, w, bias, mean.clone(), var.clone(), training, 0.1, 1e-5
        yield "_native_batch_norm_legit_functional", image, w, bias, mean, var, training, 0.1, 1e-5
        saved = (f(4), u(4)) if training else (f(0), f(0))
        yield "native_batch_norm_backward", grad, image, w, mean, var, *saved, training, 1e-5, [True, True, True]
    yield "_native_batch_norm_legit_no_training", image, w, bias, mean, var, 0.1, 1e-5


def attention() -> Iterator[tuple[Any, ...]]:
    q, k, v, grad = (f(4, 6, 5, 8) for _ in range(4))
    name = "_scaled_dot_product_flash_attention_for_cpu"
    for causal, mask in ((True, None), (False, None), (False, f(5, 5)), (False, f(4, 1, 5, 5)), (False, f(4, 6, 5, 5))):
        more = {"attn_mask": mask, "scale": 0.5}
        out, lse = getattr(torch.ops.aten, name)(q, k, v, 0.0, causal, **more)
        yield name, q, k, v, 0.0, causal, more
        yield f"{name}_backward", grad, q, k, v, out, lse, 0.0, causal, more
    for rows in (5, 12, 16):  # of which two, three and four ranks may have an early and a late run
        q, grad = f(4, 6, rows, 8), f(4, 6, rows, 8)
        few = f(4, 2, rows, 8)  # keys and values have fewer heads
        for causal, mask in ((True, None), (False, None), (False, f(rows, rows))):
            more = {"attn_mask": mask}
            out, lse = getattr(torch.ops.aten, name)(q, few, few, 0.0, causal, **more)
            yield name, q, few, few, 0.0, causal, more
            yield f"{name}_backward", grad, q, few, few, out, lse, 0.0, causal, more
    yield from attention_on_gpu()


def attention_on_gpu() -> Iterator[tuple[Any, ...]]:
    """Shapes alone, from torch's meta functions; queries also with more heads than keys."""
    q, grad, bias = meta(6, 12, 16, 8), meta(6, 12, 16, 8), meta(1, 12, 16, 16)
    flash, efficient, cudnn = (f"_scaled_dot_product_{name}_attention" for name in ("flash", "efficient", "cudnn"))
    for heads in (12, 6):
        k = v = meta(6, heads, 16, 8)
        yield flash, q, k, v, 0.0, True
        out, lse, cq, ck, mq, mk, seed, offset, _ = getattr(torch.ops.aten, flash)(q, k, v)
        yield f"{flash}_backward", grad, q, k, v, out, lse, cq, ck, mq, mk, 0.0, True, seed, offset
    for mask in (None, bias):
        yield efficient, q, q, q, mask, True
        out, lse, seed, offset = getattr(torch.ops.aten, efficient)(q, q, q, mask, True)
        needed = [True, True, True, mask is not None]
        yield f"{efficient}_backward", grad, q, q, q, mask, out, lse, seed, offset, 0.0, needed, False
        yield cudnn, q, q, q, mask, True
        out, lse, cq, ck, mq, mk, seed, offset, _ = getattr(torch.ops.aten, cudnn)(q, q, q, mask, True)
        yield f"{cudnn}_backward", grad, q, q, q, out, lse, seed, offset, mask, cq, ck, mq, mk, 0.0, False


def meta(*shape: int) -> torch.Tensor:
    """A half-precision tensor without elements' values."""
    return torch.empty(shape, dtype=torch.float16, device="meta")


def convolution() -> Iterator[tuple[Any, ...]]:
    x = f(4, 6, 5, 5)
    for groups, weight, bias in ((1, f(8, 6, 3, 3), f(8)), (1, f(8, 6, 3, 3), None), (2, f(8, 3, 3, 3), f(8))):
        rest = [1, 1], [1, 1], [1, 1], False, [0, 0], groups
        yield "convolution", x, weight, bias, *rest
        for mask in ([True, True, bias is not None], [False, True, False]):
            yield "convolution_backward", f(4, 8, 5, 5), x, weight, [8] if bias is not None else None, *rest, mask
    rest = [2, 2], [0, 0], [1, 1], True, [0, 0], 1
    yield "convolution", x, f(6, 8, 2, 2), f(8), *rest
    yield "convolution_backward", f(4, 8, 10, 10), x, f(6, 8, 2, 2), [8], *rest, [True, True, True]
    yield "convolution", f(4, 6, 7), f(4, 6, 3), f(4), [1], [1], [1], False, [0], 1
    for transposed, weight in ((False, f(12, 2, 3)), (True, f(8, 3, 3))):
        rest = [1], [1], [1], transposed, [0], 4
        yield "convolution", f(6, 8, 7), weight, f(12), *rest
        yield "convolution", f(6, 8, 7), weight, None, *rest
        for mask in ([True, True, True], [False, True, False], [False, False, True]):
            yield "convolution_backward", f(6, 12, 7), f(6, 8, 7), weight, [12], *rest, mask


def pooling() -> Iterator[tuple[Any, ...]]:
    for dims in (1, 2, 3):
        yield from _pooling(dims)
    yield "max_pool2d_with_indices", f(6, 8, 8), [2, 2], [2, 2]
    for name, more in (("bilinear", [False]), ("bicubic", [True]), ("lanczos", [False])):
        yield f"_upsample_{name}2d_aa", f(4, 6, 8, 8), [5, 4], *more
        yield f"_upsample_{name}2d_aa_backward", f(4, 6, 5, 4), [5, 4], [4, 6, 8, 8], *more


def sampling() -> Iterator[tuple[Any, ...]]:
    for space in ((8, 8), (4, 6, 8)):
        name = f"grid_sampler_{len(space)}d"
        x, grid, grad = f(4, 6, *space), u(4, *space, len(space)) * 2 - 1, f(4, 6, *space)
        for mode, padding in ((0, 0), (1, 1), (0, 2)):
            yield name, x, grid, mode, padding, False
            yield f"{name}_backward", grad, x, grid, mode, padding, False, [True, True]
        yield f"{name}_backward", grad, x, grid, 0, 0, True, [False, True]


def _pooling(dims: int) -> Iterator[tuple[Any, ...]]:
    aten = torch.ops.aten
    large, small, two = [8] * dims, [4] * dims, [2] * dims
    x, grad, up = f(4, 6, *large), f(4, 6, *small), f(4, 6, *([16] * dims))
    yield f"avg_pool{dims}d", x, two, two
    yield f"avg_pool{dims}d_backward", grad, x, two, two, [0] * dims, False, True, None
    yield f"_adaptive_avg_pool{dims}d", x, small
    yield f"_adaptive_avg_pool{dims}d_backward", grad, x
    yield f"adaptive_max_pool{dims}d", x, small
    if dims > 1:
        where = getattr(aten, f"adaptive_max_pool{dims}d")(x, small)[1]
        yield f"adaptive_max_pool{dims}d_backward", grad, x, where
        where = getattr(aten, f"max_pool{dims}d_with_indices")(x, two, two)[1]
        rest = [0] * dims, [1] * dims, False, where
        yield f"max_pool{dims}d_with_indices_backward", grad, x, two, two, *rest
    yield f"max_pool{dims}d_with_indices", x, two, two
    kinds = {1: ["linear1d"], 2: ["bilinear2d", "bicubic2d"], 3: ["trilinear3d"]}[dims]
    exact = [f"upsample_nearest{dims}d", f"_upsample_nearest_exact{dims}d"]
    for name, more in [(name, []) for name in exact] + [(f"upsample_{kind}", [False]) for kind in kinds]:
        yield name, x, [16] * dims, *more
        yield f"{name}.vec", x, None, *more, [2.0] * dims
        yield f"{name}_backward", up, [16] * dims, [4, 6, *large], *more
    if dims > 1:
        for image, given in ((x, grad), (x[0], grad[0])):
            samples = u(len(image) if image is x else 1, 6, dims)
            where = getattr(aten, f"fractional_max_pool{dims}d")(image, two, small, samples)[1]
            yield f"fractional_max_pool{dims}d", image, two, small, samples
            yield f"fractional_max_pool{dims}d_backward", given, image, two, small, where
    for kind in ("reflection", "replication"):
        yield f"{kind}_pad{dims}d", x, [1] * (2 * dims)
        yield f"{kind}_pad{dims}d_backward", f(4, 6, *([10] * dims)), x, [1] * (2 * dims)


def loss() -> Iterator[tuple[Any, ...]]:
    weight, target = u(7), ints(7, 6)
    target[1] = -100
    for w in (None, weight):
        for reduction in (0, 1, 2):
            out, total = torch.ops.aten.nll_loss_forward(f(6, 7), target, w, reduction, -100)
            yield "nll_loss_forward", f(6, 7), target, w, reduction, -100
            yield "nll_loss_backward", f(*out.shape), f(6, 7), target, w, reduction, -100, total
            where = ints(7, 4, 3, 5)
            out, total = torch.ops.aten.nll_loss2d_forward(f(4, 7, 3, 5), where, w, reduction, -100)
            yield "nll_loss2d_forward", f(4, 7, 3, 5), where, w, reduction, -100
            yield "nll_loss2d_backward", f(*out.shape), f(4, 7, 3, 5), where, w, reduction, -100, total
    yield "nll_loss_forward", f(7), torch.tensor(3), None, 2, -100
    rows = f(5, 6, 4).log_softmax(-1), ints(3, 6, 3) + 1, ints(4, 6) + 2, ints(3, 6)
    for zero_infinity in (True, False):
        yield ctc_loss, *rows, 0, zero_infinity
        yield ctc_loss_backward, f(6), *rows, *ctc_loss(*rows, 0, zero_infinity), 0, zero_infinity


def linalg() -> Iterator[tuple[Any, ...]]:
    x, y = f(4, 6, 3, 3), f(4, 6, 3, 2)
    positive = x @ x.mT + torch.eye(3, dtype=torch.float64)
    lower = torch.linalg.cholesky(positive)
    for a, right in ((lower, y), (lower[0, 0], y[0, 0]), (lower[0], y)):
        yield "linalg_solve_triangular", a, right, {"upper": False}
    yield "triangular_solve", y, lower, False
    yield "cholesky_solve", y, lower
    yield from ((name, positive) for name in ("cholesky", "linalg_cholesky_ex", "_linalg_eigh"))
    yield "cholesky_inverse", lower
    for name in ("linalg_inv_ex", "linalg_lu", "linalg_lu_factor_ex", "linalg_matrix_exp", "_linalg_det"):
        yield name, x
    yield from ((name, f(4, 6, 3, 2)) for name in ("linalg_qr", "_linalg_svd"))
    yield "_linalg_slogdet", x
    yield "linalg_eig", x
    for right in (y, f(4, 6, 3)):
        yield "_linalg_solve_ex", x, right
    yield "_linalg_solve_ex", f(3, 3, 3), f(3, 2)  # one matrix for all, with as many rows as there are systems
    factors, pivots, _ = torch.ops.aten.linalg_lu_factor_ex(x)
    yield "linalg_lu_solve", factors, pivots, y
    yield "_linalg_svd", f(4, 6, 3, 2), False, False
    yield "_linalg_eigvals", x
    yield from (("lu_unpack", factors, pivots, *asked) for asked in ((), (True, False), (False, True)))
    reflectors, tau = torch.geqrf(y)
    yield "geqrf", y
    yield "linalg_householder_product", reflectors, tau
    yield "ormqr", reflectors, tau, y, True, True
    factors, pivots = torch.linalg.ldl_factor(positive)
    yield "linalg_ldl_factor_ex", positive
    yield "linalg_ldl_solve", factors, pivots, y
    yield "linalg_pinv.atol_rtol_tensor", y
    yield "linalg_pinv.atol_rtol_tensor", y, {"rtol": u(4, 6)}
    yield "linalg_pinv.atol_rtol_tensor", y, {"atol": u()}


SOURCES = (
    pointwise,
    factories,
    views,
    splits_and_cats,
    reductions,
    scans,
    transforms,
    distances,
    matmul,
    grouped,
    indexing,
    linalg,
    normalization,
    attention,
    convolution,
    pooling,
    sampling,
    loss,
)
