"""Assignments: for each node of the global program, the placements in which it is computed, and moves before and after.

A solver makes an assignment, and ``partition_program.py`` writes what it says: it can be printed, read back, compared,
changed for one node and handed over again (``spmd.partition(program, plan, assignment)``). Its text is Python calls,
one a line, with placements as in torch's own notation::

    assignment("dp", "tp", whole=True)
    node("mm", reads=[(S(0), R), (R, S(1))], gives=[(S(0), S(1))])
    output("result loss", (R, R))

In a whole assignment what is left out is empty; in another one it is left to the solver.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from passes import PartitionError
from passes.ir.program import Placements

from ..placements import ByGroup, Dealt, Interleaved, Mirrored, OwnOrder
from ..rules import Option


class MoveKind(StrEnum):
    """The purpose of a move, which also decides the dtype that is sent, and what reports say."""

    PARAMETER = "parameter"  # an operand, once for all its readers in forward and backward
    PART = "part"  # an operand: the part of a parameter that this rank updates, unrounded
    ROWS = "rows"  # an operand: rows of the batch that an op cuts; a result: such rows, split again
    HEADS = "heads"  # an operand: what attention gives of some heads, back to the rows of its queries
    GRADIENT = "gradient"  # an operand or a result: a complete gradient
    SUM = "sum"  # a result: a sum that several ops read
    UPDATE = "update"  # a result: a parameter of which each rank has updated a part


@dataclass(frozen=True)
class Move:
    """An operand or a result of a node, by its index among the tensors, is brought to ``placement``."""

    kind: MoveKind
    index: int
    placement: Placements


@dataclass(frozen=True)
class Choice:
    """The choice for one node: placements and moves. Whatever is None is left to the solver.

    ``reads``: the placement in which the op reads each tensor operand, ``gives``: that of each result (None for what
    is no tensor), each with one entry per mesh axis. ``first``: moves of operands before they are read, ``then``: moves
    of results right after the op. ``by``: per axis the name of the option, where a rule has several of the same
    placements. ``decomposed``: whether the ops of its decomposition are computed instead; these have choices of their
    own, under names such as ``softmax/sum``.
    """

    reads: tuple[Placements, ...] | None = None
    gives: tuple[Placements | None, ...] | None = None
    first: tuple[Move, ...] | None = None
    then: tuple[Move, ...] | None = None
    by: tuple[str, ...] | None = None
    decomposed: bool | None = None
    options: tuple[Option, ...] = field(default=(), compare=False, repr=False)  # the rule's own, once looked up

    @property
    def placements(self) -> tuple[Placements | None, ...]:
        """The placements that are read and given."""
        return (*(self.reads or ()), *(self.gives or ()))

    @classmethod
    def of(cls, options: Sequence[Option], operands: int) -> Choice:
        """The choice of one option per mesh axis, without moves; ``operands``: the number of operands."""
        reads = tuple(tuple(option.operands[k] for option in options) for k in range(operands))
        columns = zip(*(option.results for option in options), strict=True)
        gives = tuple(None if column[0] is None else column for column in columns)
        by = tuple(option.name for option in options)
        return cls(reads, gives, (), (), by if any(by) else (), False, tuple(options))


@dataclass(frozen=True)
class Assignment:
    """Choices by the names of nodes in the captured program, and the placements of its outputs.

    Immutable and hashable; ``hash`` and ``digest`` are equal on all ranks that have equal ones. ``axes``: the names of
    the mesh axes, in the order of each placement. An assignment of some nodes only is completed by the solver.
    """

    axes: tuple[str, ...]
    choices: Mapping[str, Choice] = field(default_factory=dict)
    outputs: Mapping[str, Placements] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", MappingProxyType(dict(self.choices)))
        object.__setattr__(self, "outputs", MappingProxyType(dict(self.outputs)))

    @cached_property
    def digest(self) -> str:
        """A hash of the text, in the order of names."""
        ordered = Assignment(self.axes, dict(sorted(self.choices.items())), dict(sorted(self.outputs.items())))
        return hashlib.sha256(str(ordered).encode()).hexdigest()

    def __hash__(self) -> int:
        return int(self.digest[:15], 16)

    def __reduce__(self) -> Any:
        return Assignment.read, (self.text(),)

    def __str__(self) -> str:
        return self.text()

    def text(self, notes: Mapping[str, str] | None = None) -> str:
        """One line a node, which ``Assignment.read`` takes back; ``notes``: comments, by the names of nodes."""
        return _printed(self.axes, self.choices, self.outputs, notes or {})

    @classmethod
    def read(cls, text: str) -> Assignment:
        """The assignment that ``text`` is. Raises ``PartitionError``, with the line, for what is none."""
        return cls(*_parsed(text))

    def changed(self, choices: Mapping[str, Choice]) -> Assignment:
        """This assignment with other choices for some nodes."""
        return replace(self, choices={**self.choices, **choices})


_FIELDS = ("reads", "gives", "first", "then", "by", "decomposed")
_EMPTY: dict[str, Any] = {**dict.fromkeys(_FIELDS, ()), "decomposed": False}


def _printed(
    axes: tuple[str, ...], choices: Mapping[str, Any], outputs: Mapping[str, Any], notes: Mapping[str, str]
) -> str:
    """The text of an assignment's parts; ``notes``: comments by the names of nodes."""
    memo: dict[int, str] = {}  # most choices share their placements

    def one(value: Any) -> str:
        if id(value) not in memo:
            memo[id(value)] = _value(value)
        return memo[id(value)]

    whole = all(getattr(choice, key) is not None for choice in choices.values() for key in _FIELDS)
    left_out = _EMPTY if whole else dict.fromkeys(_FIELDS)
    lines = [f"assignment({', '.join(map(repr, axes))}, whole={whole})"]
    for name, choice in choices.items():
        fields = [(key, getattr(choice, key)) for key in _FIELDS]
        given = "".join(f", {key}={one(value)}" for key, value in fields if value != left_out[key])
        lines.append(f"node({name!r}{given}){'  # ' + ' '.join(notes[name].split()) if name in notes else ''}")
    lines += [f"output({name!r}, {one(placement)})" for name, placement in outputs.items()]
    return "\n".join(lines) + "\n"


def shown(placements: Sequence[Any], axis: int | None = None) -> str:
    """Placements for messages: of several tensors, those along one mesh axis if it is given."""
    entries = placements if axis is None else [p and p[axis] for p in placements]
    return f"[{', '.join(map(_value, entries))}]"


def _value(value: Any) -> str:
    match value:
        case Placement():
            return _placement(value)
        case tuple() if value and isinstance(value[0], Placement):
            return f"({', '.join(map(_value, value))}{',' if len(value) == 1 else ''})"
        case tuple():
            return f"[{', '.join(map(_value, value))}]"
        case str() | bool() | None:
            return repr(value)
    return f"{value.kind}({value.index}, {_value(value.placement)})"


def _placement(placement: Placement) -> str:
    match placement:
        case Mirrored(dim=dim, outer=outer):
            return f"M({dim}, {outer})"
        case Interleaved(dim=dim, outer=outer):
            return f"S({dim}, {outer})"
        case Shard(dim=dim):
            return f"S({dim})"
        case ByGroup(dim=dim, of=of, count=count, ends=ends, rows=rows, room=room):
            return f"G({dim}, {of!r}, {count}, {ends}, {rows}, {room})"
        case Dealt(dim=dim):
            return f"D({dim})"
        case OwnOrder(dim=dim):
            return f"O({dim})"
        case Partial(reduce_op=op):
            return "P" if op == "sum" else f"P({op!r})"
    return "R"


def _parsed(text: str) -> tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]:
    """Axes, choices and outputs of ``text``. Raises ``PartitionError``, with the line, for what is none of these."""
    axes, choices, outputs = tuple[str, ...](), dict[str, Any](), dict[str, Any]()
    left_out = dict[str, Any].fromkeys(_FIELDS)
    for line, call in _calls(text):
        try:
            match call:
                case ast.Call(func=ast.Name(id="assignment"), args=names, keywords=[ast.keyword("whole", whole)]):
                    axes = tuple(_read(name) for name in names)
                    left_out = _EMPTY if _read(whole) else left_out
                case ast.Call(func=ast.Name(id="node"), args=[ast.Constant(value=str(name))], keywords=fields):
                    given = {str(each.arg): _read(each.value) for each in fields}
                    choices[name] = Choice(**{**left_out, **given})
                case ast.Call(func=ast.Name(id="output"), args=[ast.Constant(value=str(name)), placement]):
                    outputs[name] = _read(placement)
                case _:
                    raise ValueError("it is none of assignment(...), node(...), output(...)")
        except (ValueError, TypeError) as error:
            raise PartitionError(
                f"the text is no assignment: in line {line}, {ast.unparse(call)!r}: {error}"
            ) from error
    return axes, choices, outputs


def _calls(text: str) -> Iterator[tuple[int, ast.expr]]:
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise PartitionError(f"the text is no assignment: {error}") from error
    for statement in body:
        if not isinstance(statement, ast.Expr):
            raise PartitionError(f"the text is no assignment: line {statement.lineno} is no call")
        yield statement.lineno, statement.value


def _read(value: ast.expr) -> Any:
    match value:
        case ast.Constant(value=constant):
            return constant
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return tuple(_read(item) for item in items)
        case ast.Name(id="R"):
            return Replicate()
        case ast.Name(id="P"):
            return Partial()
        case ast.Call(func=ast.Name(id="P"), args=[op]):
            return Partial(_read(op))
        case ast.Call(func=ast.Name(id="S"), args=[dim]):
            return Shard(_read(dim))
        case ast.Call(func=ast.Name(id="S"), args=[dim, outer]):
            return Interleaved(_read(dim), _read(outer))
        case ast.Call(func=ast.Name(id="D"), args=[dim]):
            return Dealt(_read(dim))
        case ast.Call(func=ast.Name(id="O"), args=[dim]):
            return OwnOrder(_read(dim))
        case ast.Call(func=ast.Name(id="G"), args=given):
            return ByGroup(*map(_read, given))
        case ast.Call(func=ast.Name(id="M"), args=[dim, outer]):
            return Mirrored(_read(dim), _read(outer))
        case ast.Call(func=ast.Name(id=kind), args=[index, placement]):
            return Move(MoveKind(kind), _read(index), _read(placement))
    raise ValueError(f"expected placements (R, S(dim), P), names or moves, got {ast.unparse(value)!r}")
