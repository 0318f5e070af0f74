"""One check for every rule: the results of an op on the parts, joined, must be those of the op on the whole.

In comes a sample call and a number of ranks. For each ``Option`` that the rule claims, operands are split as claimed
(as ``torch.chunk`` splits; a partial operand into random summands) and laid out in memory as ``memory.py`` draws, the
op runs once a rank with localized arguments, and the results must be the global ones under the placements claimed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from random import Random
from threading import Barrier
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from passes import Axis, Mesh
from passes.ir.ops import aten as listed_ops
from spmd.partitioner.operand_layouts import Layout, operand_layouts
from spmd.placements import Interleaved, Mirrored, mirrored_pieces
from spmd.rules import Info, OpCall, Option, localize_of, parts_of, rule_of
from spmd.rules.base import parameters

from .memory import Lay, anyhow, in_a_bucket, is_constant, on_its_own, resized, with_equal_rows, with_heads_in_rows

aten = torch.ops.aten
# Torch's kernels of the first read memory that is not there, or divide by zero; those of the others take sizes that do
# not fit together, or leave results unset.
USUAL = {
    *listed_ops("_pdist_forward _pdist_backward native_batch_norm native_batch_norm_backward native_group_norm"),
    *listed_ops("_native_batch_norm_legit_functional _native_batch_norm_legit_no_training native_group_norm_backward"),
    *listed_ops("_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward"),
    *listed_ops("_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward"),
    *listed_ops("convolution_backward diagonal_backward diagonal_scatter _grouped_mm"),
}
EXTREMES = {"max": torch.amax, "min": torch.amin}
# Of the first two the partitioner copies the operand, since pairs of elements become one; the third needs aligned rows.
ON_THEIR_OWN = {aten.view_as_complex.default, aten.view.dtype, aten._grouped_mm.default}


@dataclass
class Sample:
    """A call to check: an op, its arguments, and whether its values can be compared at all."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    values: bool = True

    def __str__(self) -> str:
        return f"{self.op.name().removeprefix('aten::')}({', '.join(map(_short, self.args))})"


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "x".join(map(str, value.shape)) or "0d"
    return f"[{','.join(map(_short, value))}]" if isinstance(value, list | tuple) else str(value)


def flat(result: Any) -> list[torch.Tensor | None]:
    """The outputs of an op, None for those that are no tensors or absent."""
    outputs = list(result) if isinstance(result, list | tuple) else [result]
    return [o if isinstance(o, torch.Tensor) else None for o in outputs]


def info(tensor: torch.Tensor | None) -> Info | None:
    """The ``Info`` of a tensor."""
    return None if tensor is None else Info(tuple(tensor.shape), tensor.dtype, iota_dim(tensor))


def iota_dim(tensor: torch.Tensor) -> int | None:
    """The dim along which a tensor of integers holds 0, 1, 2, ..., as the partitioner tracks it for an ``arange``."""
    if tensor.dtype != torch.int64 or tensor.is_meta:
        return None
    for d, size in enumerate(tensor.shape):
        rows = torch.arange(size).view(-1, *[1] * (tensor.ndim - d - 1))
        if size > 1 and tensor.equal(rows.expand_as(tensor)):
            return d
    return None


def call_of(sample: Sample, size: int, results: Sequence[torch.Tensor | None]) -> OpCall:
    """The call that a rule gets for ``sample``."""
    args, kwargs = tree_map_only(torch.Tensor, info, (sample.args, sample.kwargs))
    operands = tuple(leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Info))
    interleaved = tuple(tuple(_in_two_or_more_runs(operand, size)) for operand in operands)
    return OpCall(sample.op, tuple(args), kwargs, operands, tuple(map(info, results)), size, interleaved)


def _in_two_or_more_runs(operand: Info, size: int) -> Iterator[Interleaved]:
    """All splits of an operand in runs of rows."""
    for dim, length in enumerate(operand.shape):
        yield from (Interleaved(dim, k) for k in range(2, length) if length % k == 0 and length // k % size == 0)
        yield from (Mirrored(dim, k) for k in range(1, length) if length % (k * 2 * size) == 0)


def options_of(sample: Sample, size: int) -> list[Option]:
    """The options that the rule claims."""
    rule = rule_of(sample.op)
    assert rule is not None, f"no rule for {sample.op}"
    torch.default_generator.manual_seed(0)  # that of no other device, whose seed would be kept with a traceback
    return rule(call_of(sample, size, flat(sample.op(*sample.args, **sample.kwargs))))


def check(sample: Sample, size: int) -> int:
    """Check every option claimed for ``sample``; returns how many there were."""
    options = options_of(sample, size)
    check_options(sample, size, options)
    return len(options)


def check_options(sample: Sample, size: int, options: Sequence[Option]) -> None:
    """Check options of ``sample``, on so many ranks."""
    expected = flat(sample.op(*sample.args, **sample.kwargs))
    call = call_of(sample, size, expected)
    for option in options:
        try:
            _check_option(sample, call, option, expected)
        except Exception as error:
            error.add_note(f"{sample}, {size} ranks: {option.operands} -> {option.results}")
            raise


def unusual(sample: Sample) -> Iterator[Sample]:
    """``sample`` with dims that are empty or have one row, and with an operand of equal rows, where the op takes it."""
    if sample.op in USUAL:
        return
    given = (sample.args, sample.kwargs)
    tensors = [leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, torch.Tensor)]
    sizes = sorted({size for tensor in tensors for size in tensor.shape if size > 1})
    draw = Random(str(sample))
    for size in sizes:
        tried = resized(given, size, draw.choice((0, 1)))
        yield from filter(_runs, (replace(sample, args=args, kwargs=kwargs) for args, kwargs in tried))
    equal = with_equal_rows(given, draw)
    if equal is not None and _runs(found := replace(sample, args=equal[0], kwargs=equal[1])):
        yield found


def _runs(sample: Sample) -> bool:
    try:
        sample.op(*sample.args, **sample.kwargs)
    except Exception:
        return False
    return True


def _check_option(sample: Sample, call: OpCall, option: Option, expected: list[torch.Tensor | None]) -> None:
    assert len(option.operands) == len(call.operands), "one placement per operand"
    assert len(option.results) == len(expected), "one placement per result"
    assert option.operands == () or {*option.operands, *option.results} - {Replicate(), None}, "all replicated"
    per_rank = [flat(result) for result in _on_all_ranks(sample, call, option, expected)]
    for position, (whole, placement) in enumerate(zip(expected, option.results, strict=True)):
        assert (whole is None) == (placement is None), f"result {position}: {placement} for {whole}"
        if whole is not None:
            _compare(whole, [r[position] for r in per_rank], placement, sample.values)  # type: ignore[misc]


def _on_all_ranks(sample: Sample, call: OpCall, option: Option, expected: list[torch.Tensor | None]) -> list[Any]:
    """The results of each rank; an option that communicates runs on all of them at once."""
    ranks = range(call.size)
    if option.sends is None:
        return [_run(sample, call, option, expected, rank) for rank in ranks]
    exchange = Exchange(call.size)
    with ThreadPoolExecutor(call.size) as pool:
        made = [pool.submit(_run_on, sample, call, option, expected, rank, on_its_own, exchange) for rank in ranks]
        return [each.result(timeout=60) for each in made]


class Exchange:
    """Rows between the threads that are ranks, and the bytes that each of them sent."""

    def __init__(self, size: int) -> None:
        self.barrier, self.rows = Barrier(size, timeout=60), dict[int, list[torch.Tensor]]()
        self.nbytes: list[list[int]] = [[] for _ in range(size)]


class RunOnRank:
    """Runs the ops of an option on one rank."""

    def __init__(self, rank: int, size: int, exchange: Exchange | None, kwargs: dict[str, Any]) -> None:
        self.rank, self.size, self.exchange, self.kwargs = rank, size, exchange, kwargs

    def __call__(self, op: Any, args: tuple[Any, ...], kwargs: Any = None, numbers: str = "") -> Any:
        return op(*args, **(kwargs or {}))

    def shape(self, tensor: torch.Tensor) -> torch.Size:
        return tensor.shape

    def rows(self, tensor: torch.Tensor, dim: int, start: int, end: int, numbers: str) -> torch.Tensor:
        return tensor.narrow(dim, start, end - start)

    def all_to_all(self, tensor: torch.Tensor, received: list[int], sent: list[int], numbers: str = "") -> torch.Tensor:
        assert self.exchange is not None, "an option that communicates says what it sends"
        self.exchange.rows[self.rank] = list(tensor.split(sent))
        self.exchange.nbytes[self.rank].append(tensor.nbytes)
        self.exchange.barrier.wait()
        rows = [self.exchange.rows[other][self.rank] for other in range(self.size)]
        self.exchange.barrier.wait()
        assert [len(each) for each in rows] == received
        return torch.cat(rows)


def _run(sample: Sample, call: OpCall, option: Option, expected: list[torch.Tensor | None], rank: int) -> Any:
    """The op on the parts of ``rank``, which lie anyhow in memory, unless the op refuses its whole operands so."""
    layouts = layouts_of(sample.op)
    for lay in layouts:
        try:
            return _run_on(sample, call, option, expected, rank, lay)
        except Exception:
            if lay is layouts[-1] or not _refuses(sample, option, rank, lay):
                raise
    raise AssertionError("one of the layouts is the last")


def layouts_of(op: Any) -> tuple[Lay, ...]:
    """The ways in which operands may lie, each for what refuses those before it."""
    if op in ON_THEIR_OWN:
        return (on_its_own,)
    return anyhow, in_a_bucket


def _lays(sample: Sample, lay: Lay) -> list[Lay]:
    """``lay`` for each leaf of the arguments, but for those that the partitioner copies where they lie otherwise."""
    needed = operand_layouts(sample.op)
    named = [*zip(parameters(sample.op), sample.args, strict=False), *sample.kwargs.items()]
    names = [name for name, value in named for _ in tree_flatten(value)[0]]
    copied = {
        name: with_heads_in_rows if layout is Layout.HEADS_IN_ROWS else in_a_bucket for name, layout in needed.items()
    }
    return [copied.get(name, lay) for name in names]


def _refuses(sample: Sample, option: Option, rank: int, lay: Lay) -> bool:
    """Whether the op raises on whole operands that lie as the parts did."""
    leaves, spec = tree_flatten((sample.args, sample.kwargs))
    lays = _lays(sample, lay)
    laid = [lays[k](x, x, _draw(option, rank, k)) if isinstance(x, torch.Tensor) else x for k, x in enumerate(leaves)]
    args, kwargs = tree_unflatten(laid, spec)
    try:
        sample.op(*args, **kwargs)
    except Exception:
        return True
    return False


def _draw(option: Option, rank: int, position: int) -> Random:
    return Random(f"{option.operands} {option.results} {rank} {position}")


def _run_on(
    sample: Sample,
    call: OpCall,
    option: Option,
    expected: list[torch.Tensor | None],
    rank: int,
    lay: Lay,
    exchange: Exchange | None = None,
) -> Any:
    leaves, spec = tree_flatten((sample.args, sample.kwargs))
    placements, lays = iter(enumerate(option.operands)), _lays(sample, lay)
    local = [
        _operand(leaf, *next(placements), option, rank, call.size, k, lays[k])
        if isinstance(leaf, torch.Tensor)
        else leaf
        for k, leaf in enumerate(leaves)
    ]
    args, kwargs = tree_unflatten(local, spec)
    args = _localized(call, tuple(args), kwargs, option, expected, rank)
    if option.local is None:
        return sample.op(*args, **kwargs)
    mesh = Mesh((Axis("ranks", call.size, "ranks", rank),))
    operands = parts_of(call.operands, [(placement,) for placement in option.operands], mesh)
    results = parts_of(call.results, [(placement,) for placement in option.results], mesh)
    result = option.local(RunOnRank(rank, call.size, exchange, kwargs), call, args, operands, results)
    if exchange is not None and option.sends is not None:
        assert exchange.nbytes[rank] == [sent.nbytes for sent in option.sends(call, operands, results)], "bytes sent"
    return result


def _localized(
    call: OpCall,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    option: Option,
    expected: list[torch.Tensor | None],
    rank: int,
) -> tuple[Any, ...]:
    """``args`` with the local sizes of ``rank`` instead of global ones."""
    localize = localize_of(call.target)
    if localize is None:
        return args
    shapes = tuple(
        None if whole is None else tuple(_shaped(whole, placement, rank, call.size).shape)
        for whole, placement in zip(expected, option.results, strict=True)
    )
    return localize(call, args, kwargs, shapes)


def _operand(
    tensor: torch.Tensor, position: int, placement: Any, option: Option, rank: int, size: int, seed: int, lay: Lay
) -> torch.Tensor:
    """The part of one operand on ``rank``; an iota that starts at 0 on every rank has the length of the part."""
    held = part(tensor, placement, rank, size, seed)
    if position in option.from_zero:
        held = tensor.narrow(placement.dim, 0, held.shape[placement.dim])
    return lay(held, tensor, _draw(option, rank, seed))


def part(tensor: torch.Tensor, placement: Any, rank: int, size: int, seed: int) -> torch.Tensor:
    """The part of ``tensor`` on ``rank``."""
    if isinstance(placement, Shard):
        return _shaped(tensor, placement, rank, size).clone()
    if isinstance(placement, Partial):
        return _summands(tensor, placement.reduce_op, size, seed)[rank]
    return tensor.clone()


def _shaped(tensor: torch.Tensor, placement: Any, rank: int, size: int) -> torch.Tensor:
    if not isinstance(placement, Shard):
        return tensor
    if isinstance(placement, Mirrored):
        pieces = tensor.unflatten(placement.dim, (placement.outer, 2 * size, -1)).unbind(placement.dim + 1)
        own = torch.cat([pieces[k] for k in mirrored_pieces(rank, size)], placement.dim + 1)
        return own.flatten(placement.dim, placement.dim + 1)
    if isinstance(placement, Interleaved):
        runs = tensor.unflatten(placement.dim, (placement.outer, -1))
        return _shaped(runs, Shard(placement.dim + 1), rank, size).flatten(placement.dim, placement.dim + 1)
    rows = tensor.shape[placement.dim]
    step = -(-rows // size)
    start = min(rank * step, rows)
    return tensor.narrow(placement.dim, start, min(step, rows - start))


def _summands(tensor: torch.Tensor, reduce_op: str, size: int, seed: int) -> list[torch.Tensor]:
    """Random tensors whose sum (or maximum, or minimum) is ``tensor``."""
    generator = torch.Generator().manual_seed(seed)
    once = [1 if is_constant(tensor, d) else n for d, n in enumerate(tensor.shape)]  # equal rows stay equal
    noise = [torch.randint(1, 9, once, generator=generator).to(tensor).expand_as(tensor) for _ in range(size)]
    if reduce_op == "sum":
        return [*noise[:-1], tensor - sum(noise[:-1])]
    owner = torch.randint(0, size, once, generator=generator).to(tensor.device)
    sign = -1 if reduce_op == "max" else 1
    return [torch.where(owner == rank, tensor, tensor + sign * noise[rank]) for rank in range(size)]


def _compare(whole: torch.Tensor, parts: list[torch.Tensor], placement: Any, values: bool) -> None:
    shapes = [tuple(_shaped(whole, placement, rank, len(parts)).shape) for rank in range(len(parts))]
    assert [tuple(p.shape) for p in parts] == shapes, f"shapes under {placement}"
    assert {p.dtype for p in parts} == {whole.dtype}, f"dtypes under {placement}"
    if not values or whole.is_meta:
        return
    for found in _joined(parts, placement):
        if torch.equal(found, whole):
            continue  # most are; what follows takes ten times as long
        torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-10, equal_nan=True)


def _joined(parts: list[torch.Tensor], placement: Any) -> Iterator[torch.Tensor]:
    """The global value of the parts; for replicas, each of them."""
    if isinstance(placement, Mirrored):
        runs = [part.unflatten(placement.dim, (placement.outer, 2, -1)).unbind(placement.dim + 1) for part in parts]
        pieces = [*(early for early, _ in runs), *(late for _, late in reversed(runs))]
        yield torch.cat(pieces, placement.dim + 1).flatten(placement.dim, placement.dim + 1)
    elif isinstance(placement, Interleaved):
        runs = [part.unflatten(placement.dim, (placement.outer, -1)) for part in parts]
        yield torch.cat(runs, placement.dim + 1).flatten(placement.dim, placement.dim + 1)
    elif isinstance(placement, Shard):
        yield torch.cat(parts, placement.dim)
    elif isinstance(placement, Partial):
        stacked = torch.stack(parts)
        if placement.reduce_op == "sum":
            yield stacked.sum(0, dtype=stacked.dtype)
        else:
            yield EXTREMES[placement.reduce_op](stacked, dim=0)
    else:
        yield from parts
