"""Recognize recomputations of ``torch.utils.checkpoint`` while the step is traced.

In backward, checkpoint calls the user's function again: an op whose stack has a frame of checkpoint inside of backward
is a recomputation. Its original is the earlier op with the same target on the same operands, where an operand that was
itself recomputed counts as its original. Marked recomputations are not merged with their originals later, which would
undo the checkpoint.
"""

from __future__ import annotations

from types import FrameType

import torch
import torch.utils.checkpoint
from torch import fx

_CHECKPOINT = torch.utils.checkpoint.__file__
_BACKWARD = torch.autograd.graph.__file__  # runs the engine; backward() and grad() call it
_DETACH = torch.ops.aten.detach.default


def recomputing(frame: FrameType | None) -> FrameType | None:
    """The frame of ``torch.utils.checkpoint`` around ``frame`` in the innermost backward, or None."""
    while frame is not None and frame.f_code.co_filename != _BACKWARD:
        if frame.f_code.co_filename == _CHECKPOINT:
            return frame
        frame = frame.f_back
    return None


class Recomputed:
    """Finds for each recomputed node the node that computed the same before."""

    def __init__(self) -> None:
        self._run: FrameType | None = None
        self._before: dict[str, fx.Node] = {}  # computed before this run, by key
        self._now: dict[str, fx.Node] = {}  # computed in this run, by key
        self._first: dict[fx.Node, fx.Node] = {}

    def original(self, node: fx.Node, run: FrameType) -> fx.Node | None:
        """The node that ``node``, traced in the recomputation ``run``, computes again; None if there is none."""
        if not self._before:
            earlier = (each for each in node.graph.nodes if each is not node)
            self._before = {self._key(each): each for each in earlier if each.op == "call_function"}
        if node.target is _DETACH and isinstance(node.args[0], fx.Node):  # how checkpoint passes on what it saved
            self._first[node] = self._first.get(node.args[0], node.args[0])
            return node.args[0]
        if run is not self._run:
            self._before |= self._now
            self._run, self._now = run, {}
        key = self._key(node)
        found = self._before.get(key)
        if found is not None:
            self._first[node] = self._first.get(found, found)
        self._now[key] = node
        return found

    def _key(self, node: fx.Node) -> str:
        """Equal for nodes that compute the same."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: self._first.get(each, each))
        origin = node.meta.get("origin")
        return f"{node.target} {args} {kwargs} {origin.draw if origin is not None else None}"
