"""The op that needs rows of other micro-batches, and how to write it so that each row is looked at by itself."""

from __future__ import annotations

from torch import fx

from passes import PartitionError
from passes.analysis.reachability import reached
from passes.ir.collectives import is_collective, is_wait
from passes.ir.ops import Trait, has
from passes.ir.schemas import name_of

from .lines import described

_ALONG = "cumsum cumprod logcumsumexp cummax cummin sort argsort topk flip roll unique_consecutive"
_TAKES = "index index_select gather take embedding"
_ADDS = "scatter scatter_add scatter_reduce index_add index_put index_copy bincount histc"
_SPELLINGS = {
    _ALONG: "work along a dim of each row, as in x.view(rows, -1).cumsum(1), before rows are flattened into one dim",
    _TAKES: "let each row take by its own positions, gather(x, 1, index) or x[torch.arange(len(x))[:, None], index]",
    _ADDS: "let each row add to its own, torch.zeros(rows, n).scatter_add(1, index, values), before rows are flattened",
}
_OTHER = "write the step so that only sums over rows are needed"


def refused(move: fx.Node) -> PartitionError:
    """The error for a collective that would bring rows of all micro-batches together, at the op that needs them."""
    reader = _reader(move)
    node = _whole_sum(reader) or reader
    advice = next((text for names, text in _SPELLINGS.items() if _name(node) in names.split()), _OTHER)
    return PartitionError(
        f"{described(node)} needs rows of all micro-batches at once: {move.meta['collective'].why}. Keep the batch "
        f"whole (micro_batches=1), or {advice}"
    )


def _name(node: fx.Node) -> str:
    return name_of(node.target) if node.op == "call_function" else ""


def _reader(move: fx.Node) -> fx.Node:
    """The op that reads what is moved, as the collective names it; else the first that does not only view it."""
    use = move.meta["collective"].why.partition(" for ")[2].partition(" at ")[0]
    behind = [each for each in reached(move.users, _viewers) if each.op == "call_function"]
    computing = [each for each in behind if not (is_wait(each) or _views(each))]
    named = [each for each in computing if _name(each) == use]
    return next(iter([*named, *computing]), move)


def _viewers(node: fx.Node) -> list[fx.Node]:
    return list(node.users) if is_wait(node) or _views(node) else []


def _whole_sum(reader: fx.Node) -> fx.Node | None:
    """The sum of each part for all rows, if ``reader`` joins it to rows of all, which are then what is moved."""
    for node in reader.all_input_nodes:
        while is_wait(node) or is_collective(node) or _views(node):
            node = node.all_input_nodes[0]
        if _name(node) in _ADDS.split():
            return node
    return None


def _views(node: fx.Node) -> bool:
    return has(node.target, Trait.RESHAPES, Trait.SQUEEZES, Trait.PERMUTES, Trait.EXPANDS, Trait.COPIES, Trait.FLATTENS)
