"""Let ops take the numbers that a call brings, such as learning rates, as tensors: a region knows tensors only.

A compiler of regions would take a Python number for a constant. As an operand a number becomes a tensor of no dims in
float64, which promotes nothing; where an op has a number as an option (``alpha``, ``value``), its formula is written
out. What has no such form keeps its number, and stays outside of regions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..ir.edit import insert_before, replace
from ..ir.meta import Relation
from ..ir.program import Program
from ..ir.schemas import argument

aten = torch.ops.aten
_EXACT = (torch.float32, torch.float64, torch.complex64, torch.complex128)  # in which a formula rounds as its op does


def is_number(value: Any) -> bool:
    """Whether an argument is a float that each call brings."""
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), (float, torch.SymFloat))


def takes_number(node: fx.Node) -> bool:
    """Whether an op on tensors reads a float that each call brings."""
    return isinstance(node.meta.get("val"), torch.Tensor) and any(map(is_number, node.all_input_nodes))


def take_tensors(program: Program) -> int:
    """Rewrite the ops that can take their numbers as tensors; returns how many."""
    numbers = _Numbers()
    found = [node for node in program.graph.nodes if node.target in _FORMULAS and takes_number(node)]
    return sum(_rewrite(node, numbers) for node in found)


class _Numbers:
    """The tensors of numbers, each made once for a device, before its first reader."""

    def __init__(self) -> None:
        self._made: dict[tuple[fx.Node, torch.device], fx.Node] = {}

    def of(self, number: Any, reader: fx.Node, like: fx.Node | None = None) -> fx.Node:
        """``number`` as a tensor that promotes nothing in an op with a tensor such as ``like``, for ``reader``."""
        val: torch.Tensor = (like or reader).meta["val"]
        key = number, val.device
        if key not in self._made:
            options = {"dtype": torch.float64, "device": val.device}
            made = val.new_empty((), dtype=torch.float64)
            self._made[key] = insert_before(
                reader, aten.scalar_tensor.default, number, like=reader, kwargs=options, val=made
            )
        return self._made[key] if val.ndim else _cast(self._made[key], reader)


Formula = Callable[[fx.Node, _Numbers], fx.Node | None]  # a new node in the place of one; None if that has to stay


def _rewrite(node: fx.Node, numbers: _Numbers) -> bool:
    new = _FORMULAS[node.target](node, numbers)
    if new is None:
        return False
    replace(node, new, node.meta["val"])
    node.graph.erase_node(node)
    new.name = node.name
    return True


def _call(node: fx.Node, op: Any, *args: Any) -> fx.Node:
    """A step of a formula, in float32 or wider: of tensors as wide as the result."""
    return insert_before(node, op, *args, like=node, relation=Relation.STEP, name=f"{node.name}_by_tensors")


def _cast(tensor: fx.Node, reader: fx.Node) -> fx.Node:
    val: torch.Tensor = reader.meta["val"]
    if val.dtype is torch.float64:
        return tensor
    options, made = {"dtype": val.dtype}, val.new_empty(())
    return insert_before(reader, aten._to_copy.default, tensor, like=reader, kwargs=options, val=made)


def _keeps_dtype(node: fx.Node) -> bool:
    """Whether the tensors that an op reads have the dtype of its result, which is no integer."""
    dtype: torch.dtype = node.meta["val"].dtype
    read = {each.meta["val"].dtype for each in node.all_input_nodes if not is_number(each)}
    return read == {dtype} and (dtype.is_floating_point or dtype.is_complex)


def _is_exact(node: fx.Node) -> bool:
    return _keeps_dtype(node) and node.meta["val"].dtype in _EXACT


def _operands(op: Any) -> Formula:
    """The same op on tensors."""

    def formula(node: fx.Node, numbers: _Numbers) -> fx.Node | None:
        if node.kwargs or len(node.args) != 2 or not _keeps_dtype(node):
            return None
        return _call(node, op, *(numbers.of(each, node) if is_number(each) else each for each in node.args))

    return formula


def _sum(op: Any) -> Formula:
    """``a + alpha * b``, where ``alpha`` or ``b`` is a number of the call."""
    plain = _operands(op)

    def formula(node: fx.Node, numbers: _Numbers) -> fx.Node | None:
        alpha = node.kwargs.get("alpha")
        if not is_number(alpha):
            return plain(node, numbers)
        a, b = node.args
        if not _is_exact(node) or not isinstance(b, fx.Node) or is_number(b) or is_number(a):
            return None
        return _call(node, op, a, _call(node, aten.mul.Tensor, b, numbers.of(alpha, node, like=b)))

    return formula


def _lerp(node: fx.Node, numbers: _Numbers) -> fx.Node | None:
    """With the number as a tensor of the operands' dtype, which that op demands."""
    start, end, weight = node.args
    if not _is_exact(node) or not is_number(weight):
        return None
    tensor = numbers.of(weight, node)
    tensor = tensor if tensor.meta["val"].dtype is node.meta["val"].dtype else _cast(tensor, node)
    return _call(node, aten.lerp.Tensor, start, end, tensor)


def _of_products(combine: Any) -> Formula:
    """``a + value * (b * c)`` for addcmul, ``a + value * (b / c)`` for addcdiv."""

    def formula(node: fx.Node, numbers: _Numbers) -> fx.Node | None:
        value = argument(node, "value")
        if not _is_exact(node) or not is_number(value):
            return None
        a, b, c = node.args[:3]
        scaled = _call(node, aten.mul.Tensor, _call(node, combine, b, c), numbers.of(value, node))
        return _call(node, aten.add.Tensor, a, scaled)

    return formula


_FORMULAS: dict[Any, Formula] = {
    aten.mul.Tensor: _operands(aten.mul.Tensor),
    aten.mul.Scalar: _operands(aten.mul.Tensor),
    aten.div.Tensor: _operands(aten.div.Tensor),
    aten.div.Scalar: _operands(aten.div.Tensor),
    aten.add.Tensor: _sum(aten.add.Tensor),
    aten.add.Scalar: _operands(aten.add.Tensor),
    aten.sub.Tensor: _sum(aten.sub.Tensor),
    aten.sub.Scalar: _operands(aten.sub.Tensor),
    aten.pow.Tensor_Scalar: _operands(aten.pow.Tensor_Tensor),
    aten.pow.Scalar: _operands(aten.pow.Tensor_Tensor),
    aten.lerp.Scalar: _lerp,
    aten.addcmul.default: _of_products(aten.mul.Tensor),
    aten.addcdiv.default: _of_products(aten.div.Tensor),
}
