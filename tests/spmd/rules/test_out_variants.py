"""Ops write the bits that they return into planned memory, whatever was there and however operands lie.

Every sample of every op is a node here, laid out as a program may have it, and runs through its out variant if
``can_be_planned`` says so; what lies in and around the memory is not a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from passes.analysis.out_variants import can_be_planned, out_variant, results_of
from passes.analysis.strides import Layouts
from passes.ir.ops import Trait, find, has, out_overload
from passes.runtime.arena import extent
from spmd._torch import FakeTensorMode, OpOverload

from .engine import USUAL, Sample, flat
from .memory import anyhow, in_a_bucket
from .samples import SOURCES, samples, samples_of, u
from .test_rules import guessed

AROUND = 4096  # bytes
POISON = 0xFF  # NaN in every floating dtype
CPU = torch.device("cpu")
# Torch reads gradients or indices as if they were contiguous, in what it allocates, too.
AS_IT_COMES = USUAL | {torch.ops.aten.adaptive_max_pool3d_backward.default}


def laid_out(sample: Sample, name: str) -> Sample:
    """``sample`` with operands that lie in one of three ways."""
    draw = Random(f"{sample} {name}")

    def lay(x: Tensor) -> Tensor:
        if name == "channels last" and x.ndim in (4, 5):
            return x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)
        return anyhow(x, x, draw) if name == "anyhow" else in_a_bucket(x, x, draw)

    args, kwargs = tree_map_only(Tensor, lay, (sample.args, sample.kwargs))
    return Sample(sample.op, args, kwargs, sample.values)


def node_of(sample: Sample, mode: FakeTensorMode) -> tuple[fx.Node, Callable[[Any], Any]]:
    """The call as a node, and what puts the operands in the place of its inputs."""
    leaves, spec = tree_flatten((sample.args, sample.kwargs))
    graph, real = fx.Graph(), {}
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[k] = graph.placeholder("x")
            leaves[k].meta["val"] = mode.from_tensor(leaf)
            real[leaves[k]] = leaf
    args, kwargs = tree_unflatten(leaves, spec)
    node = graph.call_function(sample.op, args, kwargs)
    fakes = tree_map_only(fx.Node, lambda each: each.meta["val"], (args, kwargs))
    with mode:
        node.meta["val"] = sample.op(*fakes[0], **fakes[1])
    return node, lambda tree: fx.map_arg(tree, real.__getitem__)


def poisoned(val: Tensor) -> Tensor:
    """Memory that lies as ``val`` does, with something around it."""
    size = extent(val.shape, val.stride()) * val.element_size()
    memory = torch.full((2 * AROUND + size,), POISON, dtype=torch.uint8)
    return memory.view(val.dtype).as_strided(val.shape, val.stride(), AROUND // val.element_size())


def bits(tensor: Tensor) -> Tensor:
    """The bits of the elements, in order."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def check_planned(sample: Sample) -> bool:
    """Check a sample; False if its op allocates."""
    try:
        expected = [each for each in flat(sample.op(*sample.args, **sample.kwargs)) if each is not None]
    except RuntimeError:
        return False  # it refuses operands that lie so
    try:
        node, filled = node_of(sample, FakeTensorMode())
    except Exception:
        return False  # its shapes depend on values
    if not can_be_planned(node, Layouts(node.graph)):
        return False
    check_written(sample, node, filled, expected, [poisoned(val) for val in results_of(node)])
    if has(sample.op, Trait.WRITES_ANY_LAYOUT) and expected[0].ndim > 1:
        turned = [poisoned(torch.empty(val.mT.shape, dtype=val.dtype).mT) for val in results_of(node)]
        check_written(sample, node, filled, expected, turned, exactly=False)
    return True


def check_written(
    sample: Sample, node: fx.Node, filled: Any, expected: list[Tensor], outs: list[Tensor], exactly: bool = True
) -> None:
    """``exactly``: to the bit; in another layout than that of its own a kernel may add up in another order."""
    variant = out_variant(node)
    assert variant is not None
    before = [(out.data_ptr(), out.shape, out.stride()) for out in outs]
    args, kwargs = variant.call(outs)
    variant.op(*filled(args), **filled(kwargs))
    assert [(out.data_ptr(), out.shape, out.stride()) for out in outs] == before, f"{sample} moves what it is given"
    for out, value in zip(outs, expected, strict=True):
        whole = torch.empty(0, dtype=torch.uint8).set_(out.untyped_storage())
        edges = torch.cat([whole[:AROUND], whole[-AROUND:]])
        assert bool((edges == POISON).all()), f"{sample} writes beside what it is given"
        if torch.equal(bits(out), bits(value)):
            continue
        tolerance = 0.0 if exactly else 1e-12
        torch.testing.assert_close(
            bits(out), bits(value), rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda s: f"{sample}: {s}"
        )


def tried() -> Iterator[Any]:
    """All samples whose values can be compared, and guessed calls of pointwise ops."""
    yield from SOURCES
    yield guessed_samples


def guessed_samples() -> Iterator[Sample]:
    """Calls of pointwise ops with an out variant that have no other sample."""
    having = {sample.op for sample in samples()}
    for op in planned_ops():
        if op not in having and torch.Tag.pointwise in op.tags:
            calls = (guessed(op, fill) for fill in (u, lambda *shape: torch.randint(1, 9, shape)))
            yield from islice(filter(None, calls), 1)


def planned_ops() -> list[OpOverload]:
    """Every aten op that ``out_variant`` can give planned memory, on some operands."""
    names = [name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    ops = [op for op in map(find, names) if op is not None]
    return [op for op in ops if not op._schema.is_mutable and has(op, Trait.PURE) and out_overload(op, CPU)]


@pytest.mark.parametrize("source", list(tried()), ids=lambda source: source.__name__)
def test_planned_memory_gets_the_bits_of_fresh_memory(source: Any) -> None:
    found = source() if source is guessed_samples else samples_of(source)
    for sample in found:
        for name in ways(sample) if sample.values and may_be_planned(sample.op) else ():
            check_planned(laid_out(sample, name))


def may_be_planned(op: Any) -> bool:
    """Whether ``op`` writes into given memory at all."""
    return has(op, Trait.COPIES, Trait.ZEROS, Trait.ONES, Trait.FULL) or out_overload(op, CPU) is not None


def ways(sample: Sample) -> Iterator[str]:
    """How the operands of a sample are to lie."""
    tensors = [x for x in tree_flatten((sample.args, sample.kwargs))[0] if isinstance(x, Tensor)]
    if sample.op in AS_IT_COMES:
        yield "in a bucket"
        return
    yield "anyhow"
    if any(x.ndim in (4, 5) for x in tensors):
        yield "channels last"


def test_every_op_with_an_out_variant_is_tried() -> None:
    having = {sample.op for sample in (*samples(), *guessed_samples())}
    untried = {str(op) for op in planned_ops() if op not in having}
    assert not untried, "add a sample, or list it as Trait.NO_OUT_VARIANT"
