"""Results with rows of the batch: each micro-batch writes its own where all of a call lie, which is then returned."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from passes import Input, Output, OutputKind, PartitionError, Program
from passes.ir.edit import add_input
from passes.ir.micro_batches import ACCUMULATOR

aten = torch.ops.aten


def collect_rows(local: Program) -> Program:
    """The share of a micro-batch with an accumulator for each result that is rows, and an input that is all of these.

    They lie in the same memory, of which each run has its part, as it has of arguments. Raises ``PartitionError`` for
    rows that are not the first dim.
    """
    micro, ends = local.micro_batches, list[tuple[fx.Node, Output]]()
    assert micro is not None, "the share of a micro-batch"
    values, split, whole = list(local.output_values()), dict(micro.split), dict(micro.whole)
    for k, output in enumerate(local.outputs):
        if output.name not in micro.joined:
            continue
        if micro.joined[output.name]:
            raise PartitionError(
                f"{output.name} has rows of the batch as dim {micro.joined[output.name]}: stages return rows that are "
                "dim 0, so transpose it"
            )
        own, name = values[k], f"rows.{k}"
        part = own.meta["val"].new_empty(own.meta["val"].shape)
        every = part.new_empty([micro.count * part.shape[0], *part.shape[1:]])
        for each, val in ((name, part), (f"{name}.whole", every)):
            last = add_input(local, Input(ACCUMULATOR, each, tuple(val.shape), val.dtype, output.placement), val)
        written, values[k] = _copy(local, own, part), _copy(local, last, every)
        ends.append((written, Output(OutputKind.UPDATE, name, ACCUMULATOR, tuple(part.shape), part.dtype)))
        split[name], whole[f"{name}.whole"] = 0, name
    local.set_outputs([*values, *(value for value, _ in ends)], [*local.outputs, *(output for _, output in ends)])
    return replace(local, micro_batches=replace(micro, split=split, whole=whole, joined={}))


def _copy(program: Program, node: fx.Node, val: torch.Tensor) -> fx.Node:
    with program.graph.inserting_before(program.output_node):
        made = program.graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    made.meta = {key: node.meta[key] for key in ("phase", "module", "source", "placement") if key in node.meta}
    made.meta["val"] = val
    return made
