"""A machine that runs a program on symbols: what moves elements is run by torch, what is pointwise is computed.

Memory is as the program plans it: an arena has an element for each byte, and who reads a value finds something else if
any byte of it was written to by another.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from passes import Program
from passes.ir.collectives import WAIT
from passes.ir.ops import PURE_FUNCTIONS, Trait, draws, has, lists_of, over_lists
from passes.ir.schemas import argument, schema
from passes.runtime.arena import reserve, view_at, whole
from passes.runtime.random import draw

from .._torch import OpOverload, tree_flatten, tree_map
from ..rules.pointwise import LINEAR
from . import symbols

aten = torch.ops.aten
_UNWRITTEN = symbols.key("memory without a value")
_TAIL = 40  # the bits of a mask that number the bytes of a value
_MOVES = """view _unsafe_view reshape t transpose permute unsqueeze squeeze expand slice select split split_with_sizes
split_with_sizes_copy unbind narrow cat stack clone detach alias contiguous repeat roll flip view_copy""".split()
_MEMORY = {"device", "layout", "pin_memory", "memory_format", "non_blocking", "implicit"}  # not what is computed


class Unknown(Exception):
    """A value that is not known from the operands alone."""


@cache
def functional(op: Any) -> Any:
    """The op that returns what ``op`` writes."""
    if not isinstance(op, OpOverload) or not schema(op).is_mutable or op.namespace != "aten":
        return op
    for name in dict.fromkeys((schema(op).name.removesuffix("_"), schema(op).name)):
        packet = getattr(torch.ops.aten, name, None)
        for other in () if packet is None else (getattr(packet, each) for each in packet.overloads()):
            if not schema(other).is_mutable and schema(other).typed == schema(op).typed:
                return other
    return op


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of elements in a value."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor) and leaf.dtype == torch.complex128]


def call_of(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The functional op that a node performs, its arguments, and keyword arguments without memory for results."""
    if node.target is draw:
        return node.args[0], tuple(node.args[4:]), dict(node.kwargs)
    op = functional(node.target)
    outs = {each.name for each in schema(node.target).arguments if each.is_out} if isinstance(op, OpOverload) else set()
    return op, node.args, {name: value for name, value in node.kwargs.items() if name not in outs}


def operands_of(node: fx.Node) -> tuple[Any, dict[str, Any]]:
    """Arguments and keyword arguments without the memory for results."""
    _, args, kwargs = call_of(node)
    return args, kwargs


class Machine:
    """One program, and the values of its nodes: tensors of elements, or symbols of numbers."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.env: dict[fx.Node, Any] = {}
        self.first: dict[fx.Node, Tensor] = {}  # the symbols of each node, as it was computed
        self.by_op: dict[Any, list[fx.Node]] = defaultdict(list)
        self.returned: tuple[Any, ...] = ()
        self._arenas: set[int] = set()
        self._unknowns = 0
        self._sorted: Tensor | None = None

    # Values.

    def input(self, name: str, node: fx.Node) -> Any:
        """Symbols for an input: of each element, or of the number that it is."""
        val, start = node.meta.get("val"), torch.tensor(symbols.key("input", name))
        return symbols.elements(symbols.numbered(start, val.shape)) if isinstance(val, Tensor) else start

    def start(self, given: Sequence[Any]) -> None:
        """Take the inputs."""
        self._given = iter(given)

    def unknown(self, shape: Sequence[int]) -> Tensor:
        """Elements that are equal to nothing else."""
        self._unknowns += 1
        return symbols.elements(symbols.numbered(torch.tensor(symbols.key("unknown", id(self), self._unknowns)), shape))

    def fresh(self, node: fx.Node) -> Any:
        """Memory for the result of a node."""
        return tree_map(lambda v: self.unknown(v.shape) if isinstance(v, Tensor) else v, node.meta["val"])

    def poison(self, tensors: Sequence[Tensor]) -> None:
        """Nothing of a value is left here."""
        for x in tensors:
            symbols.pieces(x)[0].fill_(_UNWRITTEN)

    def is_poisoned(self, found: Tensor) -> bool:
        """Whether something is among these symbols that is no value."""
        return bool((found == _UNWRITTEN).any())

    def value(self, tree: Any) -> Any:
        """The values of the nodes in an argument."""
        return fx.node.map_arg(tree, self.env.__getitem__)

    def knows(self, found: Tensor) -> Tensor:
        """Which symbols are those of an element of some value of this program."""
        if self._sorted is None:
            self._sorted = torch.cat([x.reshape(-1) for x in self.first.values()] + [torch.zeros(1, dtype=torch.int64)])
            self._sorted = self._sorted.unique()
        at = torch.searchsorted(self._sorted, found.contiguous()).clamp(max=len(self._sorted) - 1)
        return self._sorted[at] == found

    def operands(self, node: fx.Node) -> list[Tensor]:
        """The tensors that a node reads, in order."""
        nodes = [leaf for leaf in tree_flatten(operands_of(node))[0] if isinstance(leaf, fx.Node)]
        return [self.read(each) for each in nodes if isinstance(each.meta.get("val"), Tensor)]

    def settings(self, node: fx.Node, args: Any = None) -> list[Any]:
        """What a call gives beside tensors, as symbols; ``args``: instead of its own."""
        own, kwargs = operands_of(node)
        found = []
        names = schema(call_of(node)[0]).arguments
        for k, declared in enumerate(names):
            given = (
                (own if args is None or k >= len(args) else args)[k]
                if k < len(own)
                else kwargs.get(declared.name, declared.default)
            )
            if declared.name not in _MEMORY and not _is_tensor(given):
                found.append(tree_map(self._number, given) if not isinstance(given, fx.Node) else int(self.env[given]))
        return found

    def _number(self, given: Any) -> Any:
        if isinstance(given, fx.Node):
            return "tensor" if _is_tensor(given) else int(self.env[given])
        if hasattr(given, "shape"):
            return "tensor"
        return symbols.number(given) if isinstance(given, (int, float)) else given

    # Steps.

    def step(self, node: fx.Node) -> None:
        """Compute a node. Raises ``Unknown`` for an op that only its rule can tell of."""
        if node.op == "placeholder":
            self._keep(node, next(self._given))
        elif node.op == "output":
            self.returned = tuple(self.value(node.args[0]))
        elif node.op == "call_function":
            self._call(node)
        else:
            val = node.meta.get("val")
            start = torch.tensor(symbols.key("constant", node.target))
            self._keep(node, symbols.elements(symbols.numbered(start, val.shape)))

    def _call(self, node: fx.Node) -> None:
        target = node.target
        if target is reserve:
            size = node.args[0]
            memory = symbols.elements(torch.full((size,), _UNWRITTEN))  # type: ignore[arg-type]
            self._arenas.add(memory.untyped_storage().data_ptr())
            self.env[node] = memory
        elif target is view_at:
            arena, offset, shape, stride, dtype = self.value(node.args)
            self.env[node] = arena.as_strided(shape, [dtype.itemsize * step for step in stride], offset)
        elif target is whole or has(target, Trait.RETURNS_OPERAND) or target is WAIT:
            self._keep(node, self.env[node.args[0]])
        elif target is operator.getitem:
            self._keep(node, self.env[node.args[0]][node.args[1]])  # type: ignore[index]
        elif target is draw:
            raise Unknown("no random op of the captured program draws this part of it")
        elif has(target, Trait.PROFILING):
            self.env[node] = None
        elif not isinstance(target, OpOverload):
            self.env[node] = self._of_numbers(node)
        else:
            self._op(node, functional(target))

    def _of_numbers(self, node: fx.Node) -> Tensor:
        if node.target not in PURE_FUNCTIONS or node.kwargs or node.target is torch.ops.aten:
            raise Unknown(f"nothing is known of {node.target}")
        name = node.target.__name__  # type: ignore[union-attr]
        if any(isinstance(each, fx.Node) and _is_tensor(each) for each in node.args):
            raise Unknown(f"nothing is known of {name}")
        given = [self._symbol(each) for each in self.value(node.args)]
        return _function(name, torch.float64, given)

    def _symbol(self, given: Any) -> Tensor:
        if isinstance(given, Tensor):
            return symbols.pieces(given)[0] if given.dtype == torch.complex128 else given
        is_number = isinstance(given, (int, float))
        return torch.tensor(symbols.number(given) if is_number else symbols.key("setting", str(given)))

    def _op(self, node: fx.Node, op: OpOverload) -> None:
        name = schema(op).name
        self.by_op[op].append(node)
        self._check_val(node, op)
        if isinstance(node.meta["val"], Tensor) and node.target is op and has(op, Trait.VIEW) and name in _MOVES:
            args, kwargs = self.value((node.args, dict(node.kwargs)))
            return self._keep(node, op(*args, **kwargs))
        if op.namespace != "aten":
            raise Unknown(f"nothing is known of {op}")
        if name in _MOVES:
            return self._keep_moved(node, op)
        if op in _LISTED:
            return self._lists(node, op)
        if name in ("_fused_adam", "_fused_adamw"):
            return self._fused(node, name == "_fused_adamw")
        constant = self._constant(node, op)
        if constant is not None:
            return self.give(node, [constant])
        if has(op, Trait.POINTWISE) and not draws(op, node.args, node.kwargs) and isinstance(_val(node), Tensor):
            return self.give(node, [self._pointwise(node, op)])
        if name == "constant_pad_nd":
            x, pads, *value = self.args(node)
            return self.give(node, [_padded(x, pads, self._symbol(value[0] if value else 0))])
        self._by_operands(node, op)

    def draws(self, node: fx.Node) -> bool:
        """Whether a node draws numbers."""
        op, args, kwargs = call_of(node)
        return isinstance(op, OpOverload) and draws(op, args, kwargs)

    def _check_val(self, node: fx.Node, op: OpOverload) -> None:
        """Raise ``Unknown`` unless the result has the dtypes that the op gives, by the operands' own."""
        if (
            op.namespace != "aten"
            or node.target is not op
            or not _tensor_nodes(node)
            or _LISTED.get(op)
            or "fused" in str(op)
        ):
            return
        args, kwargs = fx.node.map_arg((node.args, {k: v for k, v in node.kwargs.items() if k != "device"}), _on_meta)
        given = op(*args, **kwargs)
        vals = [tree_flatten(each)[0] for each in (given, node.meta.get("val"))]
        if [_described(each) for each in vals[0]] != [_described(each) for each in vals[1]]:
            raise Unknown("its result is not of the dtype or the shape that its operands give")

    def args(self, node: fx.Node) -> list[Any]:
        """The values that a call gives by position, as they are read."""
        read = lambda each: self.read(each) if _is_tensor(each) else self.env[each]  # noqa: E731
        return list(fx.node.map_arg(node.args, read))

    def _keep_moved(self, node: fx.Node, op: OpOverload) -> None:
        args, kwargs = operands_of(node)
        is_view = has(op, Trait.VIEW) or op in (aten._unsafe_view.default, aten.reshape.default)
        read = (
            (lambda each: self.env[each])
            if is_view
            else (lambda each: self.read(each) if _is_tensor(each) else self.env[each])
        )
        args, kwargs = fx.node.map_arg((args, kwargs), read)
        kwargs = {name: value for name, value in kwargs.items() if name not in _MEMORY}
        result = op(*args, **kwargs)
        if node.target is op:
            return self._keep(node, result)
        self.give(node, list(result) if isinstance(result, (list, tuple)) else [result])

    def _constant(self, node: fx.Node, op: OpOverload) -> Tensor | None:
        val = _val(node)
        if not isinstance(val, Tensor) or not has(op, Trait.ZEROS, Trait.ONES, Trait.FULL):
            return None
        fill: Any = 0.0 if has(op, Trait.ZEROS) else 1.0
        if has(op, Trait.FULL):
            fill = argument(node, "fill_value")
            fill = self.env[fill] if isinstance(fill, fx.Node) else fill
        symbol = self._symbol(fill)
        if symbol.ndim:
            raise Unknown("it is filled with a tensor")
        exact = val.dtype == torch.float64 or (isinstance(fill, (int, float)) and fill in (0, 1))
        symbol = symbol if exact else symbols.hashed(symbols.key("_to_copy", str(val.dtype)), symbol)
        return symbols.elements(symbol.expand(tuple(val.shape)))

    def _pointwise(self, node: fx.Node, op: OpOverload) -> Tensor:
        given = self._given_to(node, op)
        val = _val(node)
        tensors = {name: x for name, x in given.items() if isinstance(x, Tensor) and x.dtype == torch.complex128}
        if schema(op).name == "copy":
            del tensors["self"]  # what is there is not read
        dtypes = [each.meta["val"].dtype for each in _tensor_nodes(node)]
        name = schema(op).name
        masks = _linear(op, tensors)
        if name in ("_to_copy", "copy"):
            source = given["src"] if name == "copy" else given["self"]
            which = argument(node, "src" if name == "copy" else "self")
            found = _cast(symbols.pieces(source)[0], which.meta["val"].dtype, val.dtype)
            return symbols.elements(found.expand(tuple(val.shape)), masks)
        settings = {k: v for k, v in given.items() if k not in _MEMORY and v is not None}
        found = _function(
            name, val.dtype, [self._symbol(v) for v in settings.values()], list(settings), _ranked(dtypes)
        )
        return symbols.elements(found.expand(tuple(val.shape)), masks)

    def _given_to(self, node: fx.Node, op: OpOverload) -> dict[str, Any]:
        """What a call gives, by name, without what it need not say."""
        args, kwargs = operands_of(node)
        found = {}
        for k, declared in enumerate(schema(op).arguments):
            given = args[k] if k < len(args) else kwargs.get(declared.name)
            if given is None or (
                declared.default is not None and not isinstance(given, fx.Node) and given == declared.default
            ):
                continue
            value = self.read(given) if _is_tensor(given) else self.value(given)
            found[declared.name] = value
        return found

    def _lists(self, node: fx.Node, op: OpOverload) -> None:
        base = _LISTED[op]
        given = self._given_lists(node, op)
        count = max(len(x) for x in given.values() if isinstance(x, list))
        first = next(iter(node.args[0]))  # type: ignore[union-attr, arg-type]
        results = []
        for k in range(count):
            one = {name: (x[k] if isinstance(x, list) else x) for name, x in given.items()}
            tensors = {name: x for name, x in one.items() if isinstance(x, Tensor) and x.dtype == torch.complex128}
            tensors = dict(zip([a.name for a in schema(base).arguments], tensors.values(), strict=False))
            names = [{"scalar": "other"}.get(name, name) for name in one]
            dtype = first.meta["val"].dtype
            found = _function(schema(base).name, dtype, [self._symbol(v) for v in one.values()], names, dtype)
            results.append(symbols.elements(found, _linear(base, tensors)))
        self.give(node, results)

    def _given_lists(self, node: fx.Node, op: OpOverload) -> dict[str, Any]:
        args, kwargs = operands_of(node)
        found: dict[str, Any] = {}
        for k, declared in enumerate(schema(op).arguments):
            given = args[k] if k < len(args) else kwargs.get(declared.name)
            if given is None or (declared.default is not None and given == declared.default):
                continue
            is_list = isinstance(given, (list, tuple))
            found[declared.name] = [self.read(x) for x in given] if is_list else self.value(given)
        return found

    def _fused(self, node: fx.Node, decoupled: bool) -> None:
        lists = [list(map(self.read, each)) for each in node.args]  # type: ignore[arg-type]
        settings = {k: v for k, v in node.kwargs.items() if k not in ("grad_scale", "found_inf")}
        if settings.pop("amsgrad") or any(node.kwargs.get(k) is not None for k in ("grad_scale", "found_inf")):
            raise Unknown("amsgrad and scaled gradients are not described")
        given = {name: self._symbol(self.value(value)) for name, value in settings.items()}
        dtypes = [each.meta["val"].dtype for each in node.args[0]], [each.meta["val"].dtype for each in node.args[5]]  # type: ignore
        results: list[list[Tensor]] = [[], [], [], [], []]
        for k, (param, grad, avg, square, step) in enumerate(zip(*lists[:4], lists[5], strict=True)):
            values = [symbols.pieces(x) for x in (param, grad, avg, square, step)]
            if any(bool(mask.any()) for _, mask in values):
                raise Unknown("it reads a sum that is pending")
            counted = _cast(values[4][0], dtypes[1][k], dtypes[0][k])
            new = symbols.fused_adam(*(x for x, _ in values[:4]), counted, given, decoupled)
            for into, x in zip((results[0], results[2], results[3]), new, strict=True):
                into.append(symbols.elements(x))
        if not schema(node.target).is_mutable:  # type: ignore[arg-type]
            results[1] = [self.unknown(x.shape) for x in lists[1]]
            self.env[node] = results
            return
        for nodes, values in zip(node.args, results, strict=False):
            for each, x in zip(nodes, values, strict=False):  # type: ignore[arg-type]
                self.write(self.env[each], x, each)
        self.env[node] = None

    def _by_operands(self, node: fx.Node, op: OpOverload) -> None:
        """An op on whole operands, of which nothing is known but that it is a function."""
        if self.program.mesh.size > 1 and not self.is_captured:
            raise Unknown("no node of the captured program computes it on operands of which these are parts")
        if not has(op, Trait.PURE) and not draws(op, node.args, node.kwargs):
            raise Unknown(f"nothing is known of {op}")
        self.give(node, self._function_of(node, op))

    is_captured = False

    def _function_of(self, node: fx.Node, op: OpOverload) -> list[Any]:
        drawn = node.meta.get("draw", node.name) if draws(op, node.args, node.kwargs) else None
        operands = [symbols.digest(symbols.pieces(x)[0]) for x in self.operands(node)]
        start = symbols.hashed(symbols.key(str(op), self.settings(node), drawn), *operands)
        vals = node.meta["val"]
        vals = vals if isinstance(vals, (list, tuple)) else [vals]
        return [
            symbols.elements(symbols.numbered(symbols.hashed(k, start), val.shape)) if isinstance(val, Tensor) else None
            for k, val in enumerate(vals)
        ]

    # Memory.

    def give(self, node: fx.Node, results: list[Any]) -> None:
        """Let a node have these results: in the memory that it writes to, or in fresh memory."""
        target = node.target
        if isinstance(target, OpOverload) and schema(target).is_mutable:
            written = [argument(node, each.name) for each in schema(target).arguments if each.written]
            nodes = [leaf for leaf in tree_flatten(written)[0] if isinstance(leaf, fx.Node)]
            for into, new in zip(nodes, results, strict=True):
                self.write(self.env[into], self.unknown(into.meta["val"].shape) if new is None else new, into)
            values = [self.env[each] for each in nodes]
        else:
            vals = node.meta["val"]
            vals = vals if isinstance(vals, (list, tuple)) else [vals]
            values = [
                x if x is None else torch.empty_strided(x.shape, val.stride(), dtype=x.dtype).copy_(x)
                for x, val in zip(results, vals, strict=True)
            ]
        several = isinstance(node.meta.get("val"), (list, tuple)) or len(values) > 1
        self._keep(node, values if several else values[0])

    def give_unknown(self, node: fx.Node) -> None:
        """Nothing is known of the results."""
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            self.env[node] = tree_map(lambda v: self.unknown(v.shape) if isinstance(v, Tensor) else v, node.meta["val"])
            return
        if schema(node.target).is_mutable:
            written = [argument(node, each.name) for each in schema(node.target).arguments if each.written]
            nodes = [leaf for leaf in tree_flatten(written)[0] if isinstance(leaf, fx.Node)]
            return self.give(node, [self.unknown(each.meta["val"].shape) for each in nodes])
        results = self.fresh(node)
        self.give(node, list(results) if isinstance(results, (list, tuple)) else [results])

    def write(self, into: Tensor, new: Tensor, node: fx.Node) -> None:
        """Write elements; in an arena, to each byte of them."""
        if into.shape != new.shape:
            raise Unknown(f"it writes {tuple(new.shape)} into {tuple(into.shape)}")
        new = new.clone()
        into.copy_(new)
        if into.untyped_storage().data_ptr() in self._arenas:
            found, masks = symbols.pieces(new)
            for k in range(1, _itemsize(node)):
                into.as_strided(into.shape, into.stride(), into.storage_offset() + k).copy_(
                    symbols.elements(found, masks | k << _TAIL)
                )

    def read(self, node: fx.Node) -> Tensor:
        """The value of a node; something else where bytes of it were written to by another."""
        x: Tensor = self.env[node]
        if x.untyped_storage().data_ptr() not in self._arenas:
            return x
        found, masks = (each.clone() for each in symbols.pieces(x))
        for k in range(1, _itemsize(node)):
            tail = symbols.pieces(x.as_strided(x.shape, x.stride(), x.storage_offset() + k))
            found[(tail[0] != found) | (tail[1] != (masks | k << _TAIL))] = _UNWRITTEN
        return symbols.elements(found, masks)

    def _keep(self, node: fx.Node, value: Any) -> None:
        self.env[node] = value
        if isinstance(value, Tensor) and value.dtype == torch.complex128:
            self.first[node] = symbols.pieces(value)[0].clone()


class CapturedMachine(Machine):
    """The captured program: its ops are what the final ones are compared with."""

    is_captured = True


_LISTED = {listed: base for base in lists_of() for listed in over_lists(base) if listed is not None}


def _on_meta(node: fx.Node) -> Any:
    val = node.meta.get("val")
    if isinstance(val, Tensor):
        return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device="meta")
    return 1.0 if val is None else val


def _described(x: Any) -> Any:
    return (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else None


def _itemsize(node: fx.Node) -> int:
    val = node.meta["val"]
    return int((val[0] if isinstance(val, (list, tuple)) else val).dtype.itemsize)


def _val(node: fx.Node) -> Any:
    """What a node computes, as a fake value."""
    return node.meta.get("val")


def _is_tensor(given: Any) -> bool:
    return isinstance(given, fx.Node) and isinstance(given.meta.get("val"), Tensor)


def _tensor_nodes(node: fx.Node) -> list[fx.Node]:
    return [leaf for leaf in tree_flatten(operands_of(node))[0] if _is_tensor(leaf)]


def _ranked(dtypes: list[torch.dtype]) -> torch.dtype:
    found = dtypes[0]
    for each in dtypes[1:]:
        found = torch.promote_types(found, each)
    return found


def _cast(found: Tensor, source: torch.dtype, to: torch.dtype) -> Tensor:
    return found if source == to else symbols.hashed(symbols.key("_to_copy", str(to)), found)


def _function(
    name: str, dtype: torch.dtype, given: list[Tensor], names: list[str] | None = None, of: Any = None
) -> Tensor:
    """A function of symbols, element by element: computed in the field if it can be, else a hash."""
    arithmetic: Callable[..., Tensor] | None = symbols.ARITHMETIC.get(name)
    plain = dtype.is_floating_point or (name in ("add", "sub", "rsub", "mul", "neg") and dtype is not torch.bool)
    if arithmetic is not None and plain and not {"rounding_mode"} & set(names or ()):
        extra = {n: v for n, v in zip(names or (), given, strict=False) if n in ("alpha", "value")}
        rest = [v for n, v in zip(names or [""] * len(given), given, strict=True) if n not in extra]
        found = arithmetic(*rest, **extra)
        return (
            found
            if of is None or of == dtype or not of.is_floating_point
            else symbols.hashed(symbols.key("_to_copy", str(dtype)), found)
        )
    settings = [n for n in names or () if n in ("alpha", "value", "rounding_mode", "approximate")]
    return symbols.hashed(symbols.key(name, str(dtype), len(given), settings), *torch.broadcast_tensors(*given))


def _linear(op: OpOverload, tensors: dict[str, Tensor]) -> Any:
    """The mask of a pointwise result. Raises ``Unknown`` unless the op is linear in what is pending."""
    masks = {name: symbols.pieces(x)[1] for name, x in tensors.items()}
    pending = {name for name, mask in masks.items() if bool(mask.any())}
    if not pending:
        return 0
    for names in LINEAR.get(op, ()):
        if pending <= set(names) <= set(tensors):
            first, *others = torch.broadcast_tensors(*(masks[name] for name in names))
            if all(torch.equal(first, other) for other in others):
                return first
    raise Unknown("it reads a sum that is still pending, in which it is not linear")


def _padded(x: Tensor, pads: Sequence[int], fill: Tensor) -> Tensor:
    found, masks = symbols.pieces(x)
    inside = aten.constant_pad_nd(torch.ones(x.shape, dtype=torch.int64), pads, 0).bool()
    padded = torch.where(inside, aten.constant_pad_nd(found.contiguous(), pads, 0), fill)
    return symbols.elements(padded, aten.constant_pad_nd(masks.contiguous(), pads, 0))
