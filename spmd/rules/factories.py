"""Factory ops, which create a tensor from sizes: each rank creates its own part.

Ops that take shape and dtype, but no values, from an operand (``zeros_like``, ``rand_like``) split as it is split, and
accept it as partial. Ops that take only dtype and device (``new_zeros``) accept any placement. Zeros are also a partial
sum, into which ``index_put`` and ``scatter_add`` accumulate. ``arange``, ``eye`` and ``randperm`` depend on positions
and are created whole. The numbers that random ops draw on each rank are not decided here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from passes.ir.ops import Trait, has

from ..placements import Interleaved
from .base import OpCall, Option, P, Parts, R, Run, parameters
from .einsum_labels import PARTIALS, Dims, is_zero, letters, option, options
from .optional_ops import aten
from .registry import rule, whole

_new_zeros = torch.ops.aten.new_zeros.default


def makes_zeros(call: OpCall) -> bool:
    """Whether the call creates zeros, by any op."""
    return has(call.target, Trait.ZEROS) or (has(call.target, Trait.FULL) and is_zero(call.arg("fill_value")))


@rule(
    *aten("zeros", "ones", "full", "empty.memory_format", "empty_permuted", "empty_strided"),
    *aten("rand", "rand.generator", "randn", "randn.generator"),
    *aten("randint", "randint.generator", "randint.low", "randint.low_generator"),
)
def made(call: OpCall) -> list[Option]:
    """Any dim, and zeros also as a partial sum."""
    return [Option((), (placement,)) for placement in _made_as(call)[1:]]


@rule(*aten("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"))
def made_beside(call: OpCall) -> list[Option]:
    """Any dim, whatever the placement of the operand; in runs of rows, as many as the operand has."""
    shape, held = call.arg("self").shape, [runs for each in call.interleaved for runs in each]
    held = [runs for runs in held if runs.dim < len(shape)]
    given = [R, *(Shard(d) for d in range(len(shape))), *held, *PARTIALS]
    made_as = [*_made_as(call), *(runs for runs in held if _fits(call, runs, shape))]
    every = [option(call, {"self": source}, result) for source in given for result in made_as]
    return every[1:]


def _fits(call: OpCall, runs: Interleaved, shape: tuple[int, ...]) -> bool:
    """Whether the result has the dim that is split in runs."""
    (result,) = (info for info in call.results if info is not None)
    return runs.dim < result.ndim and result.shape[runs.dim] == shape[runs.dim]


@rule(
    *aten("zeros_like", "ones_like", "full_like", "empty_like", "fill.Scalar", "zero"),
    *aten("rand_like", "rand_like.generator", "randn_like", "randn_like.generator"),
    *aten("randint_like", "randint_like.generator", "randint_like.low_dtype", "randint_like.low_generator_dtype"),
    *aten("bernoulli.p", "uniform", "normal_functional", "exponential", "geometric", "log_normal", "cauchy"),
    *aten("random", "random.from", "random.to"),
)
def made_like(call: OpCall) -> list[Option]:
    """The dims of the operand; of a partial operand only the shape is used."""
    names = letters(call.arg("self").ndim)
    whole = [option(call, {"self": kind}, R) for kind in PARTIALS]
    if makes_zeros(call):
        whole += [option(call, {"self": source}, P) for source in (R, P)]
        splits = (Shard(d) for d in range(len(names)))
        whole += [replace(option(call, {"self": part}, kind), local=_zeros) for part in splits for kind in (R, P)]
    return options(call, Dims({"self": names}, names)) + whole


def _zeros(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """Zeros of another shape than the operand's part."""
    assert results[0] is not None and call.results[0] is not None
    return run(_new_zeros, (args[0], list(results[0].shape)), {"dtype": call.results[0].dtype})


@rule(*aten("bernoulli", "native_dropout"))
def drawn(call: OpCall) -> list[Option]:
    """The dims of the operand, whose values are probabilities, so that no rank has none."""
    # For a tensor without elements native_dropout returns a mask of another dtype.
    names = letters(call.operands[0].ndim)
    return options(call, Dims({next(iter(parameters(call.target))): names}, names, filled="*"))


# Their values depend on the position.
whole(
    *aten("arange", "arange.start", "arange.start_step", "linspace", "logspace", "eye", "eye.m", "scalar_tensor"),
    *aten("tril_indices", "triu_indices", "randperm", "randperm.generator", "hann_window", "hamming_window"),
)


def _made_as(call: OpCall) -> list[Placement]:
    (result,) = (info for info in call.results if info is not None)
    return [R, *(Shard(d) for d in range(result.ndim)), *([P] if makes_zeros(call) else [])]
