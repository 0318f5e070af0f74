"""Read the text of a call, ``aten.mm(f32[4, 8], f32[8, 6])``, and make the ``OpCall`` that a rule gets.

The text is that of a program's dump, with types instead of names. The op runs once, on tensors without elements or of
zeros, for the shapes of its results.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import torch

from passes.ir.printer import short_dtype

from ..._torch import OpOverload, tree_flatten
from ..base import Info, OpCall
from .names import op_called


def _names(dtype: torch.dtype) -> set[str]:
    """``f32`` and ``float32``."""
    return {short_dtype(dtype), str(dtype).removeprefix("torch.")}


_DTYPES = {name: each for each in vars(torch).values() if isinstance(each, torch.dtype) for name in _names(each)}
_NO_DIMS = re.compile(r"(?<=\w)\[\s*\]")  # f32[], which is no Python


def call_of(text: str, ranks: int) -> OpCall:
    """The call that ``text`` is, along an axis of so many ranks.

    Raises ``ValueError``, with what was expected, if it is no call, names no op, or the op refuses the arguments.
    """
    name, _, rest = text.strip().partition("(")
    if not rest.endswith(")"):
        raise ValueError(f"expected a call such as aten.mm(f32[4, 8], f32[8, 6]), got {text!r}")
    op = op_called(name)
    return called(op, *_arguments(rest[:-1]), ranks)


def called(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], ranks: int) -> OpCall:
    """A call of ``op`` with ``Info``s instead of tensors. Raises ``ValueError`` if the op refuses it."""
    results = [_info(each) for each in _results(op, args, kwargs)]
    operands = tuple(leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Info))
    return OpCall(op, args, kwargs, operands, tuple(results), ranks)


def is_taken(text: str) -> bool:
    """Whether the op takes the arguments of a call."""
    try:
        call_of(text, 1)
    except ValueError:
        return False
    return True


def _results(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Results of the op on tensors without elements, or, where it has no such kernel, on zeros."""
    refusals: list[Exception] = []
    for device in ("meta", "cpu"):
        try:
            with torch.no_grad():
                found = op(*_on(device, args), **_on(device, kwargs))
        except Exception as error:
            refusals.append(error)
        else:
            return [*found] if isinstance(found, list | tuple) else [found]
    first = str(refusals[-1]).partition("\n")[0]
    raise ValueError(f"{op} does not take these arguments: {first}") from refusals[-1]


def _on(device: str, value: Any) -> Any:
    """``value`` with a tensor on ``device`` for each ``Info``."""
    if isinstance(value, Info):
        return torch.zeros(value.shape, dtype=value.dtype, device=device)
    if isinstance(value, dict):
        return {name: _on(device, each) for name, each in value.items()}
    return type(value)(_on(device, each) for each in value) if isinstance(value, list | tuple) else value


def _info(value: Any) -> Info | None:
    return Info(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None


def _arguments(text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    try:
        tree = ast.parse(f"f({_NO_DIMS.sub('[()]', text)})", mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"expected arguments such as f32[4, 8], [1, 1], None, got {text!r}") from error
    assert isinstance(tree, ast.Call)
    return tuple(map(_value, tree.args)), {each.arg or "": _value(each.value) for each in tree.keywords}


def _value(node: ast.expr) -> Any:
    """The value that an argument stands for; an ``Info`` for a tensor."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        sizes = _value(node.slice)
        shape = tuple(sizes) if isinstance(sizes, list) else (sizes,)
        return Info(shape, _dtype(node.value.id))
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Name):
        return _dtype(node.id)
    if isinstance(node, ast.Attribute):
        return _dtype(node.attr)  # torch.float32
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(
            f"expected a tensor's type such as f32[4, 8], a number, a list or None, got {ast.unparse(node)}"
        ) from None


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"expected a dtype such as f32, bf16, i64 or bool, got {name}")
    return _DTYPES[name]
