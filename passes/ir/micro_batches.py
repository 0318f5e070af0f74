"""Micro-batches: the programs of a call that runs several times, each time on a part of its batch, and adds up."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from .._torch import c10d
from ..runtime.answers import asked
from .ops import Trait, has
from .program import MicroBatches, Program, Spread
from .roles import Holds, InputSource, Role

ACCUMULATOR = Role("accumulator", InputSource.CARRIED, is_sum=True, holds=Holds.GRADIENTS)
GATHERED_ONCE = Role("gathered parameter", InputSource.CARRIED, holds=Holds.GATHERED)  # whole, by the first run
REDUCED_ONCE = Role("reduced value", InputSource.CARRIED)  # of the whole batch, by the first run
RUN_NUMBER = Role("micro-batch", InputSource.RUN)


def accumulating(program: Program, joined: Collection[str]) -> Program:
    """A copy of a functional program that returns accumulators and ``joined`` results alone."""
    own = without_checks_of_sums(program).copy()
    pairs = zip(own.output_values(), own.outputs, strict=True)
    kept = [(value, out) for value, out in pairs if out.role.is_carried or out.name in joined]
    own.set_outputs([value for value, _ in kept], [out for _, out in kept])
    return replace(own, name=f"{program.name}-accumulating", micro_batches=None, earlier={})


def without_checks_of_sums(program: Program) -> Program:
    """A copy that neither asserts nor asks for sums over the batch, of which runs before the last one have a part.

    The program itself where it does not.
    """
    inputs = zip(program.inputs, program.placeholders, strict=True)
    after, found = {node for declared, node in inputs if declared.role.is_sum}, list[str]()
    for node in program.graph.nodes:
        if not after.isdisjoint(node.all_input_nodes):
            after.add(node)
            found += [node.name] if has(node.target, Trait.ASSERTS) or node.target is asked else []
    own = program.copy() if found else program
    for node in [each for each in own.graph.nodes if each.name in found]:
        if node.target is asked:
            node.replace_all_uses_with(node.args[0])
        own.graph.erase_node(node)
    return own


def added_to(program: Program) -> frozenset[str]:
    """The names of the accumulators that each run adds to; those above, in a tree, grow between runs."""
    above = {name for names in program.micro_batches.tree.values() for name in names} if program.micro_batches else ()
    return frozenset(e.name for each in program.inputs for e in each.inside if e.role.is_sum).difference(above)


def new_accumulators(program: Program) -> dict[int, torch.Tensor]:
    """Zeros for what runs hand on, accumulators above all, by their positions among the inputs of a program."""
    inputs = enumerate(zip(program.inputs, program.placeholders, strict=True))
    vals = {k: node.meta["val"] for k, (declared, node) in inputs if declared.role.is_carried}
    return {k: torch.zeros(val.shape, dtype=val.dtype, device=val.device) for k, val in vals.items()}


def empty_accumulators(program: Program, inputs: Sequence[Any]) -> None:
    """Begin with sums of nothing."""
    for declared, value in zip(program.inputs, inputs, strict=True):
        if declared.role.is_sum:
            value.zero_()


def ascend(program: Program, inputs: Sequence[torch.Tensor], k: int) -> None:
    """After run ``k``, add the sums of pairs that are complete: of runs, of pairs, and so on, like carries of a count.

    So each sum is that of a balanced tree over the runs, of which the last run adds up what is left: the sum of a
    half of the runs has the same bits, whether it is all that a program runs or the first half of it.
    """
    micro = program.micro_batches
    assert micro is not None
    position = program.positions()
    if micro.spread is not None:
        return _grow(micro, position, inputs, k)
    for name, above in micro.tree.items() if k % 2 else ():
        pair = inputs[position[name]]
        total = pair
        for level, each in enumerate(above, start=1):
            held = inputs[position[each]]
            if (k + 1) >> level & 1:
                held.copy_(total)
                break
            total = held + total
        pair.zero_()


def _grow(micro: MicroBatches, position: Mapping[str, int], inputs: Sequence[torch.Tensor], k: int) -> None:
    """After run ``k``, let its sums be the last subtree of the rank, with those before it that are its siblings."""
    assert micro.spread is not None
    before, after = (len(subtrees(micro.runs.start, end)) for end in (k, k + 1))
    for name, above in micro.tree.items():
        own = inputs[position[name]]
        slots, total = [inputs[position[each]] for each in above], own
        for held in reversed(slots[after - 1 : before]):
            total = held + total
        slots[after - 1].copy_(total)
        own.zero_()


def subtrees(first: int, end: int) -> list[tuple[int, int]]:
    """The largest subtrees, in order, of a balanced tree whose leaves are from ``first`` to ``end``: level, number."""
    found: list[tuple[int, int]] = []
    for leaf in range(first, end):
        level, number = 0, leaf
        while number % 2 and found and found[-1] == (level, number - 1):
            found.pop()
            level, number = level + 1, number // 2
        found.append((level, number))
    return found


def gather_rows(program: Program, inputs: list[Any]) -> None:
    """Replace arguments by those of all ranks, where ranks divide the runs of a call."""
    micro = program.micro_batches
    if micro is None or micro.spread is None:
        return
    for k, declared in enumerate(program.inputs):
        name = micro.whole.get(declared.name, declared.name)
        if name in micro.split:
            inputs[k] = _gathered(inputs[k], micro.split[name], micro.spread.rows[name], micro.spread)


def return_rows(micro: MicroBatches, name: str, own: torch.Tensor) -> torch.Tensor:
    """Exchange the rows of the parts that a rank ran for those that it is to return."""
    spread, dim, of_run = micro.spread, micro.joined[name], own.shape[micro.joined[name]] // len(micro.runs)
    assert spread is not None
    counts = [len(spread.runs(micro.count, rank)) for rank in range(spread.ranks)]
    most = max(counts) * of_run
    gathered = _all_rows(own.movedim(dim, 0), most, spread).split(most)
    whole = torch.cat([rows[: count * of_run] for rows, count in zip(gathered, counts, strict=True)])
    return own_rows(micro, whole.movedim(0, dim), dim)


def own_rows(micro: MicroBatches, whole: torch.Tensor, dim: int) -> torch.Tensor:
    """The rows of a rank, as ``torch.chunk`` cuts them, where ranks divide the runs."""
    assert micro.spread is not None
    most = -(-whole.shape[dim] // micro.spread.ranks)
    return whole.tensor_split([k * most for k in range(1, micro.spread.ranks)], dim)[micro.spread.rank].contiguous()


def _gathered(tensor: torch.Tensor, dim: int, rows: int, spread: Spread) -> torch.Tensor:
    """All ranks' rows, of which each has as many as ``torch.chunk`` gives it."""
    found = _all_rows(tensor.movedim(dim, 0), -(-rows // spread.ranks), spread)
    return found[:rows].movedim(0, dim).contiguous()


def _all_rows(own: torch.Tensor, most: int, spread: Spread) -> torch.Tensor:
    """The rows of all ranks, each rank's filled up to ``most``."""
    own = torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])]).contiguous()
    sent = own.view(-1).view(torch.uint8)  # not all backends gather bools
    found: torch.Tensor = c10d.wait_tensor(c10d.all_gather_into_tensor(sent, spread.ranks, spread.group))
    return found.view(own.dtype).view(-1, *own.shape[1:])
