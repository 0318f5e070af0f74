"""Store state that is communicated and updated together in one flat storage."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import fx

from ..analysis.aliases import escaping, storages
from ..analysis.strides import Layouts
from ..base import Fact, Numerics, Pass
from ..communication.bucket_all_gather import BucketAllGather
from ..communication.bucket_all_reduce import BucketAllReduce
from ..communication.bucket_reduce_scatter import BucketReduceScatter
from ..communication.form_units import FormUnits
from ..communication.packed import packed_flat
from ..ir.edit import insert_before, replace
from ..ir.meta import Relation
from ..ir.ops import Trait, has
from ..ir.program import Input, Part, Program, is_even
from ..ir.roles import Role
from ..runtime.arena import ALIGNMENT
from ..runtime.host_memory import to_device

aten = torch.ops.aten
Group = tuple[str, ...]  # state by name, in the order of its offsets


@dataclass(frozen=True)
class OneStorage(Pass):
    """State that is used together becomes one flat input, of which each tensor is a part.

    Used together are: the parameters of a unit; each kind of optimizer state that all of them have in their own shape;
    and other state that is concatenated whole, as for a bucketed all_gather. A unit is stored in order of registration,
    so that a parameter, its state, its gradient and its gathered value have the same offsets. A concatenation of all
    parts of a flat input, in order, becomes that input, without a copy. Are these copied from host memory first, and
    perhaps cast, the input is: by one copy.

    Only what is contiguous, in equal parts on all ranks and of one dtype, device and memory is taken. State in
    ``program.fixed`` stays where it is; a group in ``program.stored`` is taken whole and in its order, or not at all;
    with ``program.same_bits``, all parts begin at multiples of ``ALIGNMENT``. Updates stay updates of the parts.

    Kernels of matrices may add in another order where an operand begins between two of these multiples.
    """

    numerics: ClassVar[Numerics] = "exact if aligned"
    facts: ClassVar[frozenset[Fact]] = frozenset({Fact.STORAGE})
    after: ClassVar[tuple[type[Pass], ...]] = (FormUnits, BucketAllGather, BucketReduceScatter, BucketAllReduce)

    def rewrite(self, program: Program) -> int:
        """Choose the groups on the graph as it is, then give each its storage; returns how many there are."""
        groups = _chosen(program)
        known: dict[Any, _Vals] = {}
        for name, group in groups.items():
            _join(program, name, group, known)
        if groups:
            _drop_concatenations(program)
        return len(groups)


def _chosen(program: Program) -> dict[str, Group]:
    """The groups that can be stored flat, each with the name of its storage; no state is in two of them."""
    values = program.values()
    stored = {name: group for group in program.stored for name in group}
    chosen: dict[str, Group] = {}
    layouts = Layouts(program.graph)
    taken: set[str] = set()
    for name, group in _candidates(program):
        members = [values[member] for member in group]
        as_it_lies = all(stored.get(member, group) == group for member in group)
        if (
            len(set(group)) == len(group) > 1
            and as_it_lies
            and taken.isdisjoint(group)
            and _can_join(program, layouts, members)
        ):
            chosen[name] = group
            taken.update(group)
    return chosen


def _candidates(program: Program) -> Iterator[tuple[str, Group]]:
    """Groups of state that is used together, units first, so that all state of a unit has the same offsets."""
    state = _state_by_kind(program)
    shapes = {declared.name: declared.shape for declared in program.inputs}
    for k, unit in enumerate(program.units):
        yield f"unit {k}", unit
        for kind, of in state.items():
            if all(name in of and shapes[of[name]] == shapes[name] for name in unit):
                yield f"{kind} of unit {k}", tuple(of[name] for name in unit)
    names = {node: declared.name for declared, node in program.values().values()}
    for k, node in enumerate(program.graph.find_nodes(op="call_function", target=aten.cat.default)):
        yield f"concatenation {k}", tuple(names[operand] for operand in packed_flat(node, names))


def _state_by_kind(program: Program) -> dict[str, dict[str, str]]:
    """Optimizer state by kind (``optimizer.exp_avg``) and by the name of its parameter."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for declared in program.inputs:
        if declared.role is Role.OPTIMIZER_STATE and declared.of is not None:
            found[declared.name.removesuffix(f"[{declared.of}]")][declared.of] = declared.name
    return found


def _can_join(program: Program, layouts: Layouts, members: Sequence[tuple[Input, fx.Node]]) -> bool:
    vals = [node.meta["val"] for _, node in members]
    kinds = {(declared.memory, val.dtype, val.device) for (declared, _), val in zip(members, vals, strict=True)}
    is_aligned = not program.same_bits or all(val.nbytes % ALIGNMENT == 0 for val in vals[:-1])
    return all(_is_free(program, layouts, *member) for member in members) and len(kinds) == 1 and is_aligned


def _is_free(program: Program, layouts: Layouts, declared: Input, node: fx.Node) -> bool:
    """Whether an input may become part of a flat one. The answer is the same on all ranks."""
    return (
        declared.role in (Role.PARAMETER, Role.OPTIMIZER_STATE)
        and declared.name not in program.fixed
        and node.op == "placeholder"
        and layouts.has_default_strides(node)
        and is_even(declared.shape, declared.placement, program.mesh)
    )


@dataclass(frozen=True)
class _Vals:
    """The fakes of a flat input, of its pieces and of these as parts: groups of the same shapes share them."""

    flat: torch.Tensor
    pieces: Sequence[torch.Tensor]
    parts: Sequence[torch.Tensor]

    @classmethod
    def of(cls, vals: Sequence[torch.Tensor]) -> _Vals:
        """Make the values of a flat tensor and its parts, for members with these fakes."""
        sizes = [val.numel() for val in vals]
        flat = vals[0].new_empty(sum(sizes))
        pieces = aten.split_with_sizes.default(flat, sizes)
        return cls(flat, pieces, [aten.view.default(each, val.shape) for each, val in zip(pieces, vals, strict=True)])


def _join(program: Program, name: str, group: Group, known: dict[Any, _Vals]) -> None:
    """Replace the members of a group by one flat input and views of its parts."""
    values = program.values()
    members = [values[member] for member in group]
    vals = [node.meta["val"] for _, node in members]
    sizes = [val.numel() for val in vals]
    offsets = [0, *accumulate(sizes)]
    parts = tuple(
        Part(declared, offset, tuple(val.shape))
        for (declared, _), offset, val in zip(members, offsets, vals, strict=False)
    )
    first = min(node for _, node in members)
    with program.graph.inserting_before(first):
        flat = program.graph.placeholder("flat")
    flat.target = flat.name  # made unique by FX
    kind = (vals[0].dtype, vals[0].device, *(val.shape for val in vals))
    if kind not in known:
        known[kind] = _Vals.of(vals)
    flat.meta["val"] = known[kind].flat
    _split(program.graph, flat, [node for _, node in members], sizes, known[kind])
    role, memory = parts[0].input.role, parts[0].input.memory
    described = Input(role, name, (offsets[-1],), vals[0].dtype, parts=parts, memory=memory)
    program.inputs = _with_flat(program.inputs, described)


def _with_flat(inputs: Sequence[Input], flat: Input) -> list[Input]:
    """The inputs with ``flat`` at the position of the first of its parts, and without the others."""
    inside = {part.input.name for part in flat.parts}
    first = next(k for k, declared in enumerate(inputs) if declared.name in inside)
    left = [declared for declared in inputs[first:] if declared.name not in inside]
    return [*inputs[:first], flat, *left]


def _split(graph: fx.Graph, flat: fx.Node, members: Sequence[fx.Node], sizes: list[int], vals: _Vals) -> None:
    """Right after the inputs, split ``flat``, and let readers of each member read its part."""
    after = next(node for node in graph.nodes if node.op != "placeholder")
    insert = partial(insert_before, after, like=None)
    split = insert(aten.split_with_sizes.default, flat, sizes, name="parts", val=vals.pieces)
    for k, member in enumerate(members):
        piece, shape = insert(operator.getitem, split, k, val=vals.pieces[k]), list(member.meta["val"].shape)
        part = insert(aten.view.default, piece, shape, name="part", val=vals.parts[k])
        replace(member, part)
        graph.erase_node(member)


def _drop_concatenations(program: Program) -> None:
    """Let readers of all parts of a flat input, concatenated in order, read the input."""
    flats = {node: i for node, i in zip(program.placeholders, program.inputs, strict=True) if i.parts}
    values = program.values()
    whole = {tuple(values[part.input.name][1] for part in i.parts): flat for flat, i in flats.items()}
    parts = {node for nodes in whole for node in nodes}
    kept = escaping(program.graph, storages(program.graph))
    for node in program.graph.find_nodes(op="call_function", target=aten.cat.default):
        flat = whole.get(tuple(packed_flat(node, parts)))
        if flat is not None and node not in kept:  # an output must not come to share memory with state
            node.replace_all_uses_with(flat)
            _erase(node, parts)
        else:
            _copy_at_once(node, whole)


@dataclass(frozen=True)
class _Copied:
    """A value that is copied from host memory, perhaps cast on the device, and flattened: for one reader only."""

    source: fx.Node
    copy: fx.Node
    cast: fx.Node | None

    @classmethod
    def of(cls, flattened: Any) -> _Copied | None:
        """Find the copy that ``flattened``, of one dim, is computed from; None if there is none."""
        node, cast = flattened, None
        while isinstance(node, fx.Node) and len(node.users) == 1:
            if node.target is to_device:
                return cls(node.all_input_nodes[0], node, cast)
            if node.target is aten._to_copy.default and node.kwargs.keys() == {"dtype"} and cast is None:
                cast = node
            elif not has(node.target, Trait.FLATTENS):
                return None
            node = node.args[0]
        return None

    @property
    def options(self) -> tuple[Any, ...]:
        """The device, and the dtype that it is cast to."""
        return (*self.copy.args[1:], self.cast and self.cast.kwargs["dtype"])


def _copy_at_once(cat: fx.Node, whole: Mapping[tuple[fx.Node, ...], fx.Node]) -> None:
    """If ``cat`` joins copies of all parts of a flat input, in order, copy the input instead."""
    members: Any = cat.args[0]
    copied = [each for each in map(_Copied.of, members) if each is not None]
    flat = whole.get(tuple(each.source for each in copied)) if len(copied) == len(members) else None
    if flat is None or len({each.options for each in copied}) > 1 or cat.meta["val"].dim() != 1:
        return
    copy, cast = copied[0].copy, copied[0].cast
    joined = insert_before(cat, to_device, flat, *copy.args[1:], like=copy, relation=Relation.STEP)
    if cast is not None:
        joined = insert_before(
            cat, aten._to_copy.default, joined, like=cast, relation=Relation.STEP, kwargs=cast.kwargs
        )
    cat.replace_all_uses_with(joined)
    cat.graph.erase_node(cat)
    for each, member in zip(copied, members, strict=True):
        node = member
        while node is not each.source:
            (source,) = node.all_input_nodes
            cat.graph.erase_node(node)
            node = source


def _erase(node: fx.Node, parts: Container[fx.Node]) -> None:
    """Erase a node and the flattened operands that it alone reads, but for the parts themselves."""
    operands = node.all_input_nodes
    node.graph.erase_node(node)
    for operand in operands:
        if not operand.users and has(operand.target, Trait.FLATTENS) and operand not in parts:
            _erase(operand, parts)
