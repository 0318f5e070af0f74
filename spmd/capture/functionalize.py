"""Make the first trace's graph functional and decompose its ops, by running it once more below autograd.

The origin of each node is carried over: the second trace runs the first one's graph node by node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from passes import CaptureError, SpmdError
from passes.ir.ops import draws
from passes.ir.origin import Origin
from passes.unexpected_errors import REPORT

from .._torch import DisableAutocast, get_proxy_mode, make_fx, use_lazy_graph_module
from .decompositions import second_trace_table
from .fakes import Fakes


def functionalize(first: fx.GraphModule, fakes: Fakes) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """(the functional graph, the constants that it takes as its last inputs)."""
    names = list(dict.fromkeys(str(node.target) for node in first.graph.find_nodes(op="get_attr")))
    constants = [getattr(first, name) for name in names]
    with fakes.mode:
        fake_constants = [torch.empty_strided(c.shape, c.stride(), dtype=c.dtype, device=c.device) for c in constants]

    def run(*flat: Any) -> Any:
        count = len(fakes.flat)
        interpreter = _SecondTrace(first, dict(zip(names, flat[count:], strict=True)))
        return interpreter.run(*flat[:count])

    functional = torch.func.functionalize(run, remove="mutations")
    trace = make_fx(functional, decomposition_table=second_trace_table(), tracing_mode="fake")
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


class _SecondTrace(fx.Interpreter):
    """Runs the first trace's graph under the second trace, and gives each new node the origin of the one it is from."""

    def __init__(self, module: fx.GraphModule, constants: Mapping[str, Any]) -> None:
        super().__init__(module)
        self.extra_traceback = False  # the error says where, and keeps its type
        self.constants = constants
        self.last: fx.Node | None = None
        self.draws: dict[tuple[int, int], int] = {}  # by (draw of the first trace, index among the ops it became)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.constants[target]

    def run_node(self, n: fx.Node) -> Any:
        origin: Origin | None = n.meta.get("origin")
        try:
            result = super().run_node(n)
        except SpmdError:
            raise
        except Exception as error:
            line = f"\n    {origin.source}" if origin is not None else ""
            raise CaptureError(
                f"{n.target} cannot be made functional or decomposed: {type(error).__name__}: {error}{line}\n{REPORT}"
            ) from error
        added = self._added()
        if added and origin is not None:
            for node in added[:-1]:
                node.meta["origin"] = replace(origin, grad_of=None, cotangent_of=None)
            added[-1].meta["origin"] = origin
            self._number(added, origin)
        return result

    def _added(self) -> list[fx.Node]:
        """The nodes that were traced since the last call, in order."""
        mode = get_proxy_mode()
        assert mode is not None
        added: list[fx.Node] = []
        for node in reversed(mode.tracer.graph.nodes):
            if node is self.last or node.op == "placeholder":
                break
            added.append(node)
        self.last = added[0] if added else self.last
        return added[::-1]

    def _number(self, added: list[fx.Node], origin: Origin) -> None:
        """Number the random ops among ``added``; ops from one draw of the first trace get the same number."""
        if origin.draw is None:
            return
        random = [node for node in added if draws(node.target, node.args, node.kwargs)]
        for index, node in enumerate(random):
            node.meta["draw"] = self.draws.setdefault((origin.draw, index), len(self.draws))
