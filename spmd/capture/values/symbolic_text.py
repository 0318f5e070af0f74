"""Text of a symbolic number, and its hash: for the length of a trace, those of its value, which a guard then fixes.

The value of a tensor, or of a number that only the graph knows, is not known while tracing. Text of it that is printed
or logged at once is made by each call (``../../python_state/reads/formatted.py``), other text is refused. In messages
of checks, which are written whether or not they are needed, it is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..._torch import FakeTensor
from ...call.refusals import answer
from ...interpreter.foreign_code import is_foreign_frame
from ...python_state.reads.formatted import VALUE, is_shown_at_once, mark_of
from ..unsupported import Refused
from .tensor_checks import writes_message

_KINDS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float}
_METHODS = ("__format__", "__hash__", "__str__", "__repr__")

_TEXT = (
    'it formats the value of a tensor as text, which is not known while tracing. print(f"loss {loss}") '
    "prints the value at each call; or return the tensor, and format it outside of the step."
)


@contextmanager
def tensors_as_text() -> Iterator[None]:
    """Refuse to format traced tensors in the user's code, but for messages of checks."""
    before = {name: vars(FakeTensor).get(name) for name in ("__format__", "__repr__")}

    def refusing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def format(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if is_foreign_frame(sys._getframe(1)):
                return original(tensor, *args, **kwargs)
            if writes_message(sys._getframe(1)):
                return VALUE
            if is_shown_at_once(sys._getframe(1)):
                return mark_of(tensor, name, args)
            return answer(Refused(_TEXT), VALUE)

        return format

    for name in before:
        setattr(FakeTensor, name, refusing(name, getattr(FakeTensor, name)))
    try:
        yield
    finally:
        for name, own in before.items():
            if own is None:
                delattr(FakeTensor, name)
            else:
                setattr(FakeTensor, name, own)


@contextmanager
def numbers_as_text() -> Iterator[None]:
    """Let the user's code format and look up numbers that each call reads, for the value that they have now."""
    before = [(cls, name, vars(cls).get(name)) for cls in _KINDS for name in _METHODS]
    for cls, name, own in before:
        setattr(cls, name, _of_value(cls, name, own or getattr(cls, name)))
    try:
        yield
    finally:
        for cls, name, own in before:
            if own is None:
                delattr(cls, name)
            else:
                setattr(cls, name, own)


def _of_value(cls: type, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    plain, method = _KINDS[cls], getattr(_KINDS[cls], name)

    def of_value(number: Any, *args: Any) -> Any:
        if is_foreign_frame(sys._getframe(1)):
            return original(number, *args)
        if not number.node.has_hint():
            if name != "__hash__" and is_shown_at_once(sys._getframe(1)):
                return mark_of(number, name, args)
            return answer(Refused(_TEXT), 0 if name == "__hash__" else VALUE)
        return method(plain(number), *args)

    return of_value
