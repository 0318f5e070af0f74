"""Launch an island's kernels from the Python that Inductor writes for a GPU.

A launch costs the host some microseconds, which a program that is captured as CUDA graphs pays once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from passes import Island

from .._torch import python_module
from .island_call import laid_out, lies_as
from .island_code import IslandCode, inductor_text


class LaunchedIsland:
    """An island as a Python function of a list of tensors, which launches kernels on the current stream."""

    def __init__(self, island: Island, name: str) -> None:
        """Compile an island that writes into given memory. Raises ``NoKernelError`` where Inductor cannot."""
        text, _ = inductor_text(island)
        self._function: Any = python_module(text).call
        self.code = IslandCode(name, text, text.count("async_compile."), len(island.outs))

    def bind(self, operands: Sequence[Tensor | None], vals: Sequence[Tensor]) -> Callable[..., None]:
        """A function that runs the island, with the contract of ``CompiledIsland.bind``."""
        function, pairs = self._function, list(enumerate(zip(operands, vals, strict=True)))
        given = [k for k, each in enumerate(operands) if each is None]
        moving = [(k, val) for k, (each, val) in pairs if each is None or not lies_as(each, val)]
        outs = range(len(operands) - self.code.outs, len(operands))

        def run(*values: Tensor) -> None:
            held = list(operands)
            for k, value in zip(given, values, strict=True):
                held[k] = value
            for k, val in moving:
                held[k] = laid_out(held[k], val, k in outs)
            function(held)

        return run
