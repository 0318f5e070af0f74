"""Traits of ops: one table, and the functions that read it.

Most of it is read from torch's schemas and tags. ``_LISTED`` has what they lack: a row for each trait, with the reason.
Passes, analyses, the partitioner and sharding rules ask here for the traits of an op: a view, random, pointwise, ...
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum, auto
from functools import cache
from typing import Any, cast

import torch

from .._torch import SYMBOLIC_FUNCTIONS, OpOverload, c10d, has_kernel, is_composite
from ..runtime import answers, ctc_loss, host_memory, master_copies, message_collectives, places_in_rows, rooms
from ..runtime.collective_ops import NAMESPACE
from ..runtime.random import draw
from .region import Island, Region
from .schemas import position_of, schema


class Trait(StrEnum):
    """Something that holds for every call of an op."""

    # Read from schemas and tags.
    DECLARED = auto()  # its schema says all that it writes, and which results share memory with arguments
    COMPOSITE = auto()  # built from other ops: it may return its argument although its schema does not say so
    PURE = auto()  # it depends on its arguments alone; unless it writes, that is all it does
    MUTABLE = auto()  # it writes to an argument
    VIEW = auto()  # a result may lie in an argument's memory, and nothing is written
    ALIAS = auto()  # its results always lie in arguments' memory: views, or what was written in place
    RANDOM = auto()  # it draws from a generator
    POINTWISE = auto()  # each element of the result depends on the operands' elements at its position alone
    POINTWISE_KERNEL = auto()  # and its kernel may write over an operand, and lays results out as operands lie
    PROFILING = auto()  # it opens or closes a profiler range
    # Listed: what it does beside computing.
    ASSERTS = auto()  # it raises where a condition does not hold, and has no result
    BEGINS_ANEW = auto()  # it notes whether another program has to run the call: no state is written before it
    # Listed: what it does to memory.
    UNDECLARED_VIEW = auto()  # its result lies in its operand's memory, or may, though it is declared as a copy
    WRITES_STATISTICS = auto()  # it writes running statistics in training, which it does not declare
    READS_MEMORY = auto()  # its result depends on where its operand lies, on strides or offset, and not on values alone
    # Listed: what becomes of the elements.
    SAME_ELEMENTS = auto()  # the result has the operand's elements as they are
    RETURNS_OPERAND = auto()  # the result is the operand, without its gradient history
    COPIES = auto()  # the result is a copy of the operand, perhaps in another dtype or on another device
    RESHAPES = auto()  # the elements in their order, in another shape: a view where strides allow
    PERMUTES = auto()  # the dims in another order
    SQUEEZES = auto()  # dims of length one more or fewer
    EXPANDS = auto()  # dims of length one repeated
    CUTS = auto()  # some of the elements along ``dim``
    JOINS = auto()  # whole tensors one after the other along ``dim``
    FLATTENS = auto()  # it leaves the elements of a contiguous tensor in their order
    TAKES_PARTS = auto()  # it cuts contiguous parts out of a contiguous tensor, or shows all of it
    # Listed: what a tensor is filled with.
    ZEROS = auto()
    ONES = auto()
    FULL = auto()  # its argument ``fill_value``
    # Listed: how the result lies.
    MAKES_CONTIGUOUS = auto()  # contiguous, however the operands lie
    KEEPS_CONTIGUOUS = auto()  # contiguous if all operands are
    # Listed: how its out variant writes.
    WRITES_ANY_LAYOUT = auto()  # it follows the strides of the memory that it is given
    NO_OUT_VARIANT = auto()  # it cannot be relied on: it resizes or restrides what it is given, or nothing tries it
    # Listed: what it costs, and what it is there for.
    CHEAP = auto()  # it costs next to nothing
    TRANSCENDENTAL = auto()  # it computes a function such as exp, erf or tanh of each element
    LOOKS_UP = auto()  # it reads no more of its first tensor than its result has
    FUSES = auto()  # a compiler of kernels computes it in loops that other ops share, though it is not pointwise
    PACKS = auto()  # it only brings the operand of a collective into shape
    UNPACKS = auto()  # it only unpacks the result of a collective


ABSENT: set[str] = set()
"""The names that were asked for and that this torch lacks; tests hold a list of those that they expect."""


def aten(names: str) -> tuple[OpOverload, ...]:
    """The aten ops of these names (``mm`` is ``mm.default``), without those that this torch lacks."""
    found = {name: find(name) for name in names.split()}
    ABSENT.update(name for name, op in found.items() if op is None)
    return tuple(op for op in found.values() if op is not None)


def find(name: str) -> OpOverload | None:
    """The aten op called ``name`` (``mm``, ``sum.dim_IntList``); None if this torch has none."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    return op if isinstance(op, OpOverload) else None


# Namespaces whose schemas can be relied on: torch's, and those of our own ops.
_OURS = {
    NAMESPACE,
    *(each.NAMESPACE for each in (answers, ctc_loss, host_memory, master_copies, places_in_rows, rooms)),
}
_DECLARING = {"aten", "prims", "_c10d_functional", *_OURS}

_LISTED: Mapping[Trait, Sequence[Any]] = {
    # A Python function has no schema; that of the op does not say that it returns the tensor it waits for.
    Trait.ALIAS: (operator.getitem, c10d.wait_tensor.default, host_memory.wait_copy),
    Trait.ASSERTS: aten("_assert_async _assert_async.msg"),
    Trait.BEGINS_ANEW: (answers.asked, rooms.within),
    # The aten ops are declared as copies for the sake of autograd, which then does not track a view.
    Trait.UNDECLARED_VIEW: (
        c10d.wait_tensor.default,
        host_memory.wait_copy,
        *aten("_unsafe_view unsafe_chunk unsafe_split.Tensor unsafe_split_with_sizes"),
    ),
    # Their schemas are older than the annotations.
    Trait.WRITES_STATISTICS: aten("native_batch_norm cudnn_batch_norm miopen_batch_norm"),
    # Programs have none of them, since passes change where values lie; nor those that work in place, which write.
    Trait.READS_MEMORY: (
        *aten(
            "as_strided as_strided_copy as_strided_scatter _reshape_alias _reshape_alias_copy resize resize_as set "
            "set.source_Tensor set.source_Storage set.source_Storage_storage_offset is_set_to"
        ),
        torch.ops.prims.as_strided_scatter.default,
    ),
    # Without the tag in some or all of torch 2.11 to 2.15. Only the elements are spoken for, not the kernels.
    Trait.POINTWISE: aten(
        "_to_copy copy detach alias lift lift_fresh lift_fresh_copy resolve_conj resolve_neg clone where.self "
        "where.ScalarOther where.ScalarSelf where.Scalar masked_fill.Scalar masked_fill.Tensor rsub.Tensor rsub.Scalar "
        "complex polar _conj real imag floor_divide floor_divide.Scalar prelu _prelu_kernel lerp.Scalar lerp.Tensor "
        "addcmul addcdiv clamp clamp.Tensor nan_to_num gelu_backward silu_backward threshold_backward sigmoid_backward "
        "tanh_backward native_dropout_backward leaky_relu leaky_relu_backward elu_backward hardtanh_backward hardswish "
        "hardswish_backward hardsigmoid_backward softplus_backward log_sigmoid_forward log_sigmoid_backward "
        "mish_backward logit_backward softshrink_backward hardshrink_backward _prelu_kernel_backward"
    ),
    # No tag tells what becomes of the elements. Of ops with several overloads these are the ones that tracing emits.
    Trait.SAME_ELEMENTS: aten("clone detach alias lift lift_fresh lift_fresh_copy positive resolve_conj resolve_neg"),
    Trait.RETURNS_OPERAND: aten("alias detach"),
    Trait.COPIES: aten("_to_copy clone"),
    Trait.RESHAPES: aten("_unsafe_view reshape view"),
    Trait.PERMUTES: aten("permute t transpose.int"),
    Trait.SQUEEZES: aten("squeeze squeeze.dim squeeze.dims unsqueeze"),
    Trait.EXPANDS: aten("expand"),
    Trait.CUTS: aten("select.int slice.Tensor split_with_sizes unbind.int"),
    Trait.JOINS: aten("cat stack"),
    Trait.FLATTENS: aten("contiguous reshape view"),
    Trait.TAKES_PARTS: (operator.getitem, *aten("_unsafe_view split_with_sizes view")),
    # Schemas name no number that an op fills with.
    Trait.ZEROS: aten("zeros zeros_like new_zeros"),
    Trait.ONES: aten("ones ones_like new_ones"),
    Trait.FULL: aten("full full_like new_full"),
    # No schema says anything of strides. Pointwise kernels keep contiguity, too.
    Trait.MAKES_CONTIGUOUS: (
        *aten("addmm bmm contiguous embedding embedding_dense_backward index_select mm stack"),
        c10d.all_gather_into_tensor.default,
        c10d.all_to_all_single.default,
        c10d.reduce_scatter_tensor.default,
        master_copies.current,
    ),
    Trait.KEEPS_CONTIGUOUS: (
        operator.getitem,
        c10d.all_reduce.default,
        c10d.wait_tensor.default,
        host_memory.to_device,
        host_memory.to_host,
        host_memory.wait_copy,
        *aten(
            "_log_softmax _log_softmax_backward_data _softmax _softmax_backward_data _to_copy _unsafe_view amax cat "
            "clone constant_pad_nd detach mean.dim native_layer_norm native_layer_norm_backward reshape slice_scatter "
            "squeeze.dim sum.dim_IntList unsqueeze view"
        ),
    ),
    # Pointwise kernels do, too. Those of a softmax take any memory for contiguous; pads and poolings lay it out anew.
    Trait.WRITES_ANY_LAYOUT: aten(
        "addmm amax amin baddbmm bmm cat cumprod cumsum gather index.Tensor index_select mean mean.dim mm prod "
        "prod.dim_int stack sum sum.dim_IntList"
    ),
    Trait.NO_OUT_VARIANT: aten(
        # By what they pad they choose strides, and give them to what is there.
        "reflection_pad2d reflection_pad2d_backward reflection_pad3d reflection_pad3d_backward replication_pad2d "
        "replication_pad2d_backward replication_pad3d replication_pad3d_backward "
        # No sample tries these; few get into a program, as they are decomposed or refused.
        "_add_relu.Tensor _addmm_activation _compute_linear_combination _convert_indices_from_coo_to_csr "
        "_convert_indices_from_csr_to_coo _int_mm _logcumsumexp _native_batch_norm_legit.no_stats _scaled_mm "
        "_scaled_mm_v2 _slow_conv2d_forward adaptive_avg_pool2d adaptive_avg_pool3d aminmax binary_cross_entropy "
        "binary_cross_entropy_backward col2im hash_tensor histogram.bin_ct histogram.bins_tensor huber_loss "
        "huber_loss_backward im2col isin.Scalar_Tensor linalg_cross linalg_eigvals linalg_lstsq linalg_polar "
        "masked_select max_unpool2d max_unpool3d mse_loss mse_loss_backward multi_margin_loss "
        "multi_margin_loss_backward multilabel_margin_loss_backward multilabel_margin_loss_forward nansum narrow_copy "
        "nonzero nonzero_static renorm slow_conv3d_forward slow_conv_transpose2d slow_conv_transpose3d smooth_l1_loss "
        "smooth_l1_loss_backward sspaddmm take"
    ),
    # Of what is not pointwise: views, and copies of what is there anyway.
    Trait.CHEAP: aten(
        "_to_copy _unsafe_view clone detach expand permute slice.Tensor squeeze squeeze.dim squeeze.dims t "
        "transpose.int unsqueeze view view.dtype"
    ),
    # Division and square roots are counted, too: on the CPU they take about as long as vectorized functions do.
    Trait.TRANSCENDENTAL: aten(
        "_log_softmax _softmax _softmax_backward_data _log_softmax_backward_data acos asin atan atan2 cos cosh elu "
        "elu_backward erf erfc erfinv exp exp2 expm1 gelu gelu_backward lgamma log log10 log1p log2 "
        "log_sigmoid_forward logsumexp mish mish_backward native_group_norm native_group_norm_backward "
        "native_layer_norm native_layer_norm_backward pow.Tensor_Scalar pow.Tensor_Tensor rsqrt sigmoid "
        "sigmoid_backward silu silu_backward sin sinh softplus softplus_backward sqrt tan tanh tanh_backward"
    ),
    Trait.LOOKS_UP: aten("embedding gather index.Tensor index_select nll_loss_forward take"),
    # Reductions along dims, and norms, which are made of them.
    Trait.FUSES: aten(
        "_log_softmax _log_softmax_backward_data _softmax _softmax_backward_data all all.dim amax amin any any.dim "
        "constant_pad_nd mean mean.dim native_layer_norm native_layer_norm_backward sum sum.dim_IntList var_mean "
        "var_mean.correction var.correction"
    ),
    # What passes and the partitioner put around collectives.
    Trait.PACKS: (
        host_memory.to_device,
        *aten("_to_copy _unsafe_view cat clone constant_pad_nd contiguous permute reshape t transpose.int view"),
    ),
    Trait.UNPACKS: (
        operator.getitem,
        host_memory.to_host,
        host_memory.wait_copy,
        *aten(
            "_to_copy _unsafe_view contiguous permute reshape slice.Tensor split_with_sizes split_with_sizes_copy t "
            "transpose.int view"
        ),
    ),
}


def traits(target: Any) -> frozenset[Trait]:
    """All that is known of what a node calls: an op or a Python function."""
    known = _TRAITS.get(id(target))
    if known is not None:
        return known[1]
    if isinstance(target, Region):
        return _OF_WRITING_ISLANDS if isinstance(target, Island) and target.outs else _OF_REGIONS
    if not isinstance(target, OpOverload):
        return _listed_by_op().get(target, _NONE)
    found = _listed_by_op().get(target, _NONE).union(_read(target))
    _TRAITS[id(target)] = target, found
    return found


def has(target: Any, *any_of: Trait) -> bool:
    """Whether what a node calls has one of these traits."""
    return not traits(target).isdisjoint(any_of)


def listed(*any_of: Trait) -> frozenset[Any]:
    """The ops and functions that the table lists for one of these traits."""
    return frozenset(op for trait in any_of for op in _LISTED[trait])


_NONE: frozenset[Trait] = frozenset()
_OF_REGIONS = frozenset({Trait.DECLARED, Trait.PURE})
_OF_WRITING_ISLANDS = _OF_REGIONS | {Trait.MUTABLE, Trait.ALIAS}
_TRAITS: dict[int, tuple[OpOverload, frozenset[Trait]]] = {}  # by the id of the op, whose own hash is slow


@cache
def _listed_by_op() -> dict[Any, frozenset[Trait]]:
    everything = {op for ops in _LISTED.values() for op in ops}
    return {op: frozenset(trait for trait, ops in _LISTED.items() if op in ops) for op in everything}


# Another rank's program has the other half, so neither may be removed nor merged.
_MESSAGES = {message_collectives.send.default, message_collectives.recv.default}


def _read(op: OpOverload) -> Iterator[Trait]:
    """The traits that schema and tags of an op say."""
    declared, undeclared = schema(op), _listed_by_op().get(op, _NONE)
    composite, random = is_composite(op), torch.Tag.nondeterministic_seeded in op.tags
    holds = {
        Trait.DECLARED: op.namespace in _DECLARING and Trait.UNDECLARED_VIEW not in undeclared and not composite,
        Trait.COMPOSITE: composite,
        # An op without a result is there for what else it does: an assertion.
        Trait.PURE: op.namespace in _DECLARING and not random and bool(declared.results) and op not in _MESSAGES,
        Trait.MUTABLE: declared.is_mutable,
        Trait.VIEW: not declared.written and any(argument.shared for argument in declared.arguments),
        # A composite reshape is a view where it can be, and else a copy.
        Trait.ALIAS: declared.shares and Trait.UNDECLARED_VIEW not in undeclared and not composite,
        Trait.RANDOM: random,
        Trait.POINTWISE: torch.Tag.pointwise in op.tags,
        Trait.POINTWISE_KERNEL: torch.Tag.pointwise in op.tags,
        Trait.PROFILING: op.namespace == "profiler",
    }
    return (trait for trait, does in holds.items() if does)


_OPERATORS = """abs add and_ concat contains eq floordiv ge getitem gt index inv invert is_ is_not le lshift lt matmul
mod mul ne neg not_ or_ pos pow rshift sub truediv truth xor""".split()

PURE_FUNCTIONS: set[Callable[..., Any]] = {
    *(getattr(operator, name) for name in _OPERATORS),
    *(function for function in vars(math).values() if callable(function)),
    *SYMBOLIC_FUNCTIONS,
    *(abs, bool, float, int, max, min, pow, round, sum),
    draw,
}
"""Python functions whose result depends on their arguments alone, and that do nothing else.

Passes that put a function of their own into graphs add it here, and a custom op as its ``OpOverload``.
"""


def draws(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws numbers: attention is marked as random, but without dropout it is not."""
    if not has(op, Trait.RANDOM):
        return False
    position = position_of(op, "dropout_p")
    if position is None:
        return True
    default = schema(op).arguments[position].default
    return bool((args[position] if position < len(args) else kwargs.get("dropout_p", default)) != 0)


@cache
def in_place_variant(op: OpOverload) -> OpOverload | None:
    """The op that takes what ``op`` takes and writes the result to the first argument, and only that; or None."""
    if op is master_copies.current:
        return cast(OpOverload, master_copies.current_)
    other = find(f"{schema(op).name}_.{schema(op).overload}") if op.namespace == "aten" else None
    if other is None or torch.Tag.inplace_view in other.tags:  # that one changes the view, not the elements
        return None
    return other if schema(other).typed == schema(op).typed and schema(other).written == [0] else None


# Generated by their dispatch keys, but written by hand: these do write into the memory they are given.
_WRITES_OUT = set(aten("stack.out"))


@cache
def out_overload(op: OpOverload, device: torch.device) -> tuple[OpOverload, tuple[str, ...]] | None:
    """The overload of ``op`` that writes into given memory on ``device``, and its arguments for that; or None.

    torch generates one for every op, but most compute into fresh memory and copy: only a kernel of its own counts.
    """
    declared = schema(op)
    unusable = op.namespace != "aten" or has(op, Trait.NO_OUT_VARIANT)
    if unusable or any(result != "Tensor" for result in declared.results):
        return None
    packet = getattr(torch.ops.aten, declared.name)
    for other in (getattr(packet, name) for name in packet.overloads()):
        outs = tuple(argument.name for argument in schema(other).arguments if argument.is_out)
        if len(outs) == len(declared.results) and schema(other).typed == declared.typed:
            return (other, outs) if other in _WRITES_OUT or has_kernel(other, device) else None
    return None


def over_lists(op: Any) -> tuple[OpOverload | None, OpOverload | None]:
    """The ops that do to lists what ``op`` does to tensors: where all operands are tensors, and with a number."""
    return _OVER_LISTS.get(op, (None, None))


def with_list_ops() -> list[OpOverload]:
    """The ops on tensors that have one over lists."""
    return [op for op in _OVER_LISTS if op is not None]


def _list_op(name: str | None) -> OpOverload | None:
    return find(f"_foreach_{name}") if name is not None else None


# Names and overloads do not match those of the ops on tensors, where a number may be an operand or an option.
_OVER_LISTS: dict[Any, tuple[OpOverload | None, OpOverload | None]] = {
    find(op): (_list_op(tensors), _list_op(number))
    for op, tensors, number in (
        ("add.Tensor", "add.List", "add.Scalar"),
        ("sub.Tensor", "sub.List", "sub.Scalar"),
        ("mul.Tensor", "mul.List", "mul.Scalar"),
        ("div.Tensor", "div.List", "div.Scalar"),
        ("maximum", "maximum.List", None),
        ("minimum", "minimum.List", None),
        ("pow.Tensor_Scalar", None, "pow.Scalar"),
        ("lerp.Scalar", "lerp.Scalar", None),
        ("addcmul", "addcmul.Scalar", None),
        ("addcdiv", "addcdiv.Scalar", None),
        *((name, name, None) for name in ("abs", "exp", "log", "neg", "reciprocal", "rsqrt", "sign", "sqrt")),
    )
}
