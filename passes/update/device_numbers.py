"""Read the numbers of a call from the device, so that a program that is captured and replayed reads new ones."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import fx

from .._torch import SYMBOLIC_FUNCTIONS, FakeTensor
from ..base import Numerics, Pass
from ..cleanup.dead_code import DeadCode
from ..ir.edit import insert_before, replace
from ..ir.ops import aten as aten_ops
from ..ir.program import Input, Program
from ..ir.roles import Role
from ..ir.schemas import is_tensor
from ..runtime.random import draw, is_drawn_by_position
from .optimizer_kernels import kernels

aten = torch.ops.aten

_LOW = {torch.bfloat16, torch.float16}
_KERNELS = {kernel.op: kernel.op_with_tensor for kernel in kernels()}


@dataclass(frozen=True)
class DeviceNumbers(Pass):
    """The floats of a call become one small input on the device, its ints another; ops read 0-dim views of them.

    ``names``: of hyper-parameters, other live numbers and the seed, as patterns, but those of ``on_host``. Floats are
    fp64 there, as in Python. Arithmetic on them follows to the device, and so does a value that the step reads from a
    tensor. An op with a number becomes one with a tensor, or several that compute the same; in low precision these
    compute in fp32 and round once. A number stays as it was where a tensor cannot stand for it: where the program
    returns it, as a size or an index, and in ops that are not in the table below. ``host_numbers`` names those: a
    program that was captured with their values is valid for these values only.
    """

    names: tuple[str, ...] = ("*",)
    on_host: tuple[str, ...] = ()
    numerics: ClassVar[Numerics] = "reassociates"

    def rewrite(self, program: Program) -> int:
        """Rewrite op by op; then erase the arithmetic of the host and the inputs that nobody reads any more."""
        pairs = zip(program.placeholders, program.inputs, strict=True)
        chosen = {node: each for node, each in pairs if _is_number(node) and self._names(each)}
        if not chosen:
            return 0
        edit = _Edit(program, chosen)
        edits = sum(map(edit.rewrite, list(program.graph.nodes)))
        DeadCode().rewrite(program)
        _drop_unread(program, chosen)
        return edits

    def _names(self, declared: Input) -> bool:
        is_live = declared.role in (Role.HYPER_PARAMETER, Role.SEED)
        here, there = (any(fnmatchcase(declared.name, each) for each in those) for those in (self.names, self.on_host))
        return is_live and here and not there


def host_numbers(program: Program) -> list[str]:
    """The names of the inputs that are numbers of the host."""
    pairs = zip(program.placeholders, program.inputs, strict=True)
    return [declared.name for node, declared in pairs if _is_number(node)]


def _add_input(program: Program, chosen: Mapping[fx.Node, Input], dtype: torch.dtype, like: torch.Tensor) -> fx.Node:
    """The input that holds numbers of one type, before the first of them."""
    kind = "floats" if dtype.is_floating_point else "ints"
    with program.graph.inserting_before(next(iter(chosen))):
        packed = program.graph.placeholder(kind)
    packed.meta["val"] = like.new_empty(len(chosen), dtype=dtype)
    numbers = tuple(declared.name for declared in chosen.values())
    role = Role.SEED if any(each.role is Role.SEED for each in chosen.values()) else Role.HYPER_PARAMETER
    whole = Input(role, f"{kind} of the call", (len(numbers),), dtype, numbers=numbers)
    program.inputs.insert(program.placeholders.index(packed), whole)
    return packed


def _drop_unread(program: Program, chosen: Mapping[fx.Node, Input]) -> None:
    """Erase the inputs of the host that nobody reads any more."""
    unread = {node for node in chosen if not node.users}
    pairs = zip(program.placeholders, program.inputs, strict=True)
    program.inputs = [declared for node, declared in pairs if node not in unread]
    for node in unread:
        program.graph.erase_node(node)


class _Edit:
    """Rewrites the ops of one program. ``tensors``: by number of the host, the tensor that stands for it."""

    def __init__(self, program: Program, chosen: Mapping[fx.Node, Input]) -> None:
        like: torch.Tensor = next(node.meta["val"] for node in program.graph.nodes if is_tensor(node))
        self.device, self.mode = like.device, like.fake_mode if isinstance(like, FakeTensor) else nullcontext()
        self.tensors: dict[fx.Node, fx.Node | None] = {}
        self.cast: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        begin = next(node for node in program.graph.nodes if node.op != "placeholder")
        for dtype in (torch.float64, torch.int64):
            those = {node: each for node, each in chosen.items() if _dtype(node.meta["val"]) is dtype}
            packed = _add_input(program, those, dtype, like) if those else None
            for k, node in enumerate(those):
                val = like.new_empty((), dtype=dtype)
                self.tensors[node] = insert_before(begin, aten.select.int, packed, 0, k, like=None, val=val)

    def rewrite(self, node: fx.Node) -> bool:
        """Let an op that gives tensors read tensors in the place of numbers, if it can."""
        if node.op == "call_function" and _is_number(node):
            self.tensor(node)  # in the graph's order, so that a cast stands before all that reads it
            return False
        if node.op != "call_function" or not any(map(self.tensor, node.all_input_nodes)):
            return False
        if node.target is draw:
            seed = self.tensor(node.args[1]) if is_drawn_by_position(node.args[0]) else None
            node.update_arg(1, seed or node.args[1])
            return seed is not None
        if node.target in _KERNELS:
            return self._rewrite_kernel(node, _KERNELS[node.target])
        formula, val = _FORMULAS.get(node.target), node.meta.get("val")
        operands = [each.meta["val"] for each in node.all_input_nodes if is_tensor(each)]
        here = isinstance(val, torch.Tensor) and {each.device for each in (val, *operands)} == {self.device}
        if formula is None or not here:
            return False
        replace(node, _Typed(self, node, operands).apply(formula), val)
        return True

    def _rewrite_kernel(self, node: fx.Node, op: Any) -> bool:
        """Let a kernel of an optimizer read its rate from the device: on an accelerator in fp32, if it computes so."""
        rate = self.tensor(node.kwargs["lr"])
        parameters: Any = node.args[0]
        is_fp32 = self.device.type != "cpu"
        if op is None or rate is None or (is_fp32 and parameters[0].meta["val"].dtype is torch.float64):
            return False
        node.target = op
        node.update_kwarg("lr", self.converted(rate, torch.float32, node) if is_fp32 else rate)
        return True

    def tensor(self, value: Any) -> fx.Node | None:
        """The tensor that stands for a number of the host; None if there is none."""
        if not isinstance(value, fx.Node) or not _is_number(value):
            return None
        if value not in self.tensors:
            self.tensors[value] = None if value.op == "placeholder" else self._computed(value)
        return self.tensors[value]

    def _computed(self, node: fx.Node) -> fx.Node | None:
        """The arithmetic of ``node`` on the device, if some operand is there."""
        to = _dtype(node.meta["val"])
        if node.target is aten._local_scalar_dense.default:
            source = node.all_input_nodes[0]
            return self.converted(source, to, node) if source.meta["val"].device == self.device else None
        formula = _FORMULAS.get(node.target)
        if formula is None or not any(map(self.tensor, node.all_input_nodes)):
            return None
        return _Typed(self, node, ()).apply(formula)

    def converted(self, tensor: fx.Node, dtype: torch.dtype, before: fx.Node) -> fx.Node:
        """``tensor`` in another dtype."""
        if tensor.meta["val"].dtype is dtype:
            return tensor
        if (tensor, dtype) not in self.cast:
            self.cast[tensor, dtype] = self.call(before, aten._to_copy.default, tensor, dtype=dtype)
        return self.cast[tensor, dtype]

    def call(self, before: fx.Node, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of ``op`` before a node, with its shape and dtype."""
        new = insert_before(before, op, *args, like=before, kwargs=kwargs)
        with self.mode:
            new.meta["val"] = op(*fx.map_arg(args, _present), **kwargs)
        return new


class _Typed:
    """Computes the formula of one node in the dtype in which torch computes it with Python numbers."""

    def __init__(self, edit: _Edit, node: fx.Node, operands: Sequence[torch.Tensor]) -> None:
        self.edit, self.node = edit, node
        val = node.meta["val"]
        self.result = val.dtype if isinstance(val, torch.Tensor) else _dtype(val)
        common = self.result
        if common is torch.bool:
            numbers = [each for each in node.args if not is_tensor(each) and _is_number(each)]
            common = torch.result_type(operands[0], _present(numbers[0]))
        rounds = self.result is torch.bool or node.target is aten.remainder.Scalar  # the number to the tensor's dtype
        self.dtype = torch.float32 if common in _LOW and not rounds else common
        self.shape = val.shape if isinstance(val, torch.Tensor) else None

    def apply(self, formula: Callable[..., Any]) -> fx.Node:
        """The result."""
        args, kwargs = fx.map_arg((self.node.args, dict(self.node.kwargs)), self._operand)
        return self.edit.converted(formula(self, *args, **kwargs), self.result, self.node)

    def _operand(self, value: fx.Node) -> Any:
        tensor = self.edit.tensor(value)
        if tensor is not None:
            return self._number(tensor)
        low = is_tensor(value) and value.meta["val"].dtype in _LOW and self.dtype not in _LOW
        return self.edit.converted(value, torch.float32, self.node) if low else value

    def _number(self, tensor: fx.Node) -> fx.Node:
        """A number as an operand: fp64 beside tensors of another floating dtype keeps theirs if these have dims."""
        whole = tensor.meta["val"].dtype is torch.int64 and self.dtype is not torch.float64
        keeps = self.shape and (self.dtype.is_floating_point or self.dtype.is_complex or whole)
        operands = [each.meta["val"].dtype for each in self.node.all_input_nodes if is_tensor(each)]
        keeps = keeps and all(dtype is self.dtype or dtype in _LOW for dtype in operands) and bool(operands)
        return tensor if keeps else self.edit.converted(tensor, self.dtype, self.node)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of ``op`` before the node."""
        return self.edit.call(self.node, op, *args, **kwargs)

    def full(self, value: Any) -> Any:
        """A tensor without dims in the place of a Python number."""
        if is_tensor(value):
            return self.edit.converted(value, self.dtype, self.node)
        return self.call(aten.full.default, [], value, dtype=self.dtype, device=self.edit.device)

    def add(self, x: Any, y: Any) -> fx.Node:
        """``x + y``; one of the two is a tensor, as in all that follow."""
        return self.call(aten.add.Tensor, *((x, y) if is_tensor(x) else (y, x)))

    def sub(self, x: Any, y: Any) -> fx.Node:
        """``x - y``."""
        return self.call(aten.sub.Tensor, x, y) if is_tensor(x) else self.call(aten.rsub.Scalar, y, x)

    def mul(self, x: Any, y: Any) -> Any:
        """``x * y``; ``x`` if ``y`` is a literal 1."""
        if type(y) is int and y == 1:
            return x
        return self.call(aten.mul.Tensor, *((x, y) if is_tensor(x) else (y, x)))

    def div(self, x: Any, y: Any) -> fx.Node:
        """``x / y``."""
        return self.call(aten.div.Tensor, x if is_tensor(x) else self.full(x), y)

    def pow(self, x: Any, y: Any) -> fx.Node:
        """``x ** y``."""
        if not is_tensor(y):
            return self.call(aten.pow.Tensor_Scalar, x, y)
        return self.call(aten.pow.Tensor_Tensor if is_tensor(x) else aten.pow.Scalar, x, y)


def _by(op: Any) -> Callable[..., fx.Node]:
    """The formula of an op whose operands are all tensors of one dtype."""
    return lambda typed, *operands: typed.call(op, *map(typed.full, operands))


def _filled(typed: _Typed, size: Sequence[int], value: Any, **_: Any) -> fx.Node:
    """A new tensor, filled with a number."""
    expanded = typed.call(aten.expand.default, typed.full(value), list(size))
    return typed.call(aten.clone.default, expanded, memory_format=torch.contiguous_format)


def _plain(typed: _Typed, x: Any) -> Any:
    return typed.full(x)


_FORMULAS: dict[Any, Callable[..., Any]] = {
    # Ops of tensors; the products are in the order of torch's kernels.
    aten.add.Tensor: lambda typed, x, y, alpha=1: typed.add(x, typed.mul(y, alpha)),
    aten.sub.Tensor: lambda typed, x, y, alpha=1: typed.sub(x, typed.mul(y, alpha)),
    aten.rsub.Scalar: lambda typed, x, y, alpha=1: typed.sub(y, typed.mul(x, alpha)),
    aten.addcmul.default: lambda typed, x, y, z, value=1: typed.add(x, typed.mul(typed.mul(y, value), z)),
    aten.addcdiv.default: lambda typed, x, y, z, value=1: typed.add(x, typed.div(typed.mul(y, value), z)),
    aten.lerp.Scalar: _by(aten.lerp.Tensor),
    **dict.fromkeys(aten_ops("mul.Tensor mul.Scalar"), _Typed.mul),
    **dict.fromkeys(aten_ops("div.Tensor div.Scalar"), _Typed.div),
    **dict.fromkeys(aten_ops("pow.Tensor_Scalar pow.Scalar"), _Typed.pow),
    **{getattr(aten, name).Scalar: _by(getattr(aten, name).Tensor) for name in "eq ne lt le gt ge remainder".split()},
    aten.clamp_min.default: _by(aten.clamp_min.Tensor),
    aten.clamp_max.default: _by(aten.clamp_max.Tensor),
    aten.full.default: _filled,
    # Arithmetic of Python, and torch's names for it on symbols.
    operator.add: _Typed.add,
    operator.sub: _Typed.sub,
    operator.mul: _Typed.mul,
    operator.truediv: _Typed.div,
    operator.pow: _Typed.pow,
    operator.neg: lambda typed, x: typed.call(aten.neg.default, x),
    operator.mod: _by(aten.remainder.Tensor),
    operator.floordiv: _by(aten.floor_divide.default),
    float: _plain,
    torch.sym_float: _plain,
    torch.sym_max: _by(aten.maximum.default),
    torch.sym_min: _by(aten.minimum.default),
    **{each: _by(aten.sqrt.default) for each in (math.sqrt, *SYMBOLIC_FUNCTIONS) if each.__name__.endswith("sqrt")},
}


def _is_number(node: Any) -> bool:
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(val, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(val, bool)


def _dtype(number: Any) -> torch.dtype:
    return torch.float64 if isinstance(number, (float, torch.SymFloat)) else torch.int64


def _present(node: Any) -> Any:
    """The value of a node as far as shapes and dtypes depend on it."""
    val = node.meta["val"]
    if is_tensor(node):
        return val
    return 0.5 if _dtype(val) is torch.float64 else 1
