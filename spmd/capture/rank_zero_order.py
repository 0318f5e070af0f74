"""Rank 0's order: give a captured program, its inputs and its results the order in which rank 0 traced them.

Python decides some orders anew in each process: a ``set`` of strings has the order of their hashes, which depend on a
seed of the process. Ranks that run the same code on the same state then trace one graph in different orders. Here the
ranks compare what they traced, and where it differs, all of them rebuild it in the order of rank 0: nodes are matched
by structure (``structural_keys.py``), names and numbers of draws are rank 0's. From here on their programs are equal,
down to the text. A program that does not match stays as it is, and ranks raise when they compare programs.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import fx

from passes import Input, Output, OutputKind, Phase, Role
from passes.analysis.structural_keys import is_commutative, operands, structural_keys

from .._torch import tree_map
from ..call.call import Call
from ..call.tree import paths_of
from ..ranks.consensus import AllGatherText
from ..ranks.equal_values import hash_of
from .captured import Captured, FromOutput


def in_rank_zero_order(captured: Captured, call: Call, all_gather_text: AllGatherText) -> Captured:
    """``captured`` as rank 0 would have traced it; ``call.slots`` follow the order of the inputs.

    All ranks call it together.
    """
    text = _text(captured)
    if len(set(all_gather_text(hashlib.sha256(text.encode()).hexdigest()))) == 1:
        return captured
    keys, is_first = _keys(captured), not any(axis.coordinate for axis in call.mesh.axes)
    order = _Order.read(all_gather_text(_Order.of(captured, keys).write() if is_first else "")[0])
    matched = _match(order, captured, keys)
    if matched is None:
        return captured
    rebuilt = _rebuilt(captured, order, matched)
    positions = {declared.name: k for k, declared in enumerate(rebuilt.program.inputs)}
    call.slots = sorted(call.slots, key=lambda slot: positions[slot.input.name])
    return rebuilt


def _text(captured: Captured) -> str:
    """All of a captured program that later decisions depend on."""
    program = captured.program
    metas = [(node.name, *_meta(node)) for node in program.graph.nodes]
    inputs = [declared.name for declared in program.inputs]
    return json.dumps([inputs, _output_ids(captured), _constant_ids(captured), metas, captured.code])


@dataclass(frozen=True)
class _Described:
    """A node of rank 0's: its operands by their positions in the order, and what it says that may differ elsewhere."""

    name: str
    key: str
    operands: list[int]
    phase: str | None
    module: str | None
    draw: int | None


@dataclass(frozen=True)
class _Order:
    """The nodes of rank 0 in order, inputs included, and its outputs, each as (what it is, its name)."""

    nodes: list[_Described]
    outputs: list[tuple[str, str]]

    @classmethod
    def of(cls, captured: Captured, keys: Mapping[fx.Node, str]) -> _Order:
        """The order of a program as it is."""
        program = captured.program
        position = {node: k for k, node in enumerate(keys)}
        nodes = [
            _Described(node.name, key, [position[each] for each in operands(node)], *_meta(node))
            for node, key in keys.items()
        ]
        names = [output.name for output in program.outputs]
        return cls(nodes, list(zip(_output_ids(captured), names, strict=True)))

    def write(self) -> str:
        """The order as text."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> _Order:
        """The inverse of ``write``."""
        found = json.loads(text)
        return cls([_Described(**each) for each in found["nodes"]], [(what, name) for what, name in found["outputs"]])


def _meta(node: fx.Node) -> tuple[str | None, str | None, int | None]:
    """(phase, module, number of the draw)."""
    return node.meta.get("phase"), node.meta.get("module"), node.meta.get("draw")


def _keys(captured: Captured) -> dict[fx.Node, str]:
    """The structural key of each node, in the order of the graph."""
    program = captured.program
    constants = iter(_constant_ids(captured))
    inputs = {
        node: next(constants) if declared.role is Role.CONSTANT else f"{declared.role} {declared.name}"
        for node, declared in zip(program.placeholders, program.inputs, strict=True)
    }
    keys = structural_keys(program.graph, inputs, _output_ids(captured))
    return {node: keys[node] for node in program.graph.nodes if node.op != "output"}


def _constant_ids(captured: Captured) -> list[str]:
    """The identity of each constant, by its contents, in order: names only number constants as they are met."""
    return [f"constant {c.dtype} {list(c.shape)} {hash_of(c)}" for c in captured.constants]


def _output_ids(captured: Captured) -> list[str]:
    """The identity of each output: a result by its path in what the step returns, all others by name."""
    leaves = zip(captured.result_leaves, paths_of(captured.result_spec), strict=True)
    paths = {leaf.index: path for leaf, path in leaves if isinstance(leaf, FromOutput)}
    index, found = count(), []
    for output in captured.program.outputs:
        path = None if output.kind is OutputKind.UPDATE else paths.get(next(index))
        found.append(f"{output.kind} {output.name}" if path is None else f"result at {path}")
    return found


def _match(order: _Order, captured: Captured, keys: Mapping[fx.Node, str]) -> list[fx.Node] | None:
    """This rank's node for each of rank 0's, in the order of rank 0; None where there is none, or one is left."""
    by_key: dict[str, list[fx.Node]] = defaultdict(list)
    for node, key in keys.items():
        by_key[key].append(node)
    position: dict[fx.Node, int] = {}
    for described in order.nodes:
        candidates = by_key[described.key]
        fitting = next((each for each in candidates if _fits(each, described, position)), None)
        if fitting is None:
            return None
        candidates.remove(fitting)
        position[fitting] = len(position)
    complete = not any(by_key.values()) and _same_draws(order, list(position))
    same_outputs = sorted(_output_ids(captured)) == sorted(what for what, _ in order.outputs)
    return list(position) if complete and same_outputs else None


def _fits(node: fx.Node, described: _Described, position: Mapping[fx.Node, int]) -> bool:
    """Whether the operands of ``node`` have been matched with those of rank 0's."""
    found = [position.get(each, -1) for each in operands(node)]
    return found == described.operands or (is_commutative(node) and found == described.operands[::-1])


def _same_draws(order: _Order, matched: Sequence[fx.Node]) -> bool:
    """Whether the same nodes draw the same numbers again."""
    pairs = {(node.meta.get("draw"), each.draw) for node, each in zip(matched, order.nodes, strict=True)}
    return len(pairs) == len({mine for mine, _ in pairs}) == len({theirs for _, theirs in pairs})


def _rebuilt(captured: Captured, order: _Order, matched: Sequence[fx.Node]) -> Captured:
    program = captured.program
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node, described in zip(matched, order.nodes, strict=True):
        read = [matched[k] for k in described.operands]  # two that commute may have another order there
        copies[node] = _copy_as(graph, node, described, copies, read if is_commutative(node) else node.args)
    names = {node.name: copy.name for node, copy in copies.items()}
    for copy in copies.values():
        if "recompute_of" in copy.meta:
            copy.meta["recompute_of"] = names[copy.meta["recompute_of"]]
    inputs, constants = _inputs(captured, matched)
    outputs, values, index = _outputs(captured, order)
    graph.output(tuple(copies[v] if isinstance(v, fx.Node) else v for v in values))
    graph.output_node().meta = dict(program.output_node.meta)
    rebuilt = replace(captured, program=program.with_graph(graph, inputs, outputs), constants=constants)
    return _with_indices(rebuilt, index)


def _copy_as(
    graph: fx.Graph, node: fx.Node, described: _Described, copies: Mapping[fx.Node, fx.Node], args: Sequence[Any]
) -> fx.Node:
    """A copy of ``node`` on ``args`` that has the name, the numbers and the place in the step that rank 0 gave it."""
    args, kwargs = fx.map_arg((tuple(args), dict(node.kwargs)), copies.__getitem__)
    target = described.name if node.op == "placeholder" else node.target
    copy = graph.create_node(node.op, target, args, kwargs, name=described.name)
    own = {"phase": described.phase and Phase(described.phase), "module": described.module, "draw": described.draw}
    copy.meta = {**node.meta, **{key: value for key, value in own.items() if value is not None}}
    return copy


def _inputs(captured: Captured, matched: Sequence[fx.Node]) -> tuple[list[Input], list[torch.Tensor]]:
    """The inputs in the new order, and the constants among them, numbered anew."""
    program = captured.program
    at = {node: k for k, node in enumerate(program.placeholders)}
    inputs = [program.inputs[at[node]] for node in matched if node in at]
    by_name = {f"constant.{k}": constant for k, constant in enumerate(captured.constants)}
    constants = [by_name[declared.name] for declared in inputs if declared.role is Role.CONSTANT]
    numbers = count()
    renamed = [replace(i, name=f"constant.{next(numbers)}") if i.role is Role.CONSTANT else i for i in inputs]
    return renamed, constants


def _outputs(captured: Captured, order: _Order) -> tuple[list[Output], list[Any], dict[int, int]]:
    """The outputs in the new order, their values, and the new index of each that is no update, by the old one."""
    program, values = captured.program, captured.program.output_values()
    at = {what: k for k, what in enumerate(_output_ids(captured))}
    places = [at[what] for what, _ in order.outputs]
    outputs = [replace(program.outputs[k], name=name) for k, (_, name) in zip(places, order.outputs, strict=True)]
    before = [k for k, output in enumerate(program.outputs) if output.kind is not OutputKind.UPDATE]
    after = [k for k in places if program.outputs[k].kind is not OutputKind.UPDATE]
    return outputs, [values[k] for k in places], {before.index(k): new for new, k in enumerate(after)}


def _with_indices(captured: Captured, index: Mapping[int, int]) -> Captured:
    """``captured`` with each reference to an output at its new index."""

    def moved(value: Any) -> Any:
        return FromOutput(index[value.index]) if isinstance(value, FromOutput) else value

    new_state = [replace(new, value=tree_map(moved, new.value), unless=moved(new.unless)) for new in captured.new_state]
    writes = [replace(write, leaves=[moved(leaf) for leaf in write.leaves]) for write in captured.writes]
    leaves = [moved(leaf) for leaf in captured.result_leaves]
    return replace(captured, result_leaves=leaves, new_state=new_state, writes=writes)
