"""Give nodes that a pass or a user added their ``meta["val"]``: shapes and dtypes by running the op without data."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.func import functional_call

from .._torch import FakeTensor, FakeTensorMode
from ..errors import PassError
from . import grouped_products as grouped_products  # gives an op its shapes
from .program import Program


def fill_vals(program: Program) -> int:
    """Fill in each missing ``meta["val"]`` from the vals of the arguments; returns how many were missing.

    Raises ``PassError`` where an argument has none, or where the op refuses its arguments.
    """
    missing = [node for node in program.graph.nodes if _lacks_val(node)]
    if missing:
        mode = _mode(program.graph)
        runner = _Runner(program.graph_module, mode)
        for node in missing:
            node.meta["val"] = _infer(runner, node)
    return len(missing)


class _Runner(fx.Interpreter):
    """Runs single nodes on fake tensors; parameters of modules that users put into the graph are made fake first."""

    def __init__(self, module: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(module)
        self.mode = mode

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._fake(super().get_attr(target, args, kwargs))

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        state = {name: self._fake(value) for name, value in (*module.named_parameters(), *module.named_buffers())}
        return functional_call(module, state, args, kwargs)

    def _fake(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        return self.mode.from_tensor(value, static_shapes=True)


def _infer(runner: _Runner, node: fx.Node) -> Any:
    for argument in node.all_input_nodes:
        if "val" not in argument.meta:
            raise PassError(f"{node.name} reads {argument.name}, whose shape is not known: it has no meta['val']")
        runner.env[argument] = present_value(argument.meta["val"])
    try:
        with runner.mode, torch.no_grad():
            return runner.run_node(node)
    except Exception as error:
        raise PassError(f"{node.name} = {node.target}{node.args} does not fit its arguments: {error}") from error


def present_value(val: Any) -> Any:
    """``val``, or the present value of a number that each call reads: shapes do not depend on it."""
    return val.node.hint if isinstance(val, torch.SymFloat) and val.node.has_hint() else val


def _lacks_val(node: fx.Node) -> bool:
    return node.op not in ("placeholder", "output") and "val" not in node.meta


def _mode(graph: fx.Graph) -> FakeTensorMode:
    """The mode that the program was traced under: fake tensors of two modes do not mix."""
    for node in graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, FakeTensor):
            return val.fake_mode
    return FakeTensorMode()
