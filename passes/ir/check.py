"""Check that a program is well formed, at every stage. Cheap enough to run after each pass."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..errors import PassError
from ..runtime.arena import has_arena
from .collectives import Collective, channel_of, group_of, is_collective, is_message, is_wait, kind_of, peer_of
from .effects import is_functional, is_profiling, mutates
from .meta import DECLARED, is_declared
from .ops import Trait, has
from .program import Input, OutputKind, Program
from .region import Island, Region, copy_, regions
from .schemas import argument


def check(program: Program, before: Program | None = None) -> None:
    """Raise ``PassError`` with a sentence if ``program`` is not well formed.

    With ``before``, the program that a pass was given, also if the pass lost or changed what the program returns.
    """
    _graph_is_sound(program)
    _inputs_match(program)
    _outputs_match(program)
    _members_write_as_declared(program)
    for node in program.graph.nodes:
        _node_is_described(node)
        _keys_are_declared(node)
        _is_functional(program, node)
        _is_about_values(node)
        _communicates_properly(program, node)
    for node, region in regions(program.graph).items():
        _region_is_sound(node, region)
    if before is not None:
        _same_promise(before, program)


def _graph_is_sound(program: Program) -> None:
    try:
        program.graph.lint()
    except RuntimeError as error:
        raise PassError(f"the graph of {program.name} is broken: {error}") from error


def _inputs_match(program: Program) -> None:
    names = [node.name for node in program.placeholders]
    if len(names) != len(program.inputs):
        raise PassError(
            f"{program.name} describes {len(program.inputs)} inputs, "
            f"but its graph has {len(names)} placeholders: {', '.join(names)}"
        )
    _unique("inputs", [declared.name for each in program.inputs for declared in (each, *_parts(each))])
    _parts_are_shown(program)


def _members_write_as_declared(program: Program) -> None:
    for each in (program, *program.earlier.values()):
        written = _updated(each)
        if each.writes is not None and written != each.writes:
            raise PassError(
                f"{each.name} is declared to write {sorted(each.writes)} and nothing else, but writes {sorted(written)}"
            )


def _parts(declared: Input) -> list[Input]:
    return [part.input for part in declared.parts]


def _parts_are_shown(program: Program) -> None:
    updated = {output.name for output in program.outputs if output.kind is OutputKind.UPDATE}
    parts = {each.name for declared in program.inputs for each in _parts(declared)}
    lost = sorted(updated & parts - program.values().keys())
    if lost:
        raise PassError(
            f"a flat input of {program.name} holds {lost}, but its graph does not show where they lie in it"
        )


def _outputs_match(program: Program) -> None:
    values = program.output_values()
    if len(values) != len(program.outputs):
        raise PassError(
            f"{program.name} describes {len(program.outputs)} outputs, but its graph returns {len(values)} values"
        )
    for kind in (OutputKind.UPDATE, OutputKind.NEW):
        _unique(f"{kind} outputs", [output.name for output in program.outputs if output.kind is kind])
    inputs = program.values()
    for value, output in zip(values, program.outputs, strict=True):
        if output.kind is OutputKind.UPDATE:
            if output.name not in inputs:
                raise PassError(f"an output updates {output.name!r}, but {program.name} has no input of that name")
            _updates_an_input(*inputs[output.name], value)


def _updates_an_input(declared: Input, node: fx.Node, value: Any) -> None:
    name = declared.name
    if declared.in_place:
        raise PassError(f"{name!r} is updated in place and also by an output; leave out one of them")
    old, new = _type(node), _type(value)
    if old != new:
        raise PassError(f"the update of {name!r} must be {old}, as the input is, but it is {new}")


def _type(value: Any) -> str:
    """The type that an update must have in common with its input, as text."""
    val = value.meta.get("val") if isinstance(value, fx.Node) else value
    if isinstance(val, torch.Tensor):
        return f"{val.dtype}{list(val.shape)}"
    return "a number" if isinstance(val, (int, float, torch.SymInt, torch.SymFloat)) else type(val).__name__


def _node_is_described(node: fx.Node) -> None:
    if node.op.startswith("call_") and node.users and "val" not in node.meta and not is_profiling(node):
        raise PassError(
            f"{node.name} ({node.target}) has no meta['val'], which says its shape and dtype; "
            "passes.fill_vals(program) infers what is missing"
        )


def _keys_are_declared(node: fx.Node) -> None:
    if node.meta.keys() <= DECLARED.keys():
        return  # the common case, and quicker than to look at each
    unknown = [key for key in node.meta if not is_declared(key)]
    if unknown:
        raise PassError(
            f"{node.name} ({node.target}) has meta[{unknown[0]!r}], which is not declared: add it to KEYS in "
            f"passes/ir/meta.py, or, if it is your own, put a dot in its name, as in 'mypackage.{unknown[0]}'"
        )


def _is_functional(program: Program, node: fx.Node) -> None:
    if mutates(node) and not any(declared.in_place for declared in program.inputs) and not has_arena(program.graph):
        raise PassError(
            f"{node.name} ({node.target}) writes to its argument, but the program is functional until its last pass: "
            "return the new value as an update output instead"
        )


def _region_is_sound(call: fx.Node, region: Region) -> None:
    """A region computes tensors of tensors, of the types that its call declares, and does nothing else."""
    try:
        region.graph.lint()
    except RuntimeError as error:
        raise PassError(f"the graph of {region} is broken: {error}") from error
    outs = region.outs if isinstance(region, Island) else []
    for node in region.nodes:
        _node_is_described(node)
        _keys_are_declared(node)
        _is_about_values(node)
        if not (is_functional(node) or (node.target is copy_ and node.args[0] in outs)):
            raise PassError(
                f"{node.name} ({node.target}) is inside {region}, but a region is for a backend: it holds functional "
                "ops of aten alone, no collectives, random draws, writes, or memory of ours"
            )
    _same_types(f"{call.name} passes {region}", list(call.args), f"{region} takes", region.placeholders)
    returned = call.meta["val"] if isinstance(call.meta.get("val"), tuple) else ()
    _same_types(f"{call.name} declares", list(returned), f"{region} returns", list(region.results))


def _same_types(one: str, values: list[Any], other: str, nodes: list[fx.Node]) -> None:
    here, there = [[_type(each) for each in side] for side in (values, nodes)]
    if here != there:
        raise PassError(f"{one} {', '.join(here) or 'nothing'}, but {other} {', '.join(there) or 'nothing'}")


def _is_about_values(node: fx.Node) -> None:
    if has(node.target, Trait.READS_MEMORY):
        raise PassError(
            f"{node.name} ({node.target}) depends on where its operand lies in memory, which passes change: take the "
            "same elements by slices, diagonals, reshapes or indices"
        )


def _communicates_properly(program: Program, node: fx.Node) -> None:
    if is_wait(node) and not _is_pending(program, node.args[0]):
        raise PassError(f"{node.name} waits for {node.args[0]}, which is no collective")
    if is_collective(node):
        _collective_is_described(program, node)
        _result_is_waited_for(program, node, node)
        if is_message(node) and not node.users:
            raise PassError(f"nobody waits for {node.name}: a message ends with a wait, or is handed on")


def _is_pending(program: Program, value: Any) -> bool:
    """Whether a value is what a collective brings, of this program or of the one before it."""
    while isinstance(value, fx.Node) and value.target is operator.getitem:
        value = value.args[0]
    if not isinstance(value, fx.Node) or is_collective(value):
        return isinstance(value, fx.Node)
    inputs = zip(program.placeholders, program.inputs, strict=True) if value.op == "placeholder" else ()
    return any(node is value and declared.role.is_of_channel for node, declared in inputs)


def _collective_is_described(program: Program, node: fx.Node) -> None:
    described = node.meta.get("collective")
    if not isinstance(described, Collective):
        raise PassError(f"{node.name} has no meta['collective'] to say what it communicates and why")
    axes = (*program.mesh.axes, *program.mesh.subgroups)
    group, names = group_of(node), {axis.name for axis in axes}
    if axes and (program.mesh.axis_of_group(group) is None or described.axis not in names):
        raise PassError(
            f"{node.name} communicates in group {group!r} over axis {described.axis!r}, but the mesh has "
            + ", ".join(f"{axis.name} (group {axis.group!r})" for axis in axes)
        )
    axis, size = program.mesh.axis_of_group(group), argument(node, "group_size")
    if axis is not None and size is not None and size != axis.size:
        raise PassError(f"{node.name} expects {size} ranks, but {axis.name} has {axis.size}: its result has their rows")


def _result_is_waited_for(program: Program, collective: fx.Node, result: fx.Node) -> None:
    for user in result.users:
        if user.target is operator.getitem:
            _result_is_waited_for(program, collective, user)
        elif not is_wait(user) and not (user.op == "output" and _is_handed_on(program, result)):
            raise PassError(f"{user.name} reads the result of {collective.name} before a wait")


def _is_handed_on(program: Program, result: fx.Node) -> bool:
    """Whether all outputs that a value is are for the program that waits for it."""
    pairs = zip(program.output_values(), program.outputs, strict=True)
    return all(output.kind is OutputKind.CHANNEL for value, output in pairs if value is result)


def _same_promise(before: Program, after: Program) -> None:
    """The same results, new state, pending values, messages, updates, by an output or in place, and inputs of runs."""
    for kind in (OutputKind.RESULT, OutputKind.NEW, OutputKind.CHANNEL):
        old, new = _returned(before, kind), _returned(after, kind)
        if old != new:
            raise PassError(f"the {kind} outputs were {old} and are now {new}")
    if _messages(before) != _messages(after):
        raise PassError(
            f"messages were {_messages(before)} and are now {_messages(after)}: other ranks have their ends"
        )
    lost = _updated(before) ^ _updated(after)
    if lost:
        raise PassError(f"what a program updates must stay the same, but it does not for {sorted(lost)}")
    lost = {each.name for each in before.inputs if before.varies(each)} - after.positions().keys()
    if lost:
        raise PassError(f"each run takes its own {sorted(lost)}, but {after.name} has no such inputs any more")


def _messages(program: Program) -> list[str]:
    """The sends and recvs, in order."""
    found = [node for node in program.graph.nodes if is_message(node)]
    return [f"{kind_of(node)} of {channel_of(node)}, peer {peer_of(node)}" for node in found]


def _returned(program: Program, kind: OutputKind) -> list[tuple[str, str]]:
    pairs = zip(program.outputs, program.output_values(), strict=True)
    return [(output.name, _type(value)) for output, value in pairs if output.kind is kind]


def _updated(program: Program) -> set[str]:
    declared = [inside for each in program.inputs for inside in each.inside]
    written = {each.name for each in declared if each.in_place}
    return written | {output.name for output in program.outputs if output.kind is OutputKind.UPDATE}


def _unique(what: str, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise PassError(f"the {what} need names of their own, but these occur more than once: {twice}")
