"""Sums over the whole batch that a micro-batch needs before it can go on: computed ahead, from inputs alone.

The count of labels that a loss divides by is the example. A sum that follows from parameters (batch statistics) cannot
be known before all micro-batches have run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from passes import Output, OutputKind, PartitionError, Program, Role
from passes.analysis.reachability import reached
from passes.cleanup.dead_code import DeadCode
from passes.ir.collectives import is_collective
from passes.ir.edit import add_input
from passes.ir.effects import is_random
from passes.ir.ops import Trait, has
from passes.ir.roles import Phase

from ..partitioner.partition_program import partition
from ..partitioner.plan import Plan
from .lines import described

WHOLE = "all of "
"""How the inputs begin that are all rows of an argument."""
_GIVEN = (Role.BUFFER, Role.BATCH, Role.ARGUMENT, Role.KEPT, Role.CONSTANT, Role.HYPER_PARAMETER)


def early(graph: fx.Graph, sums: Sequence[fx.Node], joined: Collection[fx.Node]) -> list[fx.Node]:
    """Sums that other sums are computed from, or rows that each micro-batch returns (``joined``)."""
    sources: dict[fx.Node, set[fx.Node]] = {}
    found = dict.fromkeys(sums, False)
    for node in graph.nodes:
        reads = [] if has(node.target, Trait.ZEROS, Trait.ONES, Trait.FULL) else node.all_input_nodes
        reached = set[fx.Node]().union(*(sources[each] for each in reads))
        if node in found or node in joined:
            found |= dict.fromkeys(reached, True)
        sources[node] = {node} if node in found else reached
    return [node for node, is_early in found.items() if is_early]


def compute_early(
    program: Program, captured: Program, plan: Plan, rows: Mapping[str, int], sums: Sequence[fx.Node]
) -> dict[str, str]:
    """Let ``program`` compute these sums from all rows of its arguments; returns the inputs that it takes for these.

    ``captured``: the global program, ``plan``: that of the ranks alone. Raises ``PartitionError``, with the user's
    line, for a sum that does not follow from arguments alone.
    """
    names = list(dict.fromkeys(_captured(node) for node in sums))
    ahead = partition(_of_nodes(captured, names, sums), plan)
    whole = {name: f"{WHOLE}{name}" for name in rows}
    copies: dict[fx.Node, fx.Node] = {}
    nodes = {each.name: node for each, node in zip(program.inputs, program.placeholders, strict=True)}
    taken = dict[str, str]()
    for declared, node in zip(ahead.inputs, ahead.placeholders, strict=True):
        if node.users and declared.name in rows:
            copies[node] = add_input(program, replace(declared, name=whole[declared.name]), node.meta["val"])
            taken[whole[declared.name]] = declared.name
        elif node.users:
            copies[node] = nodes[declared.name]
    first = next(node for node in program.graph.nodes if node.op != "placeholder")
    with program.graph.inserting_before(first):
        for node in ahead.graph.nodes:
            if node.op not in ("placeholder", "output"):
                copies[node] = program.graph.node_copy(node, copies.__getitem__)
                if is_collective(node):  # what it sums is no result of the step
                    described = replace(node.meta["collective"], role=Role.ACTIVATION, of=())
                    copies[node].meta["collective"] = described
    for name, value, output in zip(names, ahead.output_values(), ahead.outputs, strict=True):
        _replace(program, name, copies[value], output)
    DeadCode().rewrite(program)
    return taken


def floats(sums: Sequence[fx.Node]) -> list[fx.Node]:
    """Sums whose last bits depend on an order."""
    return [node for node in sums if node.meta["val"].is_floating_point()]


def _captured(node: fx.Node) -> str:
    """The captured node whose value a collective sums up."""
    (value,) = node.all_input_nodes
    while "captured" not in value.meta:  # a cast to the dtype of the sum
        (value,) = value.all_input_nodes
    return str(value.meta["captured"])


def _replace(program: Program, name: str, value: fx.Node, output: Output) -> None:
    """Let all readers of a captured node's whole value read what was computed ahead."""
    for node in list(program.graph.nodes):
        placement = node.meta.get("placement", ())
        if node.meta.get("captured") != name or len(placement) != len(program.mesh.axes) or node is value:
            continue
        if placement[-1].is_replicate() and placement[:-1] == output.placement:
            node.replace_all_uses_with(value)


def _of_nodes(captured: Program, names: Sequence[str], sums: Sequence[fx.Node]) -> Program:
    """The captured program that computes the values of some nodes alone."""
    own = captured.copy()
    by_name = {node.name: node for node in own.graph.nodes}
    for node in sums:
        _check_given(own, by_name[_captured(node)], node)
    values = [by_name[name] for name in names]
    outputs = [_result(f"ahead.{k}", value.meta["val"]) for k, value in enumerate(values)]
    own.set_outputs(values, outputs)
    for node in reversed(own.graph.nodes):
        if not node.users and node.op not in ("placeholder", "output"):  # checks, too: the whole program has them
            own.graph.erase_node(node)
    return own


def _result(name: str, val: torch.Tensor) -> Output:
    return Output(OutputKind.RESULT, name, Role.RESULT, tuple(val.shape), val.dtype)


def _check_given(program: Program, value: fx.Node, wait: fx.Node) -> None:
    if needs := _needed(program, value):
        if (reader := _behind_update(wait)) is not None:
            raise PartitionError(
                f"{described(wait)} is a sum by which the step updates parameters that {described(reader)} reads "
                "afterwards, in each micro-batch: they are known only when all have run. Compile what follows the "
                "update as a step of its own, which has the same numbers, or keep the batch whole (micro_batches=1)"
            )
        raise PartitionError(
            f"{described(wait)} is a sum over the whole batch that each micro-batch needs, and it follows from "
            f"{needs}: it is known only when all have run. Keep the batch whole (micro_batches=1); with "
            'micro_batches=, let each have sums of its own (statistics="per_micro_batch"); or look at each row by '
            "itself, as LayerNorm does and BatchNorm does not, and a mixture's loss for balance for each sequence: "
            "(chosen.mean(1) * scores.mean(1)).sum(-1).mean(), of (rows, tokens, experts)"
        )


def _behind_update(node: fx.Node) -> fx.Node | None:
    """The first node of forward that reads what the update computes from ``node``; None if there is none."""
    after, updated = {node}, set[fx.Node]()
    for each in node.graph.nodes:
        if after.isdisjoint(each.all_input_nodes):
            continue
        after.add(each)
        if each.meta.get("phase") is Phase.UPDATE or not updated.isdisjoint(each.all_input_nodes):
            updated.add(each)
        if each in updated and each.meta.get("phase") is Phase.FORWARD:
            return each  # type: ignore[no-any-return]
    return None


def of_activations(captured: Program, sums: Sequence[fx.Node]) -> list[fx.Node]:
    """Sums that do not follow from arguments alone."""
    by_name = {node.name: node for node in captured.graph.nodes}
    return [node for node in sums if _needed(captured, by_name[_captured(node)])]


def _needed(program: Program, value: fx.Node) -> str:
    """The source of a value that is known only in a run: a draw or an input; empty if there is none."""
    declared = dict(zip(program.placeholders, program.inputs, strict=True))
    for node in reached([value], lambda node: node.all_input_nodes):
        if is_random(node):
            return "a random draw"
        if node.op == "placeholder" and declared[node].role not in _GIVEN:
            return declared[node].name
    return ""
