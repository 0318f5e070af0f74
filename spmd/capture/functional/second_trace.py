"""``SecondTrace``: go through the first trace's graph under the second one, and carry the origin of each node over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from passes import CaptureError, SpmdError
from passes.ir.ops import draws
from passes.ir.origin import Origin
from passes.unexpected_errors import REPORT

from ..._torch import get_proxy_mode
from ...interpreter.interrupts import answer_interrupt


class SecondTrace(fx.Interpreter):
    """Runs the first trace's graph under the second trace, and gives each new node the origin of the one it is from.

    ``constants`` are the names of those that the graph reads; they are passed after its own inputs.
    """

    def __init__(self, module: fx.GraphModule, constants: Sequence[str]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.extra_traceback = False  # the error says where, and keeps its type
        self.names = constants
        self.constants: dict[str, Any] = {}
        self.last: fx.Node | None = None
        self.draws: dict[tuple[int, int], int] = {}  # by (draw of the first trace, index among the ops it became)

    def run_on(self, flat: Sequence[Any]) -> Any:
        """Go through the graph with these inputs and constants; returns what it returns."""
        count = len(flat) - len(self.names)
        self.constants = dict(zip(self.names, flat[count:], strict=True))
        return self.run(*flat[:count])

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The constant that the trace takes as an input."""
        return self.constants[target]

    def run_node(self, n: fx.Node) -> Any:
        """Trace what a node computes, and give what was added its origin."""
        answer_interrupt()
        origin: Origin | None = n.meta.get("origin")
        try:
            result = self._run(n)
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

    def _run(self, node: fx.Node) -> Any:
        """Trace what one node computes."""
        return super().run_node(node)

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
