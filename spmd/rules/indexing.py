"""Ops that read and write rows by index.

Indices are global positions in the dim they index, so that dim stays whole; the dims of the indices may be split, and
so may all dims that are not indexed. Where rows are *added* to a tensor, a split of the indices leaves each rank with a
part of the sum: the tensor added to, and the result, are partial. An iota index (0, 1, 2, ...) over the dim it indexes
reads each row at its own position: the dim may be split together with the index, which then starts from 0 on each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from passes.runtime.answers import asked
from passes.runtime.places_in_rows import places

from ..placements import ByGroup, OwnRows
from . import lookup
from .base import Info, Local, OpCall, Option, P, Parts, Run, S
from .einsum_labels import WHOLE, Dims, aligned, letters, option, options, without, wrap
from .experts import exchange_rows, looked_up
from .optional_ops import aten
from .registry import rule, whole


@rule(*aten("embedding"))
def embedding(call: OpCall) -> list[Option]:
    """The dims of the indices, and the columns of the weight; also its rows, each rank looking up those it has."""
    rows = letters(call.arg("indices").ndim)
    found = options(call, Dims({"weight": WHOLE + "D", "indices": rows}, rows + "D", linear=(("weight",),)))
    return [*found, replace(option(call, {"weight": S(0)}, P), local=lookup.embedding)]


@rule(*aten("embedding_dense_backward"))
def embedding_dense_backward(call: OpCall) -> list[Option]:
    """The dims of the indices, each rank summing over its own; or, with all indices, the rows of the table.

    Scaling by frequency needs all indices.
    """
    by_rows = replace(option(call, {}, S(0)), local=lookup.embedding_backward)
    if call.arg("scale_grad_by_freq"):
        return [by_rows]
    rows = letters(call.arg("indices").ndim)
    operands = {"grad_output": rows + "D", "indices": rows}
    return [*options(call, Dims(operands, WHOLE + "D", reduced=rows, linear=(("grad_output",),))), by_rows]


@rule(*aten("gather"))
def gather(call: OpCall) -> list[Option]:
    """Dims where index and tensor agree; along the gathered dim, the index only."""
    index = letters(call.arg("index").ndim)
    whole = without(index, wrap(call.arg("dim"), len(index)))
    if call.arg("self").ndim != len(index):
        return []
    return options(call, Dims({"self": whole, "index": index}, index, linear=(("self",),)))


@rule(*aten("scatter.value", "scatter.src", "scatter.reduce", "scatter.value_reduce", "scatter_reduce.two"))
def scatter(call: OpCall) -> list[Option]:
    """Dims where index, source and tensor agree."""
    names = _scattered(call)
    if names is None:
        return []
    operands = {"self": names, "index": names} | ({"src": names} if isinstance(call.arg("src"), Info) else {})
    return options(call, Dims(operands, names))


@rule(*aten("scatter_add"))
def scatter_add(call: OpCall) -> list[Option]:
    """Dims where index, source and tensor agree; along the scattered dim each rank adds its part."""
    names = _scattered(call)
    if names is None:
        return []
    along = wrap(call.arg("dim"), len(names))
    source = "".join("I" if d == along else c for d, c in enumerate(names))
    operands = {"self": names, "index": source, "src": source}
    return options(call, Dims(operands, names, reduced="I", onto="self", linear=(("self", "src"),)))


def _scattered(call: OpCall) -> str | None:
    """Labels for tensor, index and source; None if they have different numbers of dims."""
    if len({info.ndim for info in call.operands}) != 1:
        return None
    ndim = call.arg("self").ndim
    return without(letters(ndim), wrap(call.arg("dim"), ndim))


@rule(*aten("index_select"))
def index_select(call: OpCall) -> list[Option]:
    """The index, and all dims that are not indexed."""
    names = without(letters(call.arg("self").ndim), wrap(call.arg("dim"), call.arg("self").ndim))
    index = "I"[: call.arg("index").ndim]
    result = names.replace(WHOLE, index or WHOLE)
    found = options(call, Dims({"self": names, "index": index}, result, linear=(("self",),)))
    if not names.startswith(WHOLE):
        return found
    numbered = _of_numbered(call, [call.arg("index")], P, looked_up.taken)
    return [*numbered, *exchange_rows.taken(call, call.arg("index")), *found]


@rule(*aten("index_add", "index_copy", "index_reduce", "index_fill.int_Scalar", "index_fill.int_Tensor"))
def index_write(call: OpCall) -> list[Option]:
    """All dims that are not indexed; rows that are added may be split, each rank adding its part."""
    names = without(letters(call.arg("self").ndim), wrap(call.arg("dim"), call.arg("self").ndim))
    adds = "index_add" in str(call.target)
    index = "I"[: call.arg("index").ndim] if adds else WHOLE[: call.arg("index").ndim]
    rows = names.replace(WHOLE, index or WHOLE)
    operands = {"self": names, "index": index}
    if isinstance(call.arg("source"), Info) and call.arg("source").ndim == len(names):
        operands["source"] = rows
    elif call.arg("source") is not None:
        return []
    if not adds:
        return options(call, Dims(operands, names))
    found = options(call, Dims(operands, names, reduced="I", onto="self", linear=(("self", "source"),)))
    adds_rows = names.startswith(WHOLE) and call.arg("alpha") == 1 and "source" in operands
    if not adds_rows:
        return found
    numbered = _of_numbered(call, [call.arg("index")], S(0), looked_up.added)
    return [*numbered, *exchange_rows.added(call, call.arg("index"), "source"), *found]


@rule(*aten("index.Tensor", "_unsafe_index.Tensor"))
def index(call: OpCall) -> list[Option]:
    """The dims of the indices (which broadcast), and all dims of the tensor that have no index."""
    labels = _indexed(call)
    if labels is None:
        return []
    source, indices, result = labels
    operands = {"self": source, "indices": indices}
    found = options(call, Dims(operands, result, broadcast=True, linear=(("self",),)))
    exchanged = exchange_rows.taken(call, call.arg("indices")[0]) if len(call.arg("indices")) == 1 else []
    return [*_of_own_experts(call), *exchanged, *_from_zero(call, found)]


def _of_own_experts(call: OpCall) -> list[Option]:
    """Weights by the number of their expert: those of the rows that go to the rank of their expert."""
    group = _numbers_experts(call)
    if group is None:
        return _of_numbered(call, call.arg("indices"), P, looked_up.taken)
    return [replace(option(call, {"self": S(0)}, group), local=_index_own)]


def _of_numbered(call: OpCall, indices: Sequence[Any], result: Placement, local: Local) -> list[Option]:
    """Weights by number, if that is what the first of the indices holds, and it is the only one: where they lie."""
    first, *others = indices
    counts = isinstance(first, Info) and first.numbered == call.arg("self").shape[0]
    if not counts or any(each is not None for each in others):
        return []
    return [replace(option(call, {"self": S(0)}, result), local=local)]


def _numbers_experts(call: OpCall) -> ByGroup | None:
    """The rows that go to their experts, if dim 0 alone is indexed, by the expert of each."""
    first, *others = call.arg("indices")
    group = first.group if isinstance(first, Info) else None
    if group is None or group.ends or any(each is not None for each in others):
        return None
    return group if call.arg("self").shape[0] == group.count else None


def _index_own(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    return run(call.target, (args[0], [run.own_numbers(None)]))


def _add_to_own(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    values = run.only_own(args[2], 2)
    return run(call.target, (args[0], [run.own_numbers(2)], values, True))


@rule(*aten("index_put", "_unsafe_index_put"))
def index_put(call: OpCall) -> list[Option]:
    """All dims that have no index; if values are added, also the dims of the indices, each rank adding its part."""
    labels = _indexed(call)
    if labels is None:
        return []
    source, indices, rows = labels
    operands = {"self": source, "indices": indices, "values": aligned(call.arg("values"), rows)}
    if not call.arg("accumulate"):
        kept = "".join(c for c in source if c != WHOLE)
        operands["indices"] = ["".join(c if c in kept else WHOLE for c in one) for one in indices]
        operands["values"] = "".join(c if c in kept else WHOLE for c in aligned(call.arg("values"), rows))
        return _from_zero(call, options(call, Dims(operands, source, broadcast=True)))
    summed = "".join(c for c in rows if c not in source)
    added = Dims(operands, source, reduced=summed, broadcast=True, onto="self", linear=(("self", "values"),))
    group, first = _numbers_experts(call), call.arg("indices")[0]
    whole_rows = len(indices) == 1 and call.arg("values").shape[:1] == first.shape
    own = [option(call, {"self": S(0), "values": group}, S(0))] if whole_rows and group is not None else []
    exchanged = exchange_rows.added(call, call.arg("indices")[0], "values") if whole_rows else []
    own = [replace(each, local=_add_to_own) for each in own]
    numbered = _of_numbered(call, call.arg("indices"), S(0), looked_up.added) if group is None else []
    return [*own, *numbered, *exchanged, *_from_zero(call, options(call, added))]


def _indexed(call: OpCall) -> tuple[str, list[str], str] | None:
    """Labels of tensor, indices and indexed rows; None if an index is a mask, which selects an unknown number of rows.

    The dims of the indices replace the indexed dims if those are adjacent; else they come first.
    """
    source: Info = call.arg("self")
    indices: list[Any] = list(call.arg("indices"))
    given = [d for d, one in enumerate(indices) if isinstance(one, Info)]
    if not given or any(indices[d].dtype in (torch.bool, torch.uint8) for d in given):
        return None
    names = without(letters(source.ndim), *given)
    inner = letters(len(torch.broadcast_shapes(*(indices[d].shape for d in given))), start=26)
    adjacent = given == list(range(given[0], given[-1] + 1))
    at = given[0] if adjacent else 0
    kept = [c for d, c in enumerate(names) if d not in given]
    rows = "".join(kept[:at]) + inner + "".join(kept[at:])
    labels = [aligned(one, inner) if isinstance(one, Info) else "" for one in indices]
    return _with_iota_dims(source, indices, names, labels), labels, rows


def _with_iota_dims(source: Info, indices: list[Any], names: str, labels: list[str]) -> str:
    """``names``, with the letter of the index's dim for each dim that is indexed by an iota over all its rows."""
    found = list(names)
    for d, one in enumerate(indices):
        if isinstance(one, Info) and one.iota_dim is not None and one.shape[one.iota_dim] == source.shape[d] > 1:
            letter = labels[d][one.iota_dim]
            found[d] = letter if letter not in found else WHOLE
    return "".join(found)


def _from_zero(call: OpCall, found: list[Option]) -> list[Option]:
    """The options, with the index of a split dim starting from 0 on each rank."""
    given = [d for d, one in enumerate(call.arg("indices")) if isinstance(one, Info)]
    splits = {d: 1 + k for k, d in enumerate(given)}  # operands: the tensor, then the indices
    found = [o for o in found if not (isinstance(o.operands[0], OwnRows) and o.operands[0].dim in splits)]
    first = [option.operands[0] for option in found]
    return [
        replace(o, from_zero=(splits[p.dim],)) if isinstance(p, Shard) and p.dim in splits else o
        for o, p in zip(found, first, strict=True)
    ]


@rule(places)
def places_in_rows(call: OpCall) -> list[Option]:
    """The rows of the mask, each of which counts its own elements."""
    return options(call, Dims({"mask": "r" + WHOLE}, "r" + WHOLE))


@rule(*aten("one_hot"))
def one_hot(call: OpCall) -> list[Option]:
    """All dims, if the number of classes is given and does not depend on the data."""
    names = letters(call.arg("self").ndim)
    return options(call, Dims({"self": names}, names + WHOLE)) if call.arg("num_classes") > 0 else []


@rule(*aten("bucketize.Tensor"))
def bucketize(call: OpCall) -> list[Option]:
    """All dims: each element is compared with all boundaries."""
    names = letters(call.arg("self").ndim)
    return options(call, Dims({"self": names}, names))


@rule(*aten("searchsorted.Tensor"))
def searchsorted(call: OpCall) -> list[Option]:
    """All dims of the values, against whole sequences; where each row has its own sequence, both split by rows."""
    sequence, values = call.arg("sorted_sequence"), call.arg("self")
    names = letters(values.ndim)
    own = WHOLE if sequence.ndim == 1 else names[:-1] + WHOLE
    return options(call, Dims({"sorted_sequence": own, "self": names, "sorter": own}, names))


@rule(*aten("isin.Tensor_Tensor", "isin.Tensor_Scalar"))
def isin(call: OpCall) -> list[Option]:
    """All dims: each element is compared with all test elements."""
    names = letters(call.arg("elements").ndim)
    return options(call, Dims({"elements": names}, names))


# The number of rows, or their order, depends on all the data.
whole(*aten("nonzero", "nonzero_static", "masked_select", "where", "unique_consecutive", "_unique2"))

# The partitioner writes them as other ops.
whole(*aten("masked_scatter", "masked_scatter_backward"))

# One number is looked up in one sequence.
whole(*aten("searchsorted.Scalar", "bucketize.Scalar"))

# A value for Python, or an assertion, depends on all the data.
whole(*aten("_local_scalar_dense", "is_nonzero", "equal", "_assert_async", "_assert_async.msg"), asked)
