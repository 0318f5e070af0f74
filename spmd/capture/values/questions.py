"""``Questions``: what Python asks of values while a step is traced, and the answers that the trace goes on with.

``if torch.isfinite(loss)`` asks whether a tensor is true, and ``if loss.item() > 3`` whether a condition on a number
holds, which is known only when the program runs. The trace takes an answer: that of a call that has shown it, else a
guess. An op in the graph notes where a call's value is another one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from passes.analysis.reachability import ancestors
from passes.runtime.answers import asked

from ..._torch import FakeTensor, GuardOnDataDependentSymNode, TorchDispatchMode, get_proxy_mode
from ...answers.answer import Answer, Answers
from ...answers.guess import compares, guess
from ...call.refusals import answer, chosen
from ...interpreter.source_lines import user_frame, user_line
from ...python_state.effects import writes
from .. import unsupported
from ..explain_errors import BACKWARD
from ..provenance import proxy_node, symbol_node
from ..unsupported import Refused
from .known_values import known_value

aten = torch.ops.aten

_QUESTIONS = (aten.is_nonzero.default, aten._local_scalar_dense.default, aten.equal.default, aten.allclose.default)
_REFUSED = (
    "it branches on the value of a tensor, which a step cannot {}. Select with torch.where instead of branching, "
    "return the tensor and look at it outside of the step, or replace the submodule through spmd.Override."
)
_ASKING = (unsupported.__file__, writes.__file__)
_TRUTH_OF_TENSORS = Tensor.__bool__
_TURNS = 8  # times that a guess of a comparison stands at one line
_MOST = 1_000  # questions of one call: a loop that a guess would never end
_TESTS = {"isfinite": torch.isfinite, "isnan": torch.isnan, "isinf": torch.isinf}  # functions of ``math``


class Questions(TorchDispatchMode):
    """Answers questions while ``make_fx`` traces, and collects them: ``answers``, and the traced ``values``.

    ``known``: the first answers, as a call has shown them, and ``guesses`` the next ones; ``likely``: those of the call
    before, to the same questions. ``refused``: the reason that the step may ask for none.
    """

    def __init__(self, known: Answers, guesses: Sequence[bool], likely: Answers, refused: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known, self._guesses, self._likely, self._refused = known, guesses, likely, refused
        self.answers: list[Answer] = []
        self.values: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        truth = _truth(func, args, kwargs) if func in _QUESTIONS and not _is_of_anomaly_mode(sys._getframe(1)) else None
        return func(*args, **kwargs) if truth is None else self._answer(truth)

    @contextmanager
    def of_numbers(self, are_of_state: Callable[[Exception], bool]) -> Iterator[None]:
        """Answer conditions on numbers that are taken out of tensors, too, for the length of the context.

        Of those on numbers of state the step is traced again with their values: ``are_of_state`` finds them by the
        error that they raise.
        """
        holds: Callable[[Any], bool] = torch.SymBool.__bool__
        before = {name: getattr(math, name) for name in _TESTS}

        def truth(condition: torch.SymBool) -> bool:
            return answered(condition, sys._getframe(1))

        def answered(condition: torch.SymBool, frame: FrameType) -> bool:
            may_be_nan = _may_ask(frame) and _may_be_nan(condition)
            try:
                found = holds(condition)
                if not may_be_nan:
                    return found
            except GuardOnDataDependentSymNode as error:
                if not _may_ask(frame) or are_of_state(error):
                    raise
            except Exception:  # torch's, of an infinite number
                if not may_be_nan:
                    raise
            return self._answer(_as_tensor(condition, torch.bool))

        def is_not_zero(number: Any) -> bool:
            condition = number != 0
            return answered(condition, sys._getframe(1)) if isinstance(condition, torch.SymBool) else bool(condition)

        def is_true(tensor: Tensor) -> bool:
            is_number = tensor.dtype is not torch.bool and tensor.numel() == 1 and isinstance(tensor, FakeTensor)
            return bool(_TRUTH_OF_TENSORS(tensor != 0 if is_number else tensor))

        def test(name: str, x: Any) -> bool:
            if not isinstance(x, torch.SymFloat) or x.node.hint is not None:
                return bool(before[name](x))
            return self._answer(_TESTS[name](_as_tensor(x, torch.float64)))

        methods = {torch.SymBool: truth, torch.SymInt: is_not_zero, torch.SymFloat: is_not_zero, Tensor: is_true}
        plain = {cls: vars(cls).get("__bool__") for cls in methods}
        vars(math).update({name: partial(test, name) for name in _TESTS})
        for cls, method in methods.items():
            cls.__bool__ = method  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for cls, own in plain.items():
                delattr(cls, "__bool__") if own is None else setattr(cls, "__bool__", own)
            vars(math).update(before)

    def _answer(self, truth: Tensor) -> bool:
        known = known_value(truth)
        if known is not None:
            return bool(known)
        where, number = user_line(sys._getframe(2)), len(self.answers)
        if self._refused:
            return answer(Refused(_REFUSED.format(self._refused)), False, True)
        if number == _MOST:
            raise Refused(f"it asks for the value of a tensor {_MOST} times in one call, the last time at {where}.")
        found = self._chosen(truth, where, number)
        self.answers.append(Answer(found, where))
        self.values.append(asked(truth.detach().reshape(()), number, found))
        return found

    def _chosen(self, truth: Tensor, where: str, number: int) -> bool:
        of_check = chosen(False, True)
        if of_check is not None:
            return of_check
        if number < len(self._known):
            return self._known[number].value
        if number < len(self._known) + len(self._guesses):
            return self._guesses[number - len(self._known)]
        if number < len(self._likely) and self._likely[number].where == where:
            return self._likely[number].value
        mode = get_proxy_mode()
        node = proxy_node(truth, mode.tracer) if mode is not None else None
        turns = sum(each.where == where for each in self.answers)
        ends = compares(node) and turns >= _TURNS  # a loop up to a limit
        return guess(node) is not ends


def _truth(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor whose truth an op asks for; None if it asks for something else, or raises."""
    if func is aten.allclose.default:
        return torch.isclose(*args, **kwargs).all()
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


def _may_ask(frame: FrameType) -> bool:
    """Whether code of the user's asks, or ours for what a step returns or keeps; torch's asks for what kernels need."""
    return user_frame(frame) is frame or frame.f_code.co_filename in _ASKING


def _may_be_nan(condition: torch.SymBool) -> bool:
    """Whether a condition is on floats of tensors: to symbols, of which none is NaN, ``x == x`` is always true."""
    mode = get_proxy_mode()
    node = symbol_node(condition, mode.tracer) if mode is not None else None
    read = [each for each in ancestors([node]) if each.target is aten._local_scalar_dense.default] if node else []
    return any(isinstance(each.meta.get("val"), torch.SymFloat) for each in read)


def _as_tensor(symbol: Any, dtype: torch.dtype) -> Tensor:
    """A tensor of 0 dims, which the program computes from the number that a symbol stands for."""
    return torch.scalar_tensor(symbol, dtype=dtype)
