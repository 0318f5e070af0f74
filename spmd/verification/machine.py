"""A machine that runs one program on symbols: what moves elements is run by torch, what is pointwise is computed.

Memory is as the program plans it: an arena has an element for each byte, and who reads a value finds something else if
any byte of it was written to by another. Dtypes are derived: each element is marked with its own.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx

from passes import Program
from passes.ir.collectives import WAIT
from passes.ir.ops import PURE_FUNCTIONS, Trait, draws, has
from passes.ir.schemas import argument, schema
from passes.runtime.arena import reserve, view_at, whole
from passes.runtime.random import draw

from .._torch import OpOverload, tree_flatten, tree_map
from . import symbolic_ops, symbols
from .symbolic import addends, known_numbers
from .symbolic.sums_of_runs import ADDS, Run
from .symbolic_ops import Unknown, call_of, functional, is_tensor

_NOT_COMPUTED = {"device", "layout", "pin_memory", "memory_format", "non_blocking", "implicit"}


class Machine:
    """One program, and the values of its nodes: tensors of elements, or symbols of numbers."""

    def __init__(self, program: Program, captured: CapturedMachine | None = None, run: Run | None = None) -> None:
        """``run``: the part of the batch, if the program runs for several."""
        self.program, self._captured, self.run = program, captured, run
        self.mesh = program.mesh if run is None else run.mesh(program.mesh)
        self.env: dict[fx.Node, Any] = {}
        self.first: dict[fx.Node, Tensor] = {}  # the symbols of each node, as it was computed
        self.by_op: dict[Any, list[fx.Node]] = defaultdict(list)
        self.returned: tuple[Any, ...] = ()
        self._lies_in: dict[fx.Node, Any] = {}  # the dtypes of values in planned memory
        self._arenas: set[int] = set()
        self._unknowns = 0
        self._sizes = [*(axis.size for axis in self.mesh.axes), 1]  # the last one that of sums over runs
        self.routes: bool = captured is not None and captured.routes  # whether numbers are known

    # Values.

    def start(self, given: Iterable[Any]) -> None:
        """Take the inputs."""
        self._given = iter(given)

    def unknown(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Elements that are equal to nothing else."""
        self._unknowns += 1
        start = torch.tensor(symbols.key("unknown", id(self), self._unknowns))
        return symbols.elements(symbols.numbered(start, shape), symbols.mark_of(dtype) | symbols.UNKNOWN)

    def fresh(self, node: fx.Node, like: Any) -> Any:
        """Memory for the result of a collective, of the dtypes of its operands."""
        vals, operands = node.meta["val"], symbols.tensors_of(like)
        made = [
            self.unknown(val.shape, symbols.dtype_of(x) or val.dtype)
            for val, x in zip(vals if isinstance(vals, (list, tuple)) else [vals], operands, strict=True)
        ]
        return made if isinstance(vals, (list, tuple)) else made[0]

    def poison(self, tensors: Sequence[Tensor]) -> None:
        """Nothing of a value is left here."""
        for x in tensors:
            found, marks = symbols.pieces(x)
            found.fill_(symbols.UNWRITTEN)
            marks.bitwise_and_(~symbols.DOUBT)

    def is_poisoned(self, x: Tensor) -> bool:
        """Whether some element is no value."""
        return bool((symbols.pieces(x)[0] == symbols.UNWRITTEN).any())

    def value(self, tree: Any) -> Any:
        """The values of the nodes in an argument."""
        return fx.node.map_arg(tree, self.env.__getitem__)

    def operands(self, node: fx.Node) -> list[Tensor]:
        """The tensors that a node reads, in order."""
        leaves = tree_flatten(call_of(node)[1:])[0]
        return [self.read(each) for each in leaves if is_tensor(each)]

    def settings(self, node: fx.Node, args: Any = None) -> list[Any]:
        """The numbers of a call beside tensors, as symbols; ``args``: instead of its own."""
        op, own, kwargs = call_of(node)
        found = []
        for k, declared in enumerate(schema(op).arguments):
            given = kwargs.get(declared.name, declared.default)
            if k < len(own):
                given = own[k] if args is None or k >= len(args) else args[k]
            if declared.name not in _NOT_COMPUTED and not (is_tensor(given) or hasattr(given, "shape")):
                found.append(tree_map(self._number, given))
        return found

    def _number(self, given: Any) -> Any:
        if is_tensor(given) or hasattr(given, "shape"):
            return "tensor"
        if isinstance(given, fx.Node):
            value = self.env[given]
            return object() if value is None else int(value)  # what is not known is equal to nothing
        return symbols.number(given) if isinstance(given, (int, float)) else given

    # Steps.

    def step(self, node: fx.Node) -> None:
        """Compute a node. Raises ``Unknown`` for an op that only its rule describes."""
        try:
            self._compute(node)
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:  # it is not for symbols
            raise Unknown(f"{type(error).__name__}: {error}") from error

    def _compute(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._keep(node, next(self._given))
        elif node.op == "output":
            self.returned = tuple(self.read_all(node.args[0]))
        elif node.op == "call_function":
            self._call(node)
        else:
            constant = reduce(getattr, str(node.target).split("."), self.program.graph_module)
            self._keep(node, symbols.of_values(constant) if isinstance(constant, Tensor) else constant)

    def read_all(self, tree: Any) -> Any:
        """The values of the nodes in an argument, as they are read."""
        return fx.node.map_arg(tree, self.read)

    def _call(self, node: fx.Node) -> None:
        target = node.target
        if target is reserve:
            memory = symbols.elements(torch.full((node.args[0],), symbols.UNWRITTEN), 0)  # type: ignore[arg-type]
            self._arenas.add(memory.untyped_storage().data_ptr())
            self.env[node] = memory
        elif target is view_at:
            arena, offset, shape, stride, dtype = self.value(node.args)
            self._keep(node, arena.as_strided(shape, [dtype.itemsize * step for step in stride], offset), dtype)
            self.first.pop(node)  # nothing was computed
        elif target is whole or has(target, Trait.RETURNS_OPERAND) or target is WAIT:
            self._keep(node, self.env[node.args[0]], self._lies_in.get(node.args[0]))  # type: ignore[index, arg-type]
        elif target is operator.getitem:
            of, k = node.args
            dtypes = self._lies_in.get(of)  # type: ignore[arg-type]
            self._keep(node, self.env[of][k], dtypes[k] if isinstance(dtypes, list) else dtypes)  # type: ignore[index]
        elif target is draw:
            raise Unknown("no random op of the captured program draws this part of it")
        elif has(target, Trait.PROFILING):
            self.env[node] = None
        elif isinstance(target, OpOverload):
            self._op(node, functional(target))
        else:
            self.env[node] = self._of_numbers(node)

    def _of_numbers(self, node: fx.Node) -> Any:
        if node.target not in PURE_FUNCTIONS or node.kwargs or any(map(is_tensor, node.args)):
            raise Unknown(f"nothing is known of {node.target}")
        values = self.value(node.args)
        if all(isinstance(each, int) for each in values):  # where the rows of a run begin
            return node.target(*values)
        given = [symbols.symbol(each) for each in values]
        return symbolic_ops.function(node.target.__name__, torch.float64, given)

    def _op(self, node: fx.Node, op: OpOverload) -> None:
        self.by_op[op].append(node)
        if symbolic_ops.is_view(op) and node.target is op:
            self._check_numbers(node)
            return self._keep(node, op(*self.value(node.args), **self.value(dict(node.kwargs))), self._source(node))
        if self.routes and self._by_known_numbers(node, op):
            return None
        if self.run is not None and op in ADDS:
            _, args, kwargs = call_of(node)
            summed = self.run.added(op, *self.read_all((args, kwargs)))
            if summed is not None:
                return self.give(node, summed)
        computed = symbolic_ops.computed(op)
        if computed is not None:
            self._check_numbers(node, computed is symbolic_ops.moved)
            _, args, kwargs = call_of(node)
            args, kwargs = self.read_all((args, kwargs))
            results = computed(self._sizes, op, *args, **kwargs)
            self._doubt(symbolic_ops.hashed(op, results, args, kwargs))
            return self.give(node, results)
        self._by_operands(node, op)

    def _by_known_numbers(self, node: fx.Node, op: OpOverload) -> bool:
        """Compute an op by known numbers, if it is one; raises ``Unknown`` with what a rule may know as a summand."""
        if not all(map(is_tensor, node.all_input_nodes)):
            return False
        _, args, kwargs = call_of(node)
        args, kwargs = self.read_all((args, kwargs))
        results = known_numbers.by_numbers(op, args, kwargs) or known_numbers.in_field(op, args, kwargs)
        if results is None:
            return False
        if self._captured is not None and known_numbers.adds(op):
            raise Unknown("it is no value of the captured program", results=results)
        self.give(node, results)
        return True

    def _doubt(self, hashed: Sequence[Tensor]) -> None:
        """Mark what may be equal to something else by an identity between functions that are hashes here."""
        for x in hashed if self._captured is not None and not self.routes else ():
            found, marks = symbols.pieces(x)
            strange = ~self._captured.has(found)  # type: ignore[union-attr]
            marks[strange & (found != symbols.UNWRITTEN)] |= symbols.UNKNOWN

    def _check_numbers(self, node: fx.Node, moves: bool = True) -> None:
        """Raise ``Unknown`` for a number that is computed where elements are moved by it; one of the run is known."""
        if moves and not all(is_tensor(each) or isinstance(self.env[each], int) for each in node.all_input_nodes):
            raise Unknown("it moves elements by a number that is computed")

    def _source(self, node: fx.Node) -> Any:
        return self._lies_in.get(next(iter(node.all_input_nodes)))

    def draws(self, node: fx.Node) -> bool:
        """Whether a node draws numbers."""
        op, args, kwargs = call_of(node)
        return isinstance(op, OpOverload) and draws(op, args, kwargs)

    def _by_operands(self, node: fx.Node, op: OpOverload) -> None:
        raise Unknown(f"no call of {op} in the captured program has operands of which these are parts")

    # Memory.

    def give(self, node: fx.Node, results: Sequence[Any]) -> None:
        """Let a node have these results: in the memory that it writes to, or in fresh memory."""
        val, into = node.meta.get("val"), written_by(node)
        results = self._completed(list(results))
        if into:
            for each, new in zip(into, tree_flatten(list(results))[0], strict=False):
                x, dtype = self.env[each], self._lies_in.get(each)
                self._write(x, self.unknown(x.shape, self._dtype(x, dtype)) if new is None else new, dtype)
            values: list[Any] = [self.env[each] for each in into]
            dtypes: list[Any] = [self._lies_in.get(each) for each in into]
        else:
            vals = val if isinstance(val, (list, tuple)) else [val]
            values = [self._laid_out(x, v) for x, v in zip(results, vals, strict=True)]
            dtypes = [None] * len(values)
        several = isinstance(val, (list, tuple)) or len(values) != 1
        self._keep(node, values if several else values[0], dtypes if several else dtypes[0])

    def _completed(self, values: Any) -> Any:
        """Values of which sums are what they are once all ranks' addends are in them, and those of all runs."""
        captured, run = self._captured, self.run
        if captured is None:
            return values

        def complete(x: Any) -> Any:
            if not symbols.tensors_of(x):
                return x
            x = addends.completed(x, captured.has)
            return x if run is None else run.shares.completed(x, captured.symbols)

        return tree_map(complete, values)

    def _laid_out(self, x: Any, val: Any) -> Any:
        """A result with the strides that it has in the program."""
        if isinstance(x, list):
            return [self._laid_out(one, v) for one, v in zip(x, val, strict=True)]
        if not isinstance(val, Tensor):
            return x
        if x is None:
            return self.unknown(val.shape, val.dtype)
        marks = symbols.pieces(x)[1]
        marks[marks >> 32 == 0] |= symbols.mark_of(val.dtype)  # what was made of an empty tensor
        if tuple(x.shape) != tuple(val.shape):
            return x
        return torch.empty_strided(x.shape, val.stride(), dtype=x.dtype).copy_(x)

    def give_unknown(self, node: fx.Node) -> None:
        """Nothing is known of the results."""
        into = written_by(node)
        if into:
            return self.give(node, [None for _ in into])
        self.env[node] = tree_map(
            lambda v: self.unknown(v.shape, v.dtype) if isinstance(v, Tensor) else v, node.meta.get("val")
        )

    def keep_result(self, node: fx.Node, result: Any, out: Any) -> None:
        """Let a collective have this result, in the memory of the nodes ``out``."""
        found = fx.node.map_arg(out, lambda each: self._lies_in.get(each))
        self._keep(node, result, found)
        self.first.pop(node, None)  # it is there once it was waited for

    def write_result(self, node: fx.Node, into: Any, value: Any) -> None:
        """Write what a collective gives; None: nothing is known of it."""
        into, dtypes, value = symbols.tensors_of(into), self._lies_in.get(node), self._completed(value)
        dtypes = dtypes if isinstance(dtypes, list) else [dtypes] * len(into)
        news = [None] * len(into) if value is None else symbols.tensors_of(value)
        for x, new, dtype in zip(into, news, dtypes, strict=True):
            new = self.unknown(x.shape, self._dtype(x, dtype)) if new is None else new.reshape(x.shape)
            self._write(x, new, dtype)

    def _dtype(self, into: Tensor, planned: torch.dtype | None) -> torch.dtype:
        """The dtype of memory, which is planned or holds a value."""
        found = planned or symbols.dtype_of(into)
        if found is None and into.numel():
            raise Unknown("its memory holds values of several dtypes")
        return found or torch.get_default_dtype()

    def _write(self, into: Tensor, new: Tensor, planned: torch.dtype | None) -> None:
        """Write elements, in the dtype of the memory; in an arena, to each byte of them."""
        dtype = self._dtype(into, planned)
        if into.shape != new.shape:
            raise Unknown(f"it writes {tuple(new.shape)} into {tuple(into.shape)}")
        cast = symbols.with_dtype(new, dtype)
        before = symbols.dtype_of(new)
        if before != dtype and not symbols.only_rounds(dtype, before):
            self._doubt([cast])
        into.copy_(cast)
        if planned is not None:
            found, marks = symbols.pieces(into.clone())
            for k in range(1, dtype.itemsize):
                _byte(into, k).copy_(symbols.elements(found, marks | symbols.byte(k)))

    def read(self, node: fx.Node) -> Any:
        """The value of a node; something else where bytes of it were written to by another, or in another dtype."""
        x = self.env[node]
        if node not in self._lies_in or not isinstance(x, Tensor):
            return x
        dtype = self._lies_in[node]
        found, marks = (each.clone() for each in symbols.pieces(x))
        flags = symbols.DOUBT | symbols.PENDING | symbols.LOGARITHM
        lost = (marks & ~flags) != symbols.mark_of(dtype)
        for k in range(1, dtype.itemsize):
            tail = symbols.pieces(_byte(x, k))
            lost |= (tail[0] != found) | (tail[1] != (marks | symbols.byte(k)))
        found[lost], marks[lost] = symbols.UNWRITTEN, symbols.mark_of(dtype)
        return symbols.elements(found, marks)

    def _keep(self, node: fx.Node, value: Any, dtype: Any = None) -> None:
        self.env[node] = value
        leaves = symbols.tensors_of(value)
        if dtype is not None and leaves and all(x.untyped_storage().data_ptr() in self._arenas for x in leaves):
            self._lies_in[node] = dtype
        if isinstance(value, Tensor) and value.dtype == torch.complex128:
            self.first[node] = symbols.pieces(self.read(node))[0].clone()


class CapturedMachine(Machine):
    """The captured program: its ops are what the final ones are compared with."""

    def __init__(self, program: Program, numbers: Mapping[str, Tensor] | None = None) -> None:
        """``numbers``: the values of arguments, by name; numbers are known then, and ops by them are computed."""
        super().__init__(program)
        self.routes, self._numbers = numbers is not None, numbers or {}
        pairs = zip(program.inputs, program.placeholders, strict=True)
        self.start([self._input(declared.name, node.meta.get("val")) for declared, node in pairs])
        for node in program.graph.nodes:
            try:
                self.step(node)
            except Unknown:
                self._by_operands(node, node.target)
        found = torch.cat([*(x.reshape(-1) for x in self.first.values()), torch.zeros(1, dtype=torch.int64)])
        self.symbols = found.unique()  # of all elements, in order

    def _input(self, name: str, val: Any) -> Any:
        """Symbols for an input: of each element, or of the number that it is."""
        start = torch.tensor(symbols.key("input", name))
        if not isinstance(val, Tensor):
            return start
        if name in self._numbers and not val.is_floating_point():
            return symbols.of_values(self._numbers[name])
        return symbols.elements(symbols.numbered(start, val.shape), symbols.mark_of(val.dtype))

    def values_of(self, symbol: int) -> Iterator[Tensor]:
        """The symbols of each value that has this one, in the order of the program."""
        for found in self.first.values():
            if bool((found == symbol).any()):
                yield found

    def knows(self, x: Tensor) -> bool:
        """Whether all elements are some of values of this program."""
        return bool(self.has(symbols.pieces(x)[0]).all())

    def has(self, found: Tensor) -> Tensor:
        """Mask of the symbols that are those of an element of some value of this program."""
        at = torch.searchsorted(self.symbols, found.contiguous()).clamp(max=len(self.symbols) - 1)
        return torch.eq(self.symbols[at], found)

    def _by_operands(self, node: fx.Node, op: Any) -> None:
        """An op of which nothing is known but that it is a function: its results are hashes of its operands."""
        drawn = node.meta.get("draw", node.name) if self.draws(node) else None
        operands = [symbols.digest(symbols.pieces(x)[0]) for x in self.operands(node)]
        settings = self.settings(node) if isinstance(op, OpOverload) else node.name
        start = symbols.hashed(symbols.key(str(op), settings, drawn), *operands)
        if self.routes and isinstance(op, OpOverload):
            chosen = known_numbers.chosen(op, start, *self.read_all(call_of(node)[1:]))
            if chosen is not None:
                return self.give(node, chosen)
        vals = node.meta["val"]
        results = [
            symbols.elements(symbols.numbered(symbols.hashed(k, start), val.shape), symbols.mark_of(val.dtype))
            if isinstance(val, Tensor)
            else (None if isinstance(vals, (list, tuple)) else symbols.hashed(k, start))
            for k, val in enumerate(vals if isinstance(vals, (list, tuple)) else [vals])
        ]
        self.give(node, results)


def written_by(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory a call writes to."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload) or not schema(target).is_mutable:
        return []
    written = [argument(node, each.name) for each in schema(target).arguments if each.written]
    return [leaf for leaf in tree_flatten(written)[0] if isinstance(leaf, fx.Node)]


def _byte(x: Tensor, k: int) -> Tensor:
    return x.as_strided(x.shape, x.stride(), x.storage_offset() + k)
