"""Matrix products: rows, columns and batches may be split; a split contraction gives partial sums.

A product is linear in each factor, so one partial factor gives a partial product. A tensor to which a partial product
is added must be partial, too.
"""

from __future__ import annotations

from functools import partial

from .base import OpCall, Option
from .einsum_labels import Dims, aligned, letters, options
from .optional_ops import aten
from .registry import rule

PRODUCTS = {
    ("mm", "mm.dtype"): Dims({"self": "mk", "mat2": "kn"}, "mn", reduced="k", linear=(("self",), ("mat2",))),
    ("bmm", "bmm.dtype"): Dims({"self": "bmk", "mat2": "bkn"}, "bmn", reduced="k", linear=(("self",), ("mat2",))),
    ("mv",): Dims({"self": "mk", "vec": "k"}, "m", reduced="k", linear=(("self",), ("vec",))),
    ("dot",): Dims({"self": "k", "tensor": "k"}, "", reduced="k", linear=(("self",), ("tensor",))),
    ("vdot",): Dims({"self": "k", "other": "k"}, "", reduced="k", linear=(("self",), ("other",))),
    ("outer",): Dims({"self": "m", "vec2": "n"}, "mn", linear=(("self",), ("vec2",))),
}

# The factors, their product, and what is summed over. `self`, which the product is added to, broadcasts to the result.
SUMS_WITH_PRODUCTS = {
    ("addmm", "addmm.dtype"): ({"mat1": "mk", "mat2": "kn"}, "mn", "k"),
    ("baddbmm", "baddbmm.dtype"): ({"batch1": "bmk", "batch2": "bkn"}, "bmn", "k"),
    ("addbmm",): ({"batch1": "bmk", "batch2": "bkn"}, "mn", "bk"),
    ("addmv",): ({"mat": "mk", "vec": "k"}, "m", "k"),
    ("addr",): ({"vec1": "m", "vec2": "n"}, "mn", ""),
}


def product(call: OpCall, dims: Dims) -> list[Option]:
    """The dims as labelled."""
    return options(call, dims)


def sum_with_product(call: OpCall, factors: dict[str, str], result: str, reduced: str) -> list[Option]:
    """The dims of the factors as labelled, and of ``self`` as in the result."""
    operands = {"self": aligned(call.arg("self"), result), **factors}
    linear = tuple(("self", name) for name in factors)
    return options(call, Dims(operands, result, reduced=reduced, broadcast=True, onto="self", linear=linear))


for _names, _dims in PRODUCTS.items():
    rule(*aten(*_names))(partial(product, dims=_dims))

for _names, (_factors, _result, _reduced) in SUMS_WITH_PRODUCTS.items():
    rule(*aten(*_names))(partial(sum_with_product, factors=_factors, result=_result, reduced=_reduced))


@rule(*aten("linear"))
def linear(call: OpCall) -> list[Option]:
    """All leading dims of the input, the rows of the weight, and the contraction."""
    rows = letters(call.arg("input").ndim - 1)
    n, k = "NK"
    if call.arg("weight").ndim != 2:
        return options(call, Dims({"input": rows + k, "weight": k}, rows, linear=(("input",), ("weight",))))
    operands = {"input": rows + k, "weight": n + k, "bias": n}
    linear_in = tuple((name, "bias") if call.arg("bias") is not None else (name,) for name in ("input", "weight"))
    onto = "bias" if call.arg("bias") is not None else ""
    return options(call, Dims(operands, rows + n, reduced=k, onto=onto, linear=linear_in))


@rule(*aten("_trilinear"))
def trilinear(call: OpCall) -> list[Option]:
    """Three factors, multiplied dim by dim and summed over ``sumdim``; each lacks the dims of its ``expand``."""
    factors = {f"i{k}": set(call.arg(f"expand{k}")) for k in (1, 2, 3)}
    names = letters(call.arg("i1").ndim + len(factors["i1"]))
    operands = {name: "".join(c for d, c in enumerate(names) if d not in lacks) for name, lacks in factors.items()}
    summed = "".join(names[d] for d in call.arg("sumdim"))
    result = "".join(c for c in names if c not in summed)
    linear_in = tuple((name,) for name in factors)
    return options(call, Dims(operands, result, reduced=summed, broadcast=True, linear=linear_in))
