"""Partition: from the global program to one rank's share, with collectives.

One walk over the global graph. Each global value has ``forms``: the nodes of the new graph that hold it, by placement.
For each op the walk asks the op's rule which placements are right, takes the combination that moves the fewest bytes,
and brings the operands there. What keeps a data-parallel step local is known, not found out:

- a split parameter is gathered once, before forward or backward first reads it (``Plan.options``);
- in backward, the gradient of an activation is wanted where the activation is (``cotangent_of``, noted at capture), so
  that nothing is built globally and cut afterwards;
- a sum over the batch stays a sum of the ranks' shares until someone needs its value; a gradient is reduced once, at
  the node that capture knows to be the whole of it (``grad_of``), to where its parameter lives.

None of these can change a value, only what it costs: rules and redistributions alone decide what is right.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.fx.node import map_arg

import passes
from passes import Input, Mesh, Output, OutputKind, PartitionError, Phase, Program, Role
from passes.program import Placements, is_sharded, replicated
from passes.purity import is_pure

from ._torch import OpOverload, tree_flatten
from .placements import local_shape
from .plan import Plan
from .provenance import Origin
from .redistribute import Reason, Redistribution, cost
from .rules import LOCALIZE, Call, Info, Option, rule_of

# Ops that cost little enough to be computed once more, for this rank's part alone, rather than cut from a whole.
_CHEAP = {"expand", "t", "transpose", "permute", "view", "_unsafe_view", "unsqueeze", "squeeze", "detach", "clone", "slice"}


@dataclass
class Value:
    """One global value: the nodes that hold it, by placement; ``primary`` is the one it was computed in."""

    source: fx.Node
    shape: tuple[int, ...]
    dtype: torch.dtype
    primary: Placements
    forms: dict[Placements, fx.Node] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole value."""
        return math.prod(self.shape) * self.dtype.itemsize


def partition(program: Program, plan: Plan) -> Program:
    """One rank's share of ``program`` under ``plan``.

    Raises ``PartitionError`` if an op's local result has another shape than its placement says.
    """
    return _Partitioner(program, plan).run()


class _Partitioner:
    def __init__(self, program: Program, plan: Plan) -> None:
        self.program, self.plan, self.mesh = program, plan, program.mesh
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Any] = {}  # a Value, a tuple of them, or a node (numbers)
        self.gathered: dict[fx.Node, Value] = {}
        self.by_origin: dict[int, fx.Node] = {}
        self.randoms = 0
        self.seed: fx.Node | None = None
        self.fallbacks: dict[str, str] = {}
        self.complete = _last_gradients(program)
        self.placements = {i.name: plan.placements.get(i.name, replicated(self.mesh)) for i in program.inputs}
        self.roles = dict(zip(program.placeholders, program.inputs, strict=True))

    def run(self) -> Program:
        inputs = [self._input(node, declared) for node, declared in self.roles.items()]
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self._visit(node)
            elif node.op not in ("placeholder", "output"):
                raise PartitionError(f"expected a flat functional graph, found {node.op} {node.name}: {node.format_node()}")
        return self._finish(inputs)

    # -- inputs and outputs

    def _input(self, node: fx.Node, declared: Input) -> Input:
        new = self.graph.placeholder(node.name)
        new.meta.update(node.meta)
        val = node.meta["val"]
        if not isinstance(val, torch.Tensor):
            self.values[node] = new
            return declared
        placement = self.placements[declared.name]
        new.meta["placement"] = placement
        new.meta["val"] = self._local_val(val, placement)
        self.values[node] = Value(node, tuple(val.shape), val.dtype, placement, {placement: new})
        return replace(declared, placement=placement)

    def _local_val(self, val: torch.Tensor, placement: Placements) -> torch.Tensor:
        if not is_sharded(placement):
            return val
        with val.fake_mode:  # type: ignore[attr-defined]
            return torch.empty(local_shape(val.shape, placement, self.mesh), dtype=val.dtype, device=val.device)

    def _finish(self, inputs: list[Input]) -> Program:
        returned, outputs = [], []
        for value, output in zip(self.program.output_values(), self.program.outputs, strict=True):
            node, placement = self._output(value, output)
            returned.append(node)
            outputs.append(replace(output, placement=placement))
        self.graph.output(tuple(returned))
        if self.seed is not None:
            inputs.append(Input(Role.SEED, "seed"))
        self._erase_unused()
        module = fx.GraphModule(torch.nn.Module(), self.graph)
        return replace(
            self.program,
            graph_module=module,
            inputs=inputs,
            outputs=outputs,
            history=list(self.program.history),
            notes=[*self.program.notes, *self.fallbacks.values()],
        )

    def _output(self, value: Any, output: Output) -> tuple[Any, Placements]:
        held = self.values.get(value, value) if isinstance(value, fx.Node) else value
        if not isinstance(held, Value):
            return held, ()
        placement = self._output_placement(held, output)
        reason = Reason(output.role, f"{output.name} is asked for as a whole", (output.name,))
        return self._want(held, placement, reason), placement

    def _output_placement(self, held: Value, output: Output) -> Placements:
        if output.kind is OutputKind.UPDATE:
            return self.placements[output.name]
        if output.kind is OutputKind.NEW:
            whose = self.placements.get(output.of or "")
            fits = whose is not None and held.shape == self._shape_of(output.of or "")
            return whose if whose is not None and fits else replicated(self.mesh)
        keep = self._batch_axes() if len(held.shape) else set()
        return tuple(
            p if k in keep and isinstance(p, Shard) else Replicate() for k, p in enumerate(held.primary)
        )

    def _shape_of(self, name: str) -> tuple[int, ...]:
        return self.program.inputs[self.program.input_named(name)].shape

    def _batch_axes(self) -> set[int]:
        """The axes over which some input of the step is split."""
        batch = [self.placements[i.name] for i in self.program.inputs if i.role is Role.BATCH]
        return {k for placement in batch for k, p in enumerate(placement) if isinstance(p, Shard)}

    def _erase_unused(self) -> None:
        """Drop what only a whole value needed that nobody asked for in the end."""
        for node in reversed(self.graph.nodes):
            if not node.users and node.op == "call_function" and is_pure(node):
                self.graph.erase_node(node)

    # -- the walk

    def _visit(self, node: fx.Node) -> None:
        origin: Origin | None = node.meta.get("origin")
        if origin is not None:
            self.by_origin[origin.number] = node
        if node.target is operator.getitem:
            self._getitem(node)
        elif isinstance(node.target, OpOverload) and _tensors_in(node.meta.get("val")):
            self._op(node)
        else:
            self.values[node] = self._plain(node)
        self._settle_gradient(node)

    def _plain(self, node: fx.Node) -> fx.Node:
        """Arithmetic on numbers, and ops that return none: the same on every rank, on whole operands."""
        args = map_arg(node.args, lambda n: self._whole(n, node))
        kwargs = map_arg(node.kwargs, lambda n: self._whole(n, node))
        new = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        new.meta.update(node.meta)
        return new

    def _whole(self, operand: fx.Node, user: fx.Node) -> fx.Node:
        held = self.values[operand]
        if not isinstance(held, Value):
            return held  # type: ignore[no-any-return]
        return self._want(held, replicated(self.mesh), Reason(why=f"{user.target} needs the whole value"))

    def _getitem(self, node: fx.Node) -> None:
        held = self.values[node.args[0]]  # type: ignore[index]
        index: Any = node.args[1]
        self.values[node] = held[index] if isinstance(held, tuple) else self._plain(node)

    def _op(self, node: fx.Node) -> None:
        operands = self._operands(node)
        call = self._call(node, operands)
        option = self._choose(node, call, operands)
        self.values[node] = self._apply(node, call, operands, option)

    def _operands(self, node: fx.Node) -> list[Value]:
        """The values of the tensor operands; a split parameter that forward or backward reads comes gathered."""
        operands = []
        for leaf in _leaves(node):
            if isinstance(leaf, fx.Node):
                held = self.values[leaf]
                if isinstance(held, Value):
                    operands.append(self._gathered(leaf, held) if self._is_gathered(leaf, node) else held)
        return operands

    def _is_gathered(self, operand: fx.Node, user: fx.Node) -> bool:
        declared = self.roles.get(operand)
        return (
            declared is not None
            and declared.role is Role.PARAMETER
            and user.meta.get("phase") in (Phase.FORWARD, Phase.BACKWARD)
            and bool(self.plan.options.get("gather_parameters"))
        )

    def _gathered(self, parameter: fx.Node, held: Value) -> Value:
        if parameter not in self.gathered:
            name = self.roles[parameter].name
            whole = replicated(self.mesh)
            reason = Reason(Role.PARAMETER, "a split parameter is gathered before its first use", (name,))
            node = self._want(held, whole, reason)
            self.gathered[parameter] = Value(parameter, held.shape, held.dtype, whole, {whole: node})
        return self.gathered[parameter]

    def _call(self, node: fx.Node, operands: Sequence[Value]) -> Call:
        """The call on global shapes, with an ``Info`` in the place of each tensor."""
        infos = iter([Info(v.shape, v.dtype) for v in operands])

        def info(n: fx.Node) -> Any:
            return next(infos) if isinstance(self.values[n], Value) else n.meta["val"]

        args, kwargs = map_arg((node.args, node.kwargs), info)  # type: ignore[misc, arg-type]
        results = tuple(_info(val) for val in _results(node))
        return Call(node.target, args, kwargs, tuple(Info(v.shape, v.dtype) for v in operands), results, 1)  # type: ignore[arg-type]

    def _choose(self, node: fx.Node, call: Call, operands: Sequence[Value]) -> list[Option]:
        """One option per axis, each the cheapest given what the axes before have split."""
        chosen: list[Option] = []
        hint = self._hint(node)
        for index, axis in enumerate(self.mesh.axes):
            whole = Option(tuple(Replicate() for _ in operands), tuple(r and Replicate() for r in call.results))
            at_axis = _narrowed(replace(call, size=axis.size), chosen, self.mesh)
            options = [whole, *_options(at_axis)]
            costs = [self._cost(o, operands, index, hint, node) for o in options]
            best = min(range(len(options)), key=lambda k: (costs[k], k))
            chosen.append(options[best])
            if best == 0 and rule_of(node.target) is None:
                self._note_fallback(node, operands, index)
        return chosen

    def _hint(self, node: fx.Node) -> Placements | None:
        """Where the result is wanted: the gradient of an activation, where the activation is."""
        origin: Origin | None = node.meta.get("origin")
        if origin is None or origin.cotangent_of is None:
            return None
        number, output = origin.cotangent_of
        forward = self.by_origin.get(number)
        held = self.values.get(forward) if forward is not None else None
        if isinstance(held, tuple):
            held = held[output] if output < len(held) else None
        val = node.meta.get("val")
        if not isinstance(held, Value) or not isinstance(val, torch.Tensor) or held.shape != tuple(val.shape):
            return None
        return tuple(Replicate() if isinstance(p, Partial) else p for p in held.primary)

    def _cost(self, option: Option, operands: Sequence[Value], axis: int, hint: Placements | None, node: fx.Node) -> float:
        backward = node.meta.get("phase") is Phase.BACKWARD
        total = sum(
            self._cost_to(held, axis, wanted, backward) for held, wanted in zip(operands, option.operands, strict=True)
        )
        result = option.results[0] if option.results else None
        if hint is not None and isinstance(hint[axis], Shard) and result is not None and result != hint[axis]:
            val = node.meta["val"]
            if not isinstance(result, Partial):
                total += val.numel() * val.element_size()
        return total

    def _cost_to(self, held: Value, axis: int, wanted: Placement, backward: bool) -> float:
        size = self.mesh.axes[axis].size
        return min(
            cost(form[axis], wanted, self._bytes_before(held, form, axis), size, allow_split_sum=backward)
            for form in held.forms
        )

    def _bytes_before(self, held: Value, form: Placements, axis: int) -> float:
        """Bytes of a value that is split over the other axes only."""
        nbytes = float(held.nbytes)
        for k, placement in enumerate(form):
            if k != axis and isinstance(placement, Shard):
                nbytes /= self.mesh.axes[k].size
        return nbytes

    def _apply(self, node: fx.Node, call: Call, operands: Sequence[Value], chosen: Sequence[Option]) -> Any:
        """Bring the operands to where the options want them, and emit the op on this rank's parts."""
        wanted = [tuple(o.operands[k] for o in chosen) for k in range(len(operands))]
        reason = Reason(why=f"{node.target} at {node.meta.get('source') or node.name} needs it so")
        nodes = [self._want(held, place, reason) for held, place in zip(operands, wanted, strict=True)]
        placements = [
            tuple(o.results[k] for o in chosen) if info is not None else None for k, info in enumerate(call.results)
        ]
        new = self._emit_local(node, call, nodes, placements)
        return self._held(node, new, placements)

    def _held(self, node: fx.Node, new: fx.Node, placements: list[Any]) -> Any:
        """The value, or the tuple of values, that a new node holds."""
        val = node.meta["val"]
        if isinstance(val, torch.Tensor):
            new.meta["placement"] = placements[0]
            return Value(node, tuple(val.shape), val.dtype, placements[0], {placements[0]: new})
        items = []
        for index, item in enumerate(val):
            part = self.graph.call_function(operator.getitem, (new, index))
            part.meta.update({k: v for k, v in new.meta.items() if k not in ("val", "collective")})
            part.meta["val"] = new.meta["val"][index]
            if isinstance(item, torch.Tensor):
                part.meta["placement"] = placements[index]
                place = placements[index]
                items.append(Value(node, tuple(item.shape), item.dtype, place, {place: part}))
            else:
                items.append(part)
        return tuple(items)

    def _emit_local(self, node: fx.Node, call: Call, nodes: list[fx.Node], placements: list[Any]) -> fx.Node:
        operands = iter(nodes)

        def local(n: fx.Node) -> Any:
            return next(operands) if isinstance(self.values[n], Value) else self.values[n]

        args, kwargs = map_arg((node.args, node.kwargs), local)  # type: ignore[misc, arg-type]
        shapes = tuple(
            local_shape(info.shape, place, self.mesh) if info is not None and place is not None else None
            for info, place in zip(call.results, placements, strict=True)
        )
        localize = LOCALIZE.get(node.target)  # type: ignore[arg-type]
        if localize is not None and any(is_sharded(place) for place in placements if place is not None):
            args = localize(call, args, kwargs, shapes)
        target: Any = node.target
        if torch.Tag.nondeterministic_seeded in target.tags:
            new = self._draw(node, target, args, kwargs, placements)
        else:
            new = self._emit(target, args, kwargs, like=node)
        self._check(node, new, shapes)
        return new

    def _draw(self, node: fx.Node, target: Any, args: Any, kwargs: Any, placements: list[Any]) -> fx.Node:
        """A random op: equal on replicas, different on every shard, a function of the call's seed."""
        if self.seed is None:
            last = next(reversed(self.graph.find_nodes(op="placeholder")), None)
            with self.graph.inserting_after(last) if last is not None else self.graph.inserting_before(None):
                self.seed = self.graph.placeholder("seed")
            self.seed.meta["val"] = 0
        shard = 0
        for place, axis in zip(next(p for p in placements if p is not None), self.mesh.axes, strict=True):
            shard = shard * axis.size + (axis.coordinate if isinstance(place, Shard) else 0)
        self.randoms += 1
        val = self._run(target, args, kwargs)
        new = self.graph.call_function(passes.random.draw, (target, self.seed, self.randoms, shard, *args), kwargs)
        self._describe(new, node, val)
        return new

    # -- values in other placements

    def _want(self, held: Value, placement: Placements, reason: Reason) -> fx.Node:
        """The node that holds ``held`` in ``placement``: there already, computed once more, or communicated."""
        if placement not in held.forms:
            again = self._again(held, placement)
            held.forms[placement] = again if again is not None else self._redistributed(held, placement, reason)
        return held.forms[placement]

    def _redistributed(self, held: Value, placement: Placements, reason: Reason) -> fx.Node:
        source = min(held.forms, key=lambda form: self._distance(form, placement, held.nbytes))
        like = held.forms[source]

        def emit(target: Any, args: Any, collective: Any = None) -> fx.Node:
            new = self._emit(target, args, {}, like=held.source)
            new.meta.pop("grad_of", None)
            if collective is not None:
                new.meta["collective"] = collective
            return new

        node = Redistribution(emit, self.mesh, held.shape, reason).run(like, source, placement)
        if node is not like:
            node.meta["placement"] = placement
            if like.meta.get("grad_of"):
                node.meta["grad_of"] = like.meta["grad_of"]
        return node

    def _distance(self, source: Placements, target: Placements, nbytes: int) -> float:
        pairs = zip(source, target, self.mesh.axes, strict=True)
        return sum(cost(a, b, nbytes, axis.size, allow_split_sum=True) for a, b, axis in pairs)

    def _again(self, held: Value, placement: Placements) -> fx.Node | None:
        """Compute this rank's part of a whole value instead of cutting it, where that is cheap and free of traffic."""
        node = held.source
        whole = replicated(self.mesh)
        if held.primary != whole or node.op != "call_function" or not is_sharded(placement) or not _is_cheap(node):
            return None
        if any(isinstance(p, Partial) for p in placement) or not isinstance(node.meta["val"], torch.Tensor):
            return None
        operands = self._operands(node)
        call = self._call(node, operands)
        chosen: list[Option] = []
        for axis, wanted in zip(self.mesh.axes, placement, strict=True):
            at_axis = _narrowed(replace(call, size=axis.size), chosen, self.mesh)
            fits = [o for o in _with_whole(at_axis) if o.results[0] == wanted and _is_free(o, operands, len(chosen))]
            if not fits:
                return None
            chosen.append(min(fits, key=lambda o: sum(isinstance(p, Shard) for p in o.operands)))
        new = self._apply(node, call, operands, chosen)
        assert isinstance(new, Value)
        return new.forms[placement]

    def _settle_gradient(self, node: fx.Node) -> None:
        """Reduce a gradient, once it is complete, to where its parameter lives."""
        parameter = self.complete.get(node)
        held = self.values.get(node)
        if parameter is None or not isinstance(held, Value):
            return
        placement = self.placements[parameter]
        reason = Reason(Role.GRADIENT, "a gradient is the sum of the ranks' shares", (parameter,))
        settled = self._want(held, placement, reason)
        held.primary, held.forms = placement, {placement: settled}

    # -- emitting

    def _emit(self, target: Any, args: Any, kwargs: Any, like: fx.Node) -> fx.Node:
        new = self.graph.call_function(target, tuple(args), kwargs)
        self._describe(new, like, self._run(target, args, kwargs))
        return new

    def _describe(self, new: fx.Node, like: fx.Node, val: Any) -> None:
        for key in ("phase", "module", "source", "grad_of", "recompute_of"):
            if key in like.meta:
                new.meta[key] = like.meta[key]
        new.meta["val"] = val

    def _run(self, target: Any, args: Any, kwargs: Any) -> Any:
        vals = map_arg((tuple(args), kwargs), lambda n: n.meta["val"])
        with self._fake_mode(), torch.no_grad():
            return target(*vals[0], **vals[1])  # type: ignore[index]

    def _fake_mode(self) -> Any:
        for node in self.roles:
            val = node.meta["val"]
            if isinstance(val, torch.Tensor):
                return val.fake_mode  # type: ignore[attr-defined]
        raise PartitionError("expected a program with at least one tensor input")

    def _check(self, node: fx.Node, new: fx.Node, shapes: Sequence[tuple[int, ...] | None]) -> None:
        """Local shape x mesh = global shape, for every node."""
        vals = _flat_results(new.meta["val"])
        for val, shape in zip(vals, shapes, strict=True):
            if shape is not None and tuple(val.shape) != shape:
                raise PartitionError(
                    f"the rule of {node.target} promises local results of shape {shape}, the op gave {tuple(val.shape)} "
                    f"at {node.meta.get('source') or node.name}: mend the rule, or register one with spmd.register_rule"
                )

    def _note_fallback(self, node: fx.Node, operands: Sequence[Value], axis: int) -> None:
        split = [held for held in operands if isinstance(held.primary[axis], Shard)]
        if split:
            nbytes = sum(held.nbytes for held in split)
            key = f"{node.target}"
            self.fallbacks.setdefault(
                key,
                f"{node.target} at {node.meta.get('source') or node.name} has no rule and runs whole on every rank: "
                f"{nbytes} bytes are gathered for it; register one with spmd.register_rule",
            )


def _last_gradients(program: Program) -> dict[fx.Node, str]:
    """For each parameter, the last node that is its whole gradient (with accumulation there are several)."""
    last: dict[str, fx.Node] = {}
    for node in program.graph.nodes:
        if "grad_of" in node.meta:
            last[node.meta["grad_of"]] = node
    return {node: parameter for parameter, node in last.items()}


def _options(call: Call) -> list[Option]:
    rule = rule_of(call.target)
    return rule(call) if rule is not None else []


def _with_whole(call: Call) -> list[Option]:
    whole = Option(tuple(Replicate() for _ in call.operands), tuple(r and Replicate() for r in call.results))
    return [whole, *_options(call)]


def _narrowed(call: Call, chosen: Sequence[Option], mesh: Mesh) -> Call:
    """The call with the shapes that the axes before have left."""
    if not any(isinstance(p, Shard) for o in chosen for p in (*o.operands, *o.results)):
        return call
    before = passes.Mesh(mesh.axes[: len(chosen)])

    def narrow(info: Info | None, place: tuple[Any, ...]) -> Info | None:
        return info and Info(local_shape(info.shape, place, before), info.dtype)

    operands = [narrow(i, tuple(o.operands[k] for o in chosen)) for k, i in enumerate(call.operands)]
    results = tuple(narrow(i, tuple(o.results[k] for o in chosen)) for k, i in enumerate(call.results))
    leaves = iter(operands)
    args, kwargs = _map_infos((call.args, call.kwargs), lambda _: next(leaves))
    localize = LOCALIZE.get(call.target)
    if localize is not None:
        args = localize(call, args, kwargs, tuple(i.shape if i else None for i in results))
    return replace(call, args=args, kwargs=kwargs, operands=tuple(operands), results=results)  # type: ignore[arg-type]


def _map_infos(tree: Any, function: Any) -> Any:
    if isinstance(tree, Info):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(_map_infos(item, function) for item in tree)
    if isinstance(tree, dict):
        return {key: _map_infos(item, function) for key, item in tree.items()}
    return tree


def _is_free(option: Option, operands: Sequence[Value], axis: int) -> bool:
    """Whether every operand can be had so without traffic."""
    return all(
        any(form[axis] == wanted or isinstance(form[axis], Replicate) for form in held.forms)
        and not isinstance(wanted, Partial)
        for held, wanted in zip(operands, option.operands, strict=True)
    )


def _is_cheap(node: fx.Node) -> bool:
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded in target.tags:
        return False
    name = target._schema.name.split("::")[1]
    makes = not any(isinstance(leaf, fx.Node) for leaf in _leaves(node))
    return torch.Tag.pointwise in target.tags or name in _CHEAP or makes or name.startswith("new_")


def _leaves(node: fx.Node) -> list[Any]:
    leaves: list[Any] = tree_flatten((node.args, node.kwargs))[0]
    return leaves


def _results(node: fx.Node) -> list[Any]:
    return _flat_results(node.meta["val"])


def _flat_results(val: Any) -> list[Any]:
    return list(val) if isinstance(val, (tuple, list)) else [val]


def _tensors_in(val: Any) -> bool:
    return any(isinstance(v, torch.Tensor) for v in _flat_results(val))


def _info(val: Any) -> Info | None:
    return Info(tuple(val.shape), val.dtype) if isinstance(val, torch.Tensor) else None


