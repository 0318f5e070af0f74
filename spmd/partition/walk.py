"""Partition: from the global program to one rank's share, with collectives.

One walk over the global graph. Each global value has ``forms``: the nodes of this rank's graph that hold it, by
placement. For each op the walk takes the combination of placements that moves the fewest bytes (``choose.py``) and
brings the operands there (``redistribute.py``). What keeps a data-parallel step local is known, not found out:

- a split parameter is gathered once, before forward or backward first reads it (``Plan.options``);
- in backward, the gradient of an activation is wanted where the activation is (noted at capture), so that nothing is
  built whole and cut afterwards;
- what is drawn at random is split as what it meets, or like the batch where it has the batch's length; a draw that is
  computed again is split as it was the first time, since its numbers depend on that;
- a sum over the batch stays a sum of the ranks' shares until someone needs its value; a gradient is reduced once, at
  the node that capture knows to be the whole of it, to where its parameter lives.

None of these can change a value, only what it costs: rules and redistributions alone decide what is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from passes import Input, Output, OutputKind, PartitionError, Phase, Program, Role
from passes.program import Placements, is_sharded, output_values, replicated
from passes.purity import is_pure

from .._torch import OpOverload
from ..capture.provenance import Origin
from ..constrain import CONSTRAIN, constrained_to
from ..placements import Interleaved, local_shape, local_start, smallest_shape, splits
from ..plan import Plan
from ..rules import Call, Info, Local, Option, Part, counted_dim, localize_of, rule_of, taken_apart
from ..rules.factories import makes_zeros
from ..rules.pieces import dim_of, is_cut, takes_all
from .ahead import Ahead
from .choose import Chooser, local_of
from .emit import CARRIED, Emitter, traced
from .redistribute import Reason, cost
from .values import Value, infos, leaves, results

# Ops that cost so little that this rank's part is computed once more rather than cut from a whole.
_CHEAP = set("expand t transpose permute view _unsafe_view unsqueeze squeeze detach clone slice _to_copy".split())


def partition(program: Program, plan: Plan) -> Program:
    """One rank's share of ``program`` under ``plan``; ``program`` is left as it is.

    Raises ``PartitionError`` if an op's local result has another shape than its placement says.
    """
    return _Partitioner(program, plan).run()


class _Partitioner:
    """The walk. ``values``: for each global node a ``Value``, a tuple of them, or this rank's node of a number."""

    def __init__(self, program: Program, plan: Plan) -> None:
        self.program, self.plan, self.mesh = program, plan, program.mesh
        self.whole = replicated(program.mesh)
        self.placements = {i.name: plan.placements.get(i.name, self.whole) for i in program.inputs}
        self.inputs = dict(zip(program.placeholders, program.inputs, strict=True))
        self.shapes = {declared.name: declared.shape for declared in program.inputs}
        self.complete = self._complete_gradients()
        self.model_axes = self._model_axes()
        self.emitter, self.chooser = Emitter(program), Chooser(program.mesh, self.model_axes)
        self.values: dict[fx.Node, Any] = {}
        self.ahead = Ahead(program.mesh, self.chooser, self.values, _differentiated(program))
        self.gathered: dict[fx.Node, Value] = {}
        self.updated: dict[fx.Node, str] = {}  # by what an update made of it, the name of a parameter
        self.by_origin: dict[int, fx.Node] = {}
        self.drawn: dict[int, Placements] = {}  # by the number of the draw
        self.notes: dict[str, str] = {}
        self.matrices: dict[tuple[str, str], dict[fx.Node, int]] = {}  # by op and line: what updates gather, in bytes

    def _model_axes(self) -> frozenset[int]:
        """The axes over which no argument is split: there the model is. In data parallel the first is none of them."""
        arguments = [i for i in self.program.inputs if i.role is Role.BATCH]
        split = {k for i in arguments for k, p in enumerate(self.placements[i.name]) if isinstance(p, Shard)}
        first = {0} if self.plan.options.get("gather_parameters") else set()
        return frozenset(range(len(self.mesh.axes))) - split - first

    def run(self) -> Program:
        inputs = [self._input(node, declared) for node, declared in self.inputs.items()]
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self._visit(node)
            elif node.op not in ("placeholder", "output"):
                raise PartitionError(
                    f"expected a flat graph of function calls, found a {node.op}: {node.format_node()}"
                )
        outputs = self._outputs()
        self._erase_unused()
        return replace(
            self.program,
            graph_module=fx.GraphModule(torch.nn.Module(), self.emitter.graph),
            inputs=[*inputs, *self.emitter.seed_input()],
            outputs=outputs,
            history=list(self.program.history),
            notes=[*self.program.notes, *self._notes()],
        )

    # Inputs and outputs

    def _input(self, node: fx.Node, declared: Input) -> Input:
        val = node.meta["val"]
        if not isinstance(val, torch.Tensor):
            self.values[node] = self.emitter.placeholder(node, val)
            return declared
        placement = self.placements[declared.name]
        new = self.emitter.placeholder(node, self._part(val, placement))
        batch = frozenset(range(len(placement))) if declared.role is Role.BATCH else frozenset[int]()
        self.values[node] = Value.of(node, val, placement, new, batch, weights=declared.role is Role.PARAMETER)
        return replace(declared, placement=placement)

    def _part(self, val: torch.Tensor, placement: Placements) -> torch.Tensor:
        if not is_sharded(placement):
            return val
        with val.fake_mode:  # type: ignore[attr-defined]
            return torch.empty(local_shape(val.shape, placement, self.mesh), dtype=val.dtype, device=val.device)

    def _outputs(self) -> list[Output]:
        returned, outputs = [], []
        for value, output in zip(self.program.output_values(), self.program.outputs, strict=True):
            held = self.values[value] if isinstance(value, fx.Node) else value
            if isinstance(held, Value):
                placement = self._output_placement(held, output)
                reason = Reason(output.role, f"{output.name} is needed as a whole", (output.name,))
                returned.append(self._want(held, placement, reason))
                outputs.append(replace(output, placement=placement))
            else:
                returned.append(held)
                outputs.append(output)
        self.emitter.graph.output(tuple(returned))
        return outputs

    def _output_placement(self, held: Value, output: Output) -> Placements:
        """State goes where its parameter lives; a result stays split along the batch, in equal parts, or is whole."""
        if output.kind is OutputKind.UPDATE:
            return self.placements[output.name]
        if output.kind is OutputKind.NEW:
            assert output.of is not None, "new state belongs to a parameter"
            return self.placements[output.of] if held.shape == self.shapes[output.of] else self.whole
        batch = (k in held.batch and self._divides(held, k) for k in range(len(held.primary)))
        return tuple(_in_order(p) if split else Replicate() for p, split in zip(held.primary, batch, strict=True))

    def _divides(self, held: Value, axis: int) -> bool:
        """Whether all ranks of an axis have equally much of a value."""
        split = held.primary[axis]
        return not isinstance(split, Shard) or held.shape[split.dim] % self.mesh.axes[axis].size == 0

    def _erase_unused(self) -> None:
        """Drop what was needed only for a whole value that nobody asked for in the end."""
        for node in reversed(self.emitter.graph.nodes):
            if not node.users and node.op == "call_function" and is_pure(node):
                self.emitter.graph.erase_node(node)

    # The walk

    def _visit(self, node: fx.Node) -> None:
        origin: Origin | None = node.meta.get("origin")
        if origin is not None and node.target is not getitem:  # an op with several results is known by all of them
            self.by_origin[origin.number] = node
        if node.target is getitem and isinstance(self.values[node.args[0]], tuple):  # type: ignore[index]
            self.values[node] = self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        elif node.target is CONSTRAIN:
            self._constrain(node)
        elif isinstance(node.target, OpOverload) and any(infos(results(node.meta.get("val")))):
            self._op(node)
        else:
            self._number(node)
        self._note_update(node)
        self._settle_gradient(node)
        self._settle_before_fan_out(node)

    def _number(self, node: fx.Node) -> None:
        """Arithmetic on numbers, and ops that give none: the same on every rank, on whole operands."""

        def whole(operand: fx.Node) -> fx.Node:
            held = self.values[operand]
            reason = Reason(why=f"{node.target} needs the whole value")
            return self._want(held, self.whole, reason) if isinstance(held, Value) else held

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), whole)
        self.values[node] = self.emitter.number(node.target, args, kwargs, like=node)

    def _op(self, node: fx.Node) -> None:
        self._settle_contributions(node)
        operands = self._operands(node)
        call = self._call(node, operands)
        rows = self._rows_cut(call, operands)
        operands = [self._with_all_rows(node, operands[0], rows)] if rows else operands
        apart = taken_apart(call)
        if apart is not None and self._saves(apart[0], operands[0]):
            self.values[node] = self._apart(node, operands, apart[1])
            return
        phase: Phase | None = node.meta.get("phase")
        draw: int | None = node.meta.get("draw")
        wanted = self._wanted(node) if draw is None else self._meets(node)
        before = self.drawn.get(draw) if draw is not None else None
        later = partial(self.ahead.of, node, operands) if phase in (Phase.FORWARD, Phase.BACKWARD) else None
        chosen = self.chooser.cheapest(call, operands, wanted, phase, before, later)
        if draw is not None:
            self.drawn[draw] = tuple(option.results[0] or Replicate() for option in chosen)
        if rule_of(node.target) is None:
            self._note_no_rule(node, operands)
        elif phase is Phase.UPDATE and chosen == self.chooser.whole(call):
            self._note_matrices(node, operands)
        self.values[node] = self._apply(node, call, operands, chosen)
        for part in results(self.values[node]) if rows else ():
            self._split_rows_again(part, rows)

    def _constrain(self, node: fx.Node) -> None:
        """From here on the value lives where the user says; nobody takes it from where it was."""
        (held,) = self._operands(node)
        place = constrained_to(node, held.primary)
        reason = Reason(why=f"spmd.constrain wants it so at {_place_of(node)}")
        new = self._want(held, place, reason)
        self.values[node] = Value(
            node, held.shape, held.dtype, place, {place: new}, held.batch_in(place), held.counts, held.weights
        )

    def _saves(self, dim: int, held: Value) -> bool:
        """Whether to reduce two numbers a row moves less than to gather the rows."""
        total = 0.0
        for k, axis in enumerate(self.mesh.axes):
            if held.primary[k] == Shard(dim):
                nbytes = held.bytes_before(held.primary, k, self.mesh)
                total += cost(Shard(dim), Replicate(), nbytes, axis.size)
                total -= 2 * cost(Partial(), Replicate(), nbytes / held.shape[dim], axis.size)
        return total > 0

    def _apart(self, node: fx.Node, operands: Sequence[Value], how: Callable[..., Any]) -> Any:
        """Walk, in the place of ``node``, the ops that ``how`` makes of it."""
        graph = traced(how, node.args)
        values = iter(operands)
        for inner in graph.nodes:
            inner.meta.update((key, node.meta[key]) for key in CARRIED if key in node.meta)
            if inner.op == "placeholder":
                self.values[inner] = next(values)
            elif inner.op == "call_function":
                self._visit(inner)
        (result,) = output_values(graph)
        return self.values[result]

    def _rows_cut(self, call: Call, operands: Sequence[Value]) -> dict[int, int]:
        """By mesh axis, the dim of the batch's rows that a call cuts across the ranks: ``x.chunk(4)``."""
        if not is_cut(call) or takes_all(call):
            return {}
        split = {k: p.dim for k, p in enumerate(operands[0].primary) if isinstance(p, Shard)}
        return {k: dim for k, dim in split.items() if k in operands[0].batch and dim == dim_of(call)}

    def _with_all_rows(self, node: fx.Node, held: Value, rows: Mapping[int, int]) -> Value:
        """The value that is cut, whole along its rows: which of them meet in a part is the step's own choice."""
        place = tuple(Replicate() if k in rows else p for k, p in enumerate(held.primary))
        why = f"{node.target} cuts the batch across the ranks"
        self.notes.setdefault(
            why,
            f"{why} at {node.meta.get('source') or node.name}, so its rows are gathered first. Parts that are "
            "arguments of their own, or a dim of their own with input_batch_dim=1, take no traffic",
        )
        return replace(held, primary=place, forms={place: self._want(held, place, Reason(Role.BATCH, why))})

    def _split_rows_again(self, part: Any, rows: Mapping[int, int]) -> None:
        """Rows cut from the batch are shared out over the ranks again, and nobody computes with all of them."""
        if not isinstance(part, Value):
            return
        place = tuple(Shard(rows[k]) if k in rows else p for k, p in enumerate(part.primary))
        node = self._want(part, place, Reason(Role.BATCH, "rows are shared out again"))
        part.primary, part.forms, part.batch = place, {place: node}, part.batch | frozenset(rows)

    def _operands(self, node: fx.Node) -> list[Value]:
        """The tensor operands; a split parameter that forward or backward reads comes gathered."""
        operands = []
        for leaf in leaves(node):
            held = self.values[leaf] if isinstance(leaf, fx.Node) else None
            if isinstance(held, Value):
                operands.append(self._gathered(leaf, held) if self._is_gathered(leaf, node) else held)
        return operands

    def _is_gathered(self, operand: fx.Node, user: fx.Node) -> bool:
        """Whether ``user`` computes with the whole of ``operand``: a parameter, or what an update made of one."""
        if not self.plan.options.get("gather_parameters"):
            return False
        return user.meta.get("phase") in (Phase.FORWARD, Phase.BACKWARD) and self._parameter(operand) is not None

    def _parameter(self, node: fx.Node) -> str | None:
        """The name of the parameter that ``node`` is, as given or as an update made it."""
        declared = self.inputs.get(node)
        if declared is not None:
            return declared.name if declared.role is Role.PARAMETER else None
        return self.updated.get(node)

    def _note_update(self, node: fx.Node) -> None:
        """What an update makes of a parameter is that parameter, to a forward later in the step (a GAN's second)."""
        before = node.args[0] if node.args and node.meta.get("phase") is Phase.UPDATE else None
        if not isinstance(before, fx.Node) or not isinstance(held := self.values.get(node), Value):
            return
        name, was = self._parameter(before), self.values[before]
        if name is not None and isinstance(was, Value) and was.shape == held.shape:
            self.updated[node] = name

    def _gathered(self, parameter: fx.Node, held: Value) -> Value:
        """The parameter, whole along the axes of the batch, and as it is along those that split the model."""
        if parameter not in self.gathered:
            name = self._parameter(parameter)
            assert name is not None
            reason = Reason(Role.PARAMETER, "a split parameter is gathered before its first use", (name,))
            place = tuple(p if k in self.model_axes else Replicate() for k, p in enumerate(held.primary))
            node = self._want(held, place, reason)
            self.gathered[parameter] = Value(parameter, held.shape, held.dtype, place, {place: node}, weights=True)
        return self.gathered[parameter]

    def _call(self, node: fx.Node, operands: Sequence[Value]) -> Call:
        """The call on global shapes, with an ``Info`` in the place of each tensor."""
        remaining = iter(operands)

        def info(operand: fx.Node) -> Any:
            return next(remaining).info if isinstance(self.values[operand], Value) else operand.meta["val"]

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), info)
        target: Any = node.target
        return Call(target, args, kwargs, tuple(v.info for v in operands), infos(results(node.meta["val"])), 1)

    def _wanted(self, node: fx.Node) -> Placements | None:
        """Where a result is wanted, if that is known: where its only user constrains it to be, or by its activation."""
        user = next(iter(node.users)) if len(node.users) == 1 else None
        if user is not None and user.target is CONSTRAIN:
            return constrained_to(user, self.whole)
        return self._beside_activation(node) or self._beside_parameter(node)

    def _beside_parameter(self, node: fx.Node) -> Placements | None:
        """For the gradient of a parameter, or a share of it, where the parameter is, as far as the model is split."""
        end, shape = node, getattr(node.meta["val"], "shape", None)
        while end not in self.complete and len(end.users) == 1 and end.meta.get("phase") is Phase.BACKWARD:
            end = next(iter(end.users))
            if getattr(end.meta.get("val"), "shape", None) != shape:
                return None
        if end not in self.complete:
            return None
        place = self.placements[self.complete[end]]
        return tuple(p if k in self.model_axes else Replicate() for k, p in enumerate(place))

    def _beside_activation(self, node: fx.Node) -> Placements | None:
        """For the gradient of an activation, where the activation is."""
        origin: Origin | None = node.meta.get("origin")
        if origin is None or origin.cotangent_of is None:
            return None
        number, index = origin.cotangent_of
        held = self.values.get(self.by_origin[number]) if number in self.by_origin else None
        if isinstance(held, tuple):
            held = held[index] if index < len(held) else None
        val = node.meta["val"]
        if not isinstance(held, Value) or not isinstance(val, torch.Tensor) or held.shape != tuple(val.shape):
            return None
        return held.primary

    def _meets(self, node: fx.Node) -> Placements | None:
        """How what is drawn here is best split: as the first value of its shape that it is computed with."""
        val = node.meta["val"]
        shape = tuple(val.shape) if isinstance(val, torch.Tensor) else None
        for leaf, user in _computed_with(node, shape):
            held = self.values.get(leaf)
            if not isinstance(held, Value) or held.shape != shape:
                continue
            if self._is_gathered(leaf, user) or (leaf in self.inputs and not is_sharded(held.primary)):
                return None  # something that every rank holds as a whole, such as a weight
            if is_sharded(held.primary):
                return held.primary
        return self._like_the_batch(shape)

    def _like_the_batch(self, shape: Sequence[int] | None) -> Placements | None:
        """The placement of the batch, if the dims that it splits have the same lengths here."""
        for declared in self.program.inputs:
            placement = self.placements[declared.name]
            dims = [p.dim for p in placement if isinstance(p, Shard)]
            if declared.role is not Role.BATCH or not dims or shape is None or len(shape) <= max(dims):
                continue
            if all(shape[d] == declared.shape[d] for d in dims):
                return placement
        return None

    def _apply(self, node: fx.Node, call: Call, operands: Sequence[Value], chosen: Sequence[Option]) -> Any:
        """Bring the operands to where the options want them, and emit the op on this rank's parts."""
        reason = Reason(why=f"{node.target} needs it so at {_place_of(node)}")
        wanted = [tuple(option.operands[k] for option in chosen) for k in range(len(operands))]
        from_zero = {k for option in chosen for k in option.from_zero}
        nodes = iter(
            self._count(held, place, reason) if k in from_zero else self._want(held, place, reason)
            for k, (held, place) in enumerate(zip(operands, wanted, strict=True))
        )
        placements = [
            None if info is None else tuple(option.results[k] for option in chosen)
            for k, info in enumerate(call.results)
        ]

        def local(operand: fx.Node) -> Any:
            held = self.values[operand]
            return next(nodes) if isinstance(held, Value) else held

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), local)
        batch = frozenset[int]().union(*(v.batch_in(place) for v, place in zip(operands, wanted, strict=True)))
        if not operands and self._like_the_batch(getattr(node.meta["val"], "shape", None)) == placements[0]:
            batch = frozenset(range(len(chosen)))  # made here, for the rows of the batch
        weights = bool(operands) and all(held.weights for held in operands)
        new = self._emit(node, call, args, kwargs, wanted, placements, local_of(chosen))
        return self._values(node, new, call, placements, batch, weights)

    def _emit(
        self,
        node: fx.Node,
        call: Call,
        args: Any,
        kwargs: Any,
        operands: Sequence[Placements],
        placements: Sequence[Any],
        local: Local | None,
    ) -> fx.Node:
        """The node of this rank that computes its part: the op on its parts, or what stands for it."""
        parts = [self._part_of(info, place) for info, place in zip(call.results, placements, strict=True)]
        shapes = tuple(None if part is None else part.shape for part in parts)
        localize = localize_of(node.target)
        if local is not None:
            given = [self._part_of(info, place) for info, place in zip(call.operands, operands, strict=True)]
            new: fx.Node = local(partial(self._run, node), call, args, given, parts)
        else:
            if localize is not None and any(is_sharded(place) for place in placements if place is not None):
                args = localize(call, args, kwargs, shapes)
            new = self.emitter.op(node, args, kwargs, placements)
        self.emitter.check(node, new, shapes)
        return new

    def _run(self, node: fx.Node, target: Any, args: Any) -> fx.Node:
        return self.emitter.call(target, args, {}, like=node)

    def _part_of(self, info: Info | None, place: Placements) -> Part | None:
        if info is None:
            return None
        of = (info.shape, place, self.mesh)
        return Part(local_start(*of), local_shape(*of), smallest_shape(*of))

    def _values(
        self,
        node: fx.Node,
        new: fx.Node,
        call: Call,
        placements: Sequence[Any],
        batch: frozenset[int],
        weights: bool,
    ) -> Any:
        """What the results of ``node`` are now: a ``Value``, or a tuple of them."""
        val = node.meta["val"]
        if isinstance(val, torch.Tensor):
            held = Value.of(node, val, placements[0], new, batch, counted_dim(call), weights)
            if makes_zeros(call):
                held.forms |= dict.fromkeys(_as_sums(placements[0]), new)
            return held
        items = [self.emitter.item(new, index) for index in range(len(val))]
        return tuple(
            Value.of(node, whole, place, item, batch, weights=weights) if isinstance(whole, torch.Tensor) else item
            for whole, place, item in zip(val, placements, items, strict=True)
        )

    # Values in other placements

    def _want(self, held: Value, placement: Placements, reason: Reason) -> fx.Node:
        """The node that holds ``held`` in ``placement``: there already, computed once more, or communicated."""
        if placement not in held.forms:
            node = self._again(held, placement) or self._through_view(held, placement, reason)
            held.forms[placement] = node or self.emitter.redistributed(held, placement, reason)
        return held.forms[placement]

    def _count(self, held: Value, placement: Placements, reason: Reason) -> fx.Node:
        """A count of rows that ``placement`` splits, numbering this rank's own from 0."""
        uncut = tuple(Replicate() if splits(p, held.counts or 0) else p for p in placement)
        length = local_shape(held.shape, placement, self.mesh)[held.counts or 0]
        arguments = (self._want(held, uncut, reason), held.counts, 0, length)
        node = self.emitter.call(torch.ops.aten.slice.Tensor, arguments, {}, like=held.source)
        node.meta["placement"] = placement
        return node

    def _again(self, held: Value, placement: Placements) -> fx.Node | None:
        """Compute this rank's part of a whole value instead of cutting it, where that is cheap and free of traffic."""
        node = held.source
        if held.primary != self.whole or not is_sharded(placement) or not _is_cheap(node):
            return None
        operands = self._operands(node)
        call = self._call(node, operands)
        chosen = self.chooser.without_traffic(call, operands, placement)
        if chosen is None:
            return None
        part = self._apply(node, call, operands, chosen)
        assert isinstance(part, Value)
        return part.forms[placement]

    def _through_view(self, held: Value, placement: Placements, reason: Reason) -> fx.Node | None:
        """A view that is gathered is a view of what is gathered: so a matrix and its transpose are gathered once."""
        viewed = self._viewed(held)
        moved = {k for k, (have, want) in enumerate(zip(held.primary, placement, strict=True)) if have != want}
        gathers = all(isinstance(held.primary[k], Shard) and placement[k] == Replicate() for k in moved)
        if viewed is None or not moved or not gathers:
            return None
        place = tuple(Replicate() if k in moved else p for k, p in enumerate(viewed.primary))
        call = self._call(held.source, [viewed])
        there = replace(viewed, primary=place, forms={place: viewed.forms[viewed.primary]})
        chosen = self.chooser.without_traffic(call, [there], placement)
        if chosen is None:
            return None
        self._want(viewed, place, reason)
        part = self._apply(held.source, call, [viewed], chosen)
        assert isinstance(part, Value)
        return part.forms[placement]

    def _viewed(self, held: Value) -> Value | None:
        """What ``held`` is a view of, all of it."""
        node, target = held.source, held.source.target
        if not isinstance(target, OpOverload) or not target.is_view:
            return None
        viewed = self.values[node.args[0]]  # type: ignore[index]
        return viewed if isinstance(viewed, Value) and prod(viewed.shape) == prod(held.shape) else None

    def _settle_contributions(self, node: fx.Node) -> None:
        """Where each gradient is reduced by itself, reduce what is about to be added to one that is."""
        parameter = self.complete.get(node)
        if parameter is None or not self._reduces_each(parameter):
            return
        shape = self.shapes[parameter]
        for held in (self.values.get(leaf) for leaf in node.all_input_nodes):
            if isinstance(held, Value) and held.shape == shape and any(isinstance(p, Partial) for p in held.primary):
                self._settle(held, parameter)

    def _settle_gradient(self, node: fx.Node) -> None:
        """Reduce a gradient, once it is complete, to where its parameter lives."""
        parameter, held = self.complete.get(node), self.values.get(node)
        if parameter is not None and isinstance(held, Value):
            self._settle(held, parameter)

    def _settle_before_fan_out(self, node: fx.Node) -> None:
        """Reduce a sum over the model's ranks that is used in several ways: each would leave a sum of its own."""
        held = self.values.get(node)
        if node.meta.get("phase") is not Phase.BACKWARD or not isinstance(held, Value) or not _fans_out(node):
            return
        wanted = self._wanted(node) or self.whole
        open_axes = [k for k in self.model_axes if isinstance(held.primary[k], Partial)]
        place = tuple(wanted[k] if k in open_axes else p for k, p in enumerate(held.primary))
        if place != held.primary:
            settled = self._want(
                held, place, Reason(why=f"a sum that several values come from is reduced first, at {_place_of(node)}")
            )
            held.primary, held.forms = place, {place: settled}

    def _settle(self, held: Value, parameter: str) -> None:
        placement = self.placements[parameter]
        reason = Reason(Role.GRADIENT, "a gradient is the sum of the ranks' shares", (parameter,))
        settled = self._want(held, placement, reason)
        held.primary, held.forms, held.batch = placement, {placement: settled}, frozenset()

    def _reduces_each(self, parameter: str) -> bool:
        """Whether each backward pass reduces the gradient of ``parameter``: not one that every rank keeps whole."""
        return self.plan.options.get("reduce_gradients") == "each" and is_sharded(self.placements[parameter])

    def _complete_gradients(self) -> dict[fx.Node, str]:
        """The nodes that are a parameter's whole gradient: the last one, or one for each backward pass."""
        tagged = {node: node.meta["grad_of"] for node in self.program.graph.nodes if "grad_of" in node.meta}
        last = {parameter: node for node, parameter in tagged.items()}
        return {node: name for node, name in tagged.items() if node is last[name] or self._reduces_each(name)}

    def _note_matrices(self, node: fx.Node, operands: Sequence[Value]) -> None:
        """Keep in mind what an update gathers to compute with whole."""
        gathered = self.matrices.setdefault((str(node.target), node.meta.get("source") or node.name), {})
        for held in operands:
            base = held
            while (viewed := self._viewed(base)) is not None:
                base = viewed
            if is_sharded(base.primary) and self.whole not in base.forms:
                gathered[base.source] = base.nbytes

    def _notes(self) -> list[str]:
        matrices = [
            f"{op} at {source} needs whole matrices and runs on every rank: {len(gathered)} of them, "
            f"{sum(gathered.values())} bytes, are gathered, each once"
            for (op, source), gathered in self.matrices.items()
            if gathered
        ]
        return [*self.notes.values(), *matrices]

    def _note_no_rule(self, node: fx.Node, operands: Sequence[Value]) -> None:
        split = sum(held.nbytes for held in operands if any(not isinstance(p, Replicate) for p in held.primary))
        if split:
            self.notes.setdefault(
                str(node.target),
                f"{node.target} at {node.meta.get('source') or node.name} has no rule and runs whole on every rank, "
                f"for which {split} bytes are gathered: register a rule with spmd.register_rule",
            )


def _computed_with(node: fx.Node, shape: tuple[int, ...] | None) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(operand, user) for the users of ``node``, and of what they make of it in its shape, nearest first."""
    pending, seen = [node], {node}
    while pending:
        for user in pending.pop(0).users:
            yield from ((leaf, user) for leaf in user.all_input_nodes)
            made = user.meta.get("val")
            if user not in seen and isinstance(made, torch.Tensor) and tuple(made.shape) == shape:
                seen.add(user)
                pending.append(user)


def _differentiated(program: Program) -> frozenset[int]:
    """The numbers of the forward ops whose results have gradients."""
    origins = (node.meta.get("origin") for node in program.graph.nodes)
    return frozenset(origin.cotangent_of[0] for origin in origins if origin is not None and origin.cotangent_of)


def _in_order(placement: Placement) -> Placement:
    """A placement by which the parts, one after the other, are the whole: so the user reads a result."""
    return Shard(placement.dim) if isinstance(placement, Interleaved) else placement


def _as_sums(placement: Placements) -> Iterator[Placements]:
    """``placement``, and all that has a sum in the place of some replicas: zeros are a sum of zeros."""
    return product(*([p, Partial("sum")] if isinstance(p, Replicate) else [p] for p in placement))


def _place_of(node: fx.Node) -> str:
    return node.meta.get("module") or "the step itself"


def _fans_out(node: fx.Node) -> bool:
    """Whether more than one value is computed from ``node``, and not all of them are smaller."""
    made = [val for user in node.users for val in _used(user)]
    return len(made) > 1 and any(val.numel() >= node.meta["val"].numel() for val in made)


def _used(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that an op gives and that somebody takes."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return [node.meta["val"]]
    return [user.meta["val"] for user in node.users if isinstance(user.meta.get("val"), torch.Tensor) and user.users]


def _is_cheap(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op != "call_function" or not isinstance(node.meta["val"], torch.Tensor):
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:
        return False  # it would draw other numbers
    name = target._schema.name.split("::")[1]
    makes = name.startswith("new_") or not any(isinstance(leaf, fx.Node) for leaf in leaves(node))
    return makes or name in _CHEAP or torch.Tag.pointwise in target.tags
