"""``Questions``: what Python asks of values while a step is traced, and the answers that the trace goes on with.

``if torch.isfinite(loss)`` asks whether a tensor is true, and ``if loss.item() > 3`` whether a condition on a number
holds, which is known only when the program runs. The trace takes an answer: that of a call that has shown it, else a
guess. An op in the graph notes where a call's value is another one.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from passes.analysis.reachability import ancestors
from passes.runtime.answers import asked

from ..._torch import GuardOnDataDependentSymNode, TorchDispatchMode, get_proxy_mode
from ...answers.answer import Answer, Answers
from ...answers.guess import guess
from ...interpreter.source_lines import user_frame, user_line
from ..provenance import proxy_node, symbol_node
from ..unsupported import Refused
from .known_values import known_value

aten = torch.ops.aten

_QUESTIONS = (aten.is_nonzero.default, aten._local_scalar_dense.default, aten.equal.default)
BACKWARD = os.path.join("torch", "autograd", "graph.py")
_MOST = 1_000  # questions of one call: a loop that a guess would never end
_TESTS = {"isfinite": torch.isfinite, "isnan": torch.isnan, "isinf": torch.isinf}  # functions of ``math``


class Questions(TorchDispatchMode):
    """Answers questions while ``make_fx`` traces, and collects them: ``answers``, and the traced ``values``.

    ``known``: the first answers, as a call has shown them; ``likely``: those of the call before, to the same questions.
    ``refused``: the reason that the step may ask for none.
    """

    def __init__(self, known: Answers, likely: Answers, refused: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known, self._likely, self._refused = known, likely, refused
        self.answers: list[Answer] = []
        self.values: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        truth = _truth(func, args) if func in _QUESTIONS and not _is_of_anomaly_mode(sys._getframe(1)) else None
        return func(*args, **(kwargs or {})) if truth is None else self._answer(truth)

    @contextmanager
    def of_numbers(self, are_of_state: Callable[[Exception], bool]) -> Iterator[None]:
        """Answer conditions on numbers that are taken out of tensors, too, for the length of the context.

        Of those on numbers of state the step is traced again with their values: ``are_of_state`` finds them by the
        error that they raise.
        """
        holds: Callable[[Any], bool] = torch.SymBool.__bool__
        before = {name: getattr(math, name) for name in _TESTS}

        def truth(condition: torch.SymBool) -> bool:
            frame = sys._getframe(1)
            is_users = user_frame(frame) is frame
            try:
                found = holds(condition)
                if not is_users or not _may_be_nan(condition):
                    return found
            except GuardOnDataDependentSymNode as error:
                if not is_users or are_of_state(error):
                    raise
            return self._answer(_as_tensor(condition, torch.bool))

        def test(name: str, x: Any) -> bool:
            if not isinstance(x, torch.SymFloat) or x.node.hint is not None:
                return bool(before[name](x))
            return self._answer(_TESTS[name](_as_tensor(x, torch.float64)))

        torch.SymBool.__bool__ = truth  # type: ignore[method-assign]
        vars(math).update({name: partial(test, name) for name in _TESTS})
        try:
            yield
        finally:
            torch.SymBool.__bool__ = holds  # type: ignore[method-assign]
            vars(math).update(before)

    def _answer(self, truth: Tensor) -> bool:
        known = known_value(truth)
        if known is not None:
            return bool(known)
        where, number = user_line(sys._getframe(2)), len(self.answers)
        self._check(where, number)
        answer = self._chosen(truth, where, number)
        self.answers.append(Answer(answer, where))
        self.values.append(asked(truth.detach().reshape(()), number, answer))
        return answer

    def _chosen(self, truth: Tensor, where: str, number: int) -> bool:
        if number < len(self._known):
            return self._known[number].value
        if number < len(self._likely) and self._likely[number].where == where:
            return self._likely[number].value
        mode = get_proxy_mode()
        return guess(proxy_node(truth, mode.tracer)) if mode is not None else False

    def _check(self, where: str, number: int) -> None:
        if self._refused:
            raise Refused(
                f"it branches on the value of a tensor, which a step cannot {self._refused}. Select with torch.where "
                "instead of branching, return the tensor and look at it outside of the step, or replace the submodule "
                "through spmd.Override."
            )
        if number == _MOST:
            raise Refused(f"it asks for the value of a tensor {_MOST} times in one call, the last time at {where}.")


def _truth(func: Any, args: tuple[Any, ...]) -> Tensor | None:
    """The tensor whose truth an op asks for; None if it asks for something else, or raises."""
    if func is aten.equal.default:
        one, other = args
        return torch.eq(one, other).all() if one.shape == other.shape else None
    if args[0].numel() != 1 or (func is aten._local_scalar_dense.default and args[0].dtype is not torch.bool):
        return None
    value: Tensor = args[0]
    return value if value.dtype is torch.bool else value != 0


def _is_of_anomaly_mode(frame: FrameType | None) -> bool:
    """Whether torch itself looks for NaN in each gradient."""
    if not torch.is_anomaly_check_nan_enabled():
        return False
    users = user_frame(frame)
    while frame is not users and frame is not None and not frame.f_code.co_filename.endswith(BACKWARD):
        frame = frame.f_back
    return frame is not users


def _may_be_nan(condition: torch.SymBool) -> bool:
    """Whether a condition is on floats of tensors: to symbols, of which none is NaN, ``x == x`` is always true."""
    mode = get_proxy_mode()
    node = symbol_node(condition, mode.tracer) if mode is not None else None
    read = [each for each in ancestors([node]) if each.target is aten._local_scalar_dense.default] if node else []
    return any(isinstance(each.meta.get("val"), torch.SymFloat) for each in read)


def _as_tensor(symbol: Any, dtype: torch.dtype) -> Tensor:
    """A tensor of 0 dims, which the program computes from the number that a symbol stands for."""
    return torch.scalar_tensor(symbol, dtype=dtype)
