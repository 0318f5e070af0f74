"""Ops on symbols, from their operands alone: moves, constants, pointwise ops, updates of optimizers.

``computed`` finds the function for an op. It takes the sizes of the mesh axes, the op, and what a call gives, with
elements instead of tensors, and symbols instead of numbers that are computed. It returns the results in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor, fx

from passes.ir.ops import Trait, has, over_lists, with_list_ops
from passes.ir.schemas import schema
from passes.runtime import answers, host_memory, master_copies
from passes.runtime.random import draw
from passes.update.optimizer_kernels import Kernel

from .._torch import OpOverload, tree_flatten, tree_map
from ..capture.constraint import CONSTRAIN
from ..rules.pointwise import LINEAR
from . import symbols
from .symbolic import addends, attention
from .symbolic.updates import UPDATES, WITH_ROOTS, described, new_values

aten = torch.ops.aten
Results = list[Any]
Sizes = Sequence[int]  # of the mesh axes
Computed = Callable[..., Results]

_VIEWS = """view _unsafe_view reshape t transpose permute unsqueeze squeeze expand slice select split split_with_sizes
unbind narrow alias detach""".split()
_MOVES = """cat stack clone contiguous repeat roll flip slice_scatter select_scatter wait_copy to_host
to_device""".split()
_MOVES += [f"{name}_copy" for name in _VIEWS]
_SPACES = ("aten", host_memory.NAMESPACE)
_LISTED = {listed: base for base in with_list_ops() for listed in over_lists(base) if listed is not None}


class Unknown(Exception):
    """A value that is not known from the operands alone. ``wrong``: nor can it be right.

    ``results``: what it is, unless it is to be reduced to a value of the captured program.
    """

    def __init__(self, why: str, wrong: bool = False, results: Results | None = None) -> None:
        super().__init__(why)
        self.wrong, self.results = wrong, results


@cache
def functional(op: Any) -> Any:
    """The op that returns what ``op`` writes."""
    if (
        not isinstance(op, OpOverload)
        or not schema(op).is_mutable
        or op.namespace not in (*_SPACES, master_copies.NAMESPACE)
    ):
        return op
    space = getattr(torch.ops, op.namespace)
    for name in dict.fromkeys((schema(op).name.removesuffix("_"), schema(op).name)):
        packet = getattr(space, name, None)
        for other in () if packet is None else (getattr(packet, each) for each in packet.overloads()):
            if not schema(other).is_mutable and schema(other).typed == schema(op).typed:
                return other
    return op


def call_of(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The functional op that a node performs, its arguments, and keyword arguments without memory for results."""
    if node.target is draw:
        return node.args[0], tuple(node.args[4:]), dict(node.kwargs)
    op = functional(node.target)
    outs = {each.name for each in schema(node.target).arguments if each.is_out} if isinstance(op, OpOverload) else set()
    return op, node.args, {name: value for name, value in node.kwargs.items() if name not in outs}


def is_tensor(given: Any) -> bool:
    """Whether an argument is the tensor of a node."""
    return isinstance(given, fx.Node) and isinstance(given.meta.get("val"), Tensor)


def is_view(op: OpOverload) -> bool:
    """Whether an op shows its operand's own elements."""
    return op.namespace == "aten" and schema(op).name in _VIEWS and schema(op).overload != "dtype"


def computed(op: OpOverload) -> Computed | None:
    """The function that computes what ``op`` does; None if it is not known."""
    name, space = schema(op).name, op.namespace
    if is_view(op) or (name in _MOVES and space in _SPACES):
        return moved
    if space == master_copies.NAMESPACE:
        return _current
    if space == answers.NAMESPACE or op is CONSTRAIN:
        return moved
    if space == "aten" and name in attention.COMPUTED:
        return attention.COMPUTED[name]
    if space != "aten" or has(op, Trait.RANDOM):
        return None
    if op in _LISTED:
        return _over_lists
    if name in UPDATES:
        return _updated
    if has(op, Trait.ZEROS, Trait.ONES, Trait.FULL) or name in ("arange", "eye", "scalar_tensor"):
        return _constant
    if name in _OTHERS:
        return _OTHERS[name]
    return _pointwise if has(op, Trait.POINTWISE) and schema(op).results == ("Tensor",) else None


def hashed(op: OpOverload, results: Results, args: Any, kwargs: Any) -> list[Tensor]:
    """Results that are hashes, and not computed in the field."""
    name = schema(_LISTED.get(op, op)).name
    if attention.merges(name, _present(op, _named(op, args, kwargs))):
        return []
    if name in UPDATES:
        return symbols.tensors_of(results[0]) if name in WITH_ROOTS else []
    if name in _EXACT or computed(op) not in (_pointwise, _over_lists):
        return []
    return symbols.tensors_of(results)


def moved(sizes: Sizes, op: OpOverload, *args: Any, **kwargs: Any) -> Results:
    """Elements somewhere else, run by torch."""
    if op.namespace in (host_memory.NAMESPACE, answers.NAMESPACE) or op is CONSTRAIN:
        return [args[0].clone()]
    kept = {name: value for name, value in kwargs.items() if name not in ("memory_format", "device")}
    result = op(*args, **kept)
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _constant(sizes: Sizes, op: OpOverload, *args: Any, **kwargs: Any) -> Results:
    """The result of an op on plain numbers, each element as symbols."""
    given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    numbers = [leaf for leaf in given if leaf.dtype != torch.complex128]
    args, kwargs = tree_map(lambda x: _stand_in(x, "cpu") if isinstance(x, Tensor) else x, (args, kwargs))
    result = op(*args, **{name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")})
    if not numbers:
        return [symbols.of_values(result)]
    filled = symbols.cast(numbers[0], result.dtype) if result.dtype != torch.float64 else numbers[0]
    return [symbols.elements(filled.expand(result.shape), symbols.mark_of(result.dtype))]


def _padded(sizes: Sizes, op: OpOverload, x: Tensor, pads: Sequence[int], value: Any = 0) -> Results:
    found, marks = symbols.pieces(x)
    inside = op(torch.ones(x.shape, dtype=torch.int64), pads, 0).bool()
    dtype, (outside, mark) = symbols.dtype_of(x), attention.filling(x, value)
    mark |= 0 if dtype is None else symbols.mark_of(dtype)
    padded = torch.where(inside, op(found.contiguous(), pads, 0), outside)
    return [symbols.elements(padded, op(marks.contiguous(), pads, mark))]


def _current(sizes: Sizes, op: OpOverload, master: Tensor, held: Tensor, wire: torch.dtype) -> Results:
    """A master copy, of which the parameter holds what was sent."""
    own, found = (symbols.pieces(x)[0] for x in (master, held))
    if not bool((own == found).all()):
        raise Unknown("it reads a part of a parameter beside the master copy of another one", wrong=True)
    return [master.clone()]


def _filled(sizes: Sizes, op: OpOverload, x: Tensor, value: Any) -> Results:
    dtype = symbols.dtype_of(x) or torch.get_default_dtype()
    if isinstance(value, Tensor):
        raise Unknown("it is filled with a number that is computed")
    return [symbols.of_values(torch.full(x.shape, value, dtype=dtype))]


def _empty(sizes: Sizes, op: OpOverload, *args: Any, **kwargs: Any) -> Results:
    """Memory without values."""
    made = _constant(sizes, op, *args, **kwargs)
    symbols.pieces(made[0])[0].fill_(symbols.UNWRITTEN)
    return made


def _summed(
    sizes: Sizes, op: OpOverload, x: Tensor, dims: Any = None, keepdim: bool = False, dtype: Any = None
) -> Results:
    found = addends.summed(x, list(dims or ()), keepdim)
    if found is None or _result_dtype(op, (x, dims), {"dtype": dtype}) != symbols.dtype_of(x):  # it casts first
        raise Unknown(f"no call of {op} in the captured program has operands of which these are parts")
    return [found]


_OTHERS: dict[str, Computed] = {
    "sum": _summed,
    "constant_pad_nd": _padded,
    "fill": _filled,
    "zero": lambda sizes, op, x: _filled(sizes, op, x, 0),
    **dict.fromkeys(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"), _empty),
}


def _pointwise(sizes: Sizes, op: OpOverload, *args: Any, **kwargs: Any) -> Results:
    return [_elementwise(sizes, op, _named(op, args, kwargs), _result_dtype(op, args, kwargs))]


def _named(op: OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments that are given, by name."""
    named = {
        each.name: args[k] if k < len(args) else kwargs.get(each.name) for k, each in enumerate(schema(op).arguments)
    }
    return named


def _present(op: OpOverload, named: dict[str, Any]) -> dict[str, Any]:
    """The arguments that are not as they are by default."""
    defaults = {each.name: each.default for each in schema(op).arguments}
    return {k: v for k, v in named.items() if v is not None and (isinstance(v, Tensor) or v != defaults.get(k))}


def _result_dtype(op: OpOverload, args: Any, kwargs: Any) -> torch.dtype:
    """The dtype that torch gives, by the operands' own."""
    given = tree_flatten((args, kwargs))[0]
    args, kwargs = tree_map(
        lambda x: _stand_in(x, "meta", (1,) * x.ndim) if isinstance(x, Tensor) else x,
        (args, {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}),
    )
    try:
        return op(*args, **kwargs).dtype  # type: ignore[no-any-return]
    except RuntimeError:
        if any(isinstance(x, Tensor) and not x.numel() for x in given):
            return torch.get_default_dtype()  # of no elements
        raise


def _stand_in(x: Tensor, device: str, shape: Sequence[int] | None = None) -> Any:
    if x.dtype != torch.complex128:
        return 1.0  # a number
    dtype = symbols.dtype_of(x)
    if dtype is None and x.numel():
        raise Unknown("its operand has elements of several dtypes")
    return torch.zeros(x.shape if shape is None else shape, dtype=dtype or torch.get_default_dtype(), device=device)


def _elementwise(sizes: Sizes, op: OpOverload, named: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """An op on tensors that broadcast, and on numbers."""
    name, given = schema(op).name, _present(op, named)
    if attention.merges(name, given):
        found, mark = attention.merged(name, given)
        return symbols.elements(found, symbols.mark_of(dtype) | mark)
    if name not in ("copy", "_to_copy"):
        given = {k: symbols.without_logarithms(v) if symbols.tensors_of(v) else v for k, v in given.items()}
    if name == "copy":
        shape, given = given["self"].shape, {"src": given["src"]}
    tensors = {k: x for k, x in given.items() if isinstance(x, Tensor) and x.dtype == torch.complex128}
    pending, tensors = _pending(sizes, op, tensors)
    given |= tensors
    marks = pending | symbols.mark_of(dtype)
    dtypes = [each for each in map(symbols.dtype_of, tensors.values()) if each is not None]
    if name in ("copy", "_to_copy"):
        (x,) = tensors.values()
        found, kept = symbols.pieces(symbols.with_dtype(x, dtype).expand(shape if name == "copy" else x.shape))
        return symbols.elements(found, marks | (kept & symbols.LOGARITHM))
    values = {k: symbols.symbol(v) for k, v in given.items()}
    if name in _EQUIVALENT:
        name, more = _EQUIVALENT[name]
        values |= {k: symbols.symbol(v) for k, v in more.items()}
    found = function(name, dtype, list(values.values()), list(values), reduce(torch.promote_types, dtypes, torch.bool))
    shape = torch.broadcast_shapes(*(x.shape for x in tensors.values()))
    return symbols.elements(found.expand(shape), marks)


def function(
    name: str, dtype: torch.dtype, given: list[Tensor], names: Sequence[str] = (), of: torch.dtype | None = None
) -> Tensor:
    """A function of symbols, element by element: computed in the field if it can be, else a hash.

    ``names`` of the arguments; ``of``: the dtype that the operands have together, if not that of the result.
    """
    arithmetic = symbols.ARITHMETIC.get(name)
    is_whole = not dtype.is_floating_point and dtype is not torch.bool
    if arithmetic is None or "rounding_mode" in names or not (dtype.is_floating_point or (is_whole and name in _WHOLE)):
        return symbols.hashed(symbols.key(name, str(dtype), *names), *torch.broadcast_tensors(*given))
    named = list(zip(names or [""] * len(given), given, strict=True))
    extra = {name: value for name, value in named if name in ("alpha", "value")}
    found = arithmetic(*(value for name, value in named if name not in extra), **extra)
    rounds = of is not None and of != dtype and of.is_floating_point
    return symbols.cast(found, dtype, of) if rounds else found


_EQUIVALENT = {"relu": ("clamp_min", {"min": 0})}  # the same function by another name
_EXACT = set(symbols.ARITHMETIC) - {"pow", "sqrt", "rsqrt"} | {"copy"}
_WHOLE = ("add", "sub", "rsub", "mul", "neg")  # as exact for whole numbers


def _pending(sizes: Sizes, op: OpOverload, tensors: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """The marks of a pointwise result, and the operands as pending as it is.

    Raises ``Unknown`` unless the op is linear in what is pending.
    """
    if not tensors:
        return torch.tensor(0), tensors
    marks = {name: symbols.pieces(x)[1] for name, x in tensors.items()}
    unknown = reduce(torch.bitwise_or, (each & symbols.DOUBT for each in torch.broadcast_tensors(*marks.values())))
    pending = {name: mark & symbols.PENDING for name, mark in marks.items()}
    having = {name for name, mark in pending.items() if bool(mark.any())}
    if not having:
        return unknown, tensors
    if bool((unknown & symbols.ADDEND).any()):
        raise Unknown("it reads addends of a sum that ranks have exchanged, and what is still to be reduced")
    for names in LINEAR.get(op, ()):
        if having <= set(names) <= set(tensors):
            together = reduce(torch.bitwise_or, torch.broadcast_tensors(*(pending[name] for name in names)))
            if together.max() < 1 << symbols.AXES:
                added = {name: symbols.as_pending(tensors[name], together, sizes) for name in names}
                return together.expand(unknown.shape) | unknown, tensors | added
    raise Unknown("it reads a value that is still to be reduced, which is not linear", wrong=True)


def _over_lists(sizes: Sizes, op: OpOverload, *args: Any, **kwargs: Any) -> Results:
    """An op over lists does for each entry what the op on tensors does."""
    base = _LISTED[op]
    declared = schema(base).arguments
    given = [args[k] if k < len(args) else kwargs.get(each.name) for k, each in enumerate(schema(op).arguments)]
    results = []
    for k in range(len(args[0])):
        one = [x[k] if isinstance(x, (list, tuple)) else x for x in given]
        named = {each.name: x for each, x in zip(declared, one, strict=False)}
        options = {each.name: named.pop(each.name) for each in declared if each.kwarg_only and each.name in named}
        options = {name: x for name, x in options.items() if x is not None}
        results.append(_elementwise(sizes, base, named | options, _result_dtype(base, tuple(named.values()), options)))
    return results


def _updated(sizes: Sizes, op: OpOverload, *args: Any, **kwargs: Any) -> Results:
    """The lists that a kernel of an optimizer returns: gradients and counts as they are."""
    kernel = described(op, kwargs)
    if isinstance(kernel, str):
        raise Unknown(f"{op}: {kernel}")
    lists = dict(zip(kernel.lists, args, strict=True))
    if any(bool((symbols.pieces(x)[1] & symbols.PENDING).any()) for x in symbols.tensors_of(lists)):
        raise Unknown("it reads a value that is still to be reduced, which is not linear", wrong=True)
    results = {name: list(given) for name, given in lists.items()}
    for k, param in enumerate(lists["p"]):
        entry = {name: given[k] for name, given in lists.items() if given}
        for name, new in new_values(kernel, _in_one_dtype(kernel, entry), kwargs).items():
            unknown = reduce(torch.bitwise_or, (symbols.pieces(x)[1] & symbols.DOUBT for x in entry.values()))
            results[name][k] = symbols.elements(new, (symbols.pieces(param)[1] & ~symbols.DOUBT) | unknown)
    return list(results.values())[: len(schema(op).results)]


def _in_one_dtype(kernel: Kernel, entry: dict[str, Tensor]) -> dict[str, Tensor]:
    """The symbols of a parameter and its state; a count is computed in their dtype."""
    dtypes = {symbols.dtype_of(x) for name, x in entry.items() if name != kernel.counts and x.numel()}
    if len(dtypes) > 1 or None in dtypes:
        raise Unknown("it updates a parameter by values of another dtype")
    dtype = next(iter(dtypes), None)
    if kernel.counts is not None and dtype is not None:
        entry = entry | {kernel.counts: symbols.with_dtype(entry[kernel.counts], dtype)}
    return {name: symbols.pieces(x)[0] for name, x in entry.items()}
