"""Explain an exception that no code raised on purpose: at which op, from which line of the user's, how to report it."""

from __future__ import annotations

from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, TracebackType

from torch import fx

from .errors import SpmdError

REPORT = (
    "This is an error in spmd, not in the step. Please report it: this traceback, the graphs that SPMD_DUMP=folder "
    "writes, and the output of python -m torch.utils.collect_env"
)
_NAMES = ("node", "n")  # of the op that code is about, in ours and in torch's


def describe_op(traceback: TracebackType | None, otherwise: str = "") -> str:
    """``" at aten.mm.default (mm_3)"`` with the user's line below: the op that the code was about when it raised.

    That is the innermost node of a graph among the local variables. ``otherwise`` stands for a line that is not known.
    """
    node = None
    while traceback is not None:
        found = traceback.tb_frame.f_locals
        node = next((found[name] for name in _NAMES if isinstance(found.get(name), fx.Node)), node)
        traceback = traceback.tb_next
    if node is None:
        return otherwise
    is_function = isinstance(node.target, (FunctionType, BuiltinFunctionType))
    target = node.target.__name__ if is_function else node.target
    return f" at {target} ({node.name}){_describe_origin(node) or otherwise}"


def _describe_origin(node: fx.Node) -> str:
    """The user's line and the module that a node comes from, on a line of its own; nothing if they are not known."""
    source, module = node.meta.get("source"), node.meta.get("module")
    if not source:
        return ""
    return f"\n    {source}{f' (in {module})' if module else ''}"


def explained(
    kind: type[SpmdError], what: str, error: BaseException, where: str = "", before: Iterable[str] = ()
) -> SpmdError:
    """The error of ours for an unexpected one; ``before``: what went well, as notes."""
    message = f"{what} raised {type(error).__name__}: {error}".removesuffix(": ")
    explanation = kind(f"{message}{describe_op(error.__traceback__, where)}\n{REPORT}")
    for line in before:
        explanation.add_note(f"before it: {line}")
    return explanation
