"""``ClearedGradients``: which gradients the step clears before it reads them, as ``zero_grad()`` at its start does.

Such a program is the same whether a call finds a gradient or none. In the first call there are none, so ``zero_grad``
itself has nothing to clear: what counts is that it asked, while nothing had been read or accumulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..._torch import TorchFunctionMode
from ...interpreter.interrupts import answer_interrupt

_gradient: Any = torch.Tensor.grad
_GET, _SET = _gradient.__get__, _gradient.__set__


class ClearedGradients(TorchFunctionMode):
    """Watches the fakes of parameters, by name, for the length of a trace; ``names``: those that were cleared first."""

    def __init__(self, fakes: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._untouched = {id(fake): name for name, fake in fakes.items() if fake.grad is None}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET:
            self._clear([args[0]])
        elif func == _GET:
            self._untouched.pop(id(args[0]), None)
        if args and isinstance(args[0], torch.Tensor):  # no setting of torch's: what restores one may not raise
            answer_interrupt()
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watch_zero_grad(self) -> Iterator[None]:
        """Note every call of ``zero_grad``, of optimizers and of modules, for the length of the context."""
        of_optimizers, of_modules = Optimizer.zero_grad, nn.Module.zero_grad

        def optimizers(optimizer: Optimizer, set_to_none: bool = True) -> None:
            if set_to_none:
                self._clear([p for group in optimizer.param_groups for p in group["params"]])
            of_optimizers(optimizer, set_to_none)

        def modules(module: nn.Module, set_to_none: bool = True) -> None:
            if set_to_none:
                self._clear(list(module.parameters()))
            of_modules(module, set_to_none)

        Optimizer.zero_grad, nn.Module.zero_grad = optimizers, modules  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Optimizer.zero_grad, nn.Module.zero_grad = of_optimizers, of_modules  # type: ignore[method-assign]

    def _clear(self, parameters: list[torch.Tensor]) -> None:
        """Of parameters that nobody has touched, those without a gradient by now are cleared first."""
        for parameter in parameters:
            name = self._untouched.pop(id(parameter), None)
            if name is not None and parameter.grad is None:
                self.names.add(name)
