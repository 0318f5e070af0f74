"""Make the first trace's graph functional and decompose its ops, by going through it once more below autograd.

The second trace goes through the first one's graph node by node (``second_trace.py``). Where all writes are renamings
(``renamed_writes.py``), it copies what needs no change (``copied_ops.py``); else torch functionalizes all of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..._torch import DisableAutocast, make_fx, use_lazy_graph_module
from ...memo import Shapes
from ..decompositions import second_trace_table
from ..fakes import Fakes
from .copied_ops import CopiedOps
from .renamed_writes import RenamedWrites
from .second_trace import SecondTrace


def functionalize(first: fx.GraphModule, fakes: Fakes) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """(the functional graph, the constants that it takes as its last inputs)."""
    names = list(dict.fromkeys(str(node.target) for node in first.graph.find_nodes(op="get_attr")))
    constants = [getattr(first, name) for name in names]
    with fakes.mode:
        fake_constants = [torch.empty_strided(c.shape, c.stride(), dtype=c.dtype, device=c.device) for c in constants]
    table, shapes = second_trace_table(), Shapes(fakes.mode)
    writes = RenamedWrites.of(first.graph, shapes)

    def run(*flat: Any) -> Any:
        return SecondTrace(first, names).run_on(flat)

    def run_copied(*flat: Any) -> Any:
        assert writes is not None
        return CopiedOps(first, names, writes, shapes, table.keys()).run_on(flat)

    functional = run_copied if writes is not None else torch.func.functionalize(run, remove="mutations")
    trace = make_fx(functional, decomposition_table=table, tracing_mode="fake")
    with torch.no_grad(), DisableAutocast(), use_lazy_graph_module(True):
        return trace(*fakes.flat, *fake_constants), constants


def take_write_backs(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Erase the copies into inputs that functionalization ends with; return the new value of each written input."""
    written: dict[fx.Node, fx.Node] = {}
    for node in reversed(graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)):
        target, value = node.args[:2]
        assert isinstance(target, fx.Node) and target.op == "placeholder" and isinstance(value, fx.Node)
        node.replace_all_uses_with(value)
        graph.erase_node(node)
        written[target] = value
    return written
