"""Text with values of a call in it: ``print(f"loss {loss.item():.3f}")``, which each call formats anew.

While a step is traced there are no values. Where text is made for a print or a logger at once, a mark stands in it for
each, and what is recorded keeps the value beside the text around it. Text that goes elsewhere is refused: somebody
might look at it.
"""

from __future__ import annotations

import builtins
import dis
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from passes import CaptureError

from ..._torch import register_pytree_node, tree_map
from ...interpreter.positions import Span, called_by, encloses, position, span_of

VALUE = "(a value)"
"""The text of a value that is not known."""

_MARK = re.compile("\ue000(\\d+)\ue001")  # of private use: no text of a person's has them
_PARTS = re.compile("[\ue000\ue001]")
_WIDE = re.compile(r"%[-+ #]*[0-9*.]+[sr]")
_CONVERTS = re.compile(r"![rsa]:")  # the text of a value, which is padded then
_FORMATS = {"FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC"}
_CALLS = {"CALL", "CALL_KW", "CALL_FUNCTION_EX"}
_LOGS = ("debug", "info", "warning", "error", "critical", "exception", "log")
_MAKES = (str, format, repr)

_marked: list[tuple[Any, str, tuple[Any, ...]]] = []  # by the numbers of marks: value, method, its arguments


@dataclass(frozen=True, eq=False)
class Formatted:
    """A text: ``pieces`` around ``values``, of which each is formatted by a method, with its arguments."""

    pieces: tuple[str, ...]
    methods: tuple[tuple[str, tuple[Any, ...]], ...]
    values: tuple[Any, ...]

    def __str__(self) -> str:
        made = [getattr(x, name)(*args) for x, (name, args) in zip(self.values, self.methods, strict=True)]
        return "".join(each for pair in zip(self.pieces, [*made, ""], strict=True) for each in pair)

    def __repr__(self) -> str:  # in a list or a dict that is shown
        return repr(str(self))


register_pytree_node(
    Formatted,
    lambda text: (list(text.values), (text.pieces, text.methods)),
    lambda values, parts: Formatted(parts[0], parts[1], tuple(values)),
)


@contextmanager
def marked_values() -> Iterator[None]:
    """Forget the marks of an earlier trace, for the length of the context."""
    _marked.clear()
    try:
        yield
    finally:
        _marked.clear()


def mark_of(value: Any, method: str, args: tuple[Any, ...]) -> str:
    """The text that stands for a value until it is recorded."""
    _marked.append((value, method, args))
    return f"\ue000{len(_marked) - 1}\ue001"


def with_values(leaf: Any) -> Any:
    """A text with marks as ``Formatted``; anything else as it is."""
    if type(leaf) is not str or not _PARTS.search(leaf):
        return leaf
    pieces = _MARK.split(leaf)
    if any(map(_PARTS.search, pieces[::2])):
        raise CaptureError(
            "a part is shown of a text with the value of a tensor, which no trace knows: show the whole text, with a "
            'width or a precision in the format, such as f"{loss:10.4f}"'
        )
    values, names, args = zip(*(_marked[int(number)] for number in pieces[1::2]), strict=True)
    return Formatted(tuple(pieces[::2]), tuple(zip(names, args, strict=True)), values)


def without_values(tree: Any) -> Any:
    """The same for a step that ends the process while it is traced: what no trace knows is ``VALUE``."""

    def shown(leaf: Any) -> Any:
        if isinstance(leaf, Formatted):
            return VALUE.join(leaf.pieces)
        return VALUE if isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)) else leaf

    return tree_map(shown, tree, is_leaf=lambda leaf: isinstance(leaf, Formatted))


def is_shown_at_once(frame: FrameType) -> bool:
    """Whether the text that a frame makes goes to a print or a logger as it is, through nothing that changes it."""
    instructions = [*dis.get_instructions(frame.f_code)]
    made = next((k for k, each in enumerate(instructions) if each.offset == frame.f_lasti), None)
    here = position(frame.f_code, frame.f_lasti)
    if made is None or here is None:
        return False
    is_call = instructions[made].opname in _CALLS and _makes_text(frame, here)
    if not (
        is_call or _formats(*instructions[made : made + 2]) or _is_plain_remainder(frame, instructions[made], here)
    ):
        return False
    calls = [each for each in instructions if each.opname in _CALLS]
    around = dict.fromkeys(span for each in calls if (span := span_of(each.positions)) and encloses(span, here))
    shows = [_shows(frame, span) for span in around]
    return any(shows) and all(one or _makes_text(frame, span) for one, span in zip(shows, around, strict=True))


def _formats(made: dis.Instruction, after: dis.Instruction) -> bool:
    """Whether a part of an f-string is the text of a value; not so where that is padded: ``{loss!r:>40}``."""
    if made.opname == "CONVERT_VALUE":
        return after.opname == "FORMAT_SIMPLE"
    converts = made.opname == "FORMAT_VALUE" and (made.arg or 0) & 3
    return made.opname in _FORMATS and not (converts and (made.arg or 0) & 4)


def _is_plain_remainder(frame: FrameType, made: dis.Instruction, here: Span) -> bool:
    """Whether text is made by ``%`` from a constant that asks for no width: that would be one of a mark."""
    if made.opname != "BINARY_OP" or made.argrepr != "%":
        return False
    loads = (each for each in dis.get_instructions(frame.f_code) if each.opname == "LOAD_CONST")
    texts = [each.argval for each in loads if (span := span_of(each.positions)) and span[0] == here[0]]
    return len(texts) == 1 and isinstance(texts[0], str) and not _WIDE.search(texts[0])


def _shows(frame: FrameType, call: Span) -> bool:
    owner, name = called_by(frame, call)
    if name in _LOGS:
        return owner is logging or isinstance(owner, logging.Logger)
    return owner is None and name == "print" and frame.f_globals.get("print", builtins.print) is builtins.print


def _makes_text(frame: FrameType, call: Span) -> bool:
    owner, name = called_by(frame, call)
    if owner is None:
        return any(name == each.__name__ and frame.f_globals.get(name, each) is each for each in _MAKES)
    return name == "format" and isinstance(owner, str) and not _CONVERTS.search(owner)
