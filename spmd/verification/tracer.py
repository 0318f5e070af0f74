"""Find the guilty stage: run the program after each one, and compare it with the captured program, node by node.

The captured program runs on the whole inputs, on one rank. A stage is guilty if its results are not those of the
captured program under their placements, or if it is exact and changes a bit of those of the stage before it. The first
wrong node of a guilty stage is the first whose value, put together from the ranks, is not that of its captured node,
nor what the captured op makes of the operands that the ranks have: an op may enlarge the rounding of these, as one that
divides a gradient which is nothing but rounding by its own size. Where one does, each node is compared once more, with
the rounding that its own operands have, since what is small beside 1 was compared with more than that.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Partial

from passes import Mesh, Output, Program
from passes.ir.collectives import is_collective
from passes.ir.ops import draws
from passes.ir.schemas import schema
from passes.runtime.random import draw

from .._torch import DisableAutocast, OpOverload
from ..placements import OwnRows
from ..ranks.differences import Difference, difference
from .compared_stages import Stage, kept, run_stage
from .lockstep import LockstepError
from .values import Values
from .wholes import UnequalReplicasError, put_together

aten = torch.ops.aten
_VIEWS = {aten.view.default, aten._unsafe_view.default}
_UNINITIALIZED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
# Where attention keeps the seed of its dropout, and nothing without one.
_OF_DROPOUT = {
    "_scaled_dot_product_efficient_attention": {2, 3},
    "_scaled_dot_product_flash_attention": {6, 7, 8},
    "_scaled_dot_product_cudnn_attention": {6, 7, 8},
}
_RERUNS = 2  # of a stage, to find the results that kernels of a GPU give otherwise each time
_SAMPLES, _TIMES = 3, 10  # of operands with other rounding, and how much further what is right may be off
_ENOUGH = 64  # drawn elements that are not equal by chance


@dataclass(frozen=True)
class Guilty:
    """A stage that is wrong; ``what``: the first result or state that is; ``node``: the first node, if it is known."""

    stage: str
    what: str
    difference: Difference
    node: fx.Node | None = None


@dataclass
class Tracer:
    """Compares the stages of one program. ``inputs``: of each rank, by name, as they were before the call."""

    captured: Program
    partitioned: Sequence[Program]
    inputs: Sequence[Values]
    rounding: float
    values: dict[str, Any] = field(default_factory=dict)  # of the captured program's nodes, once it ran
    enlarged: set[str] = field(default_factory=set)  # results and state that differ by rounding which ops enlarge
    _drawn: dict[str, Any] = field(default_factory=dict)
    _held: dict[str, Any] = field(default_factory=dict)  # the values of a stage's nodes, by their captured nodes
    _nodes: dict[str, fx.Node] = field(default_factory=dict)  # which have these values
    _enlarging: set[str] = field(default_factory=set)  # nodes that enlarge rounding, or read such ones

    @property
    def meshes(self) -> list[Mesh]:
        """The mesh as each rank sees it."""
        return [program.mesh for program in self.partitioned]

    @property
    def draws(self) -> bool:
        """Whether the program has random ops."""
        return self.partitioned[0].draws

    @cached_property
    def expected(self) -> Values:
        """The results of the captured program, whose random ops draw what those of the ranks drew."""
        wholes = self._whole_inputs()
        if self.draws:
            run_stage(self.partitioned, self.inputs, self._collect_draws)
        return self._run_captured(wholes, self.values)

    def expected_from(self, state: Values) -> Values:
        """The results of the captured program from another state, by name; of what that lacks, from its own."""
        wholes, nodes = self._whole_inputs(), dict[str, Any]()
        for node, declared in zip(self.captured.placeholders, self.captured.inputs, strict=True):
            if declared.name in state:
                wholes[declared.name] = _laid_out(state[declared.name], node.meta.get("val"))
        return self._run_captured(wholes, nodes)

    def _run_captured(self, wholes: Values, nodes: dict[str, Any]) -> Values:
        given = [wholes[declared.name] for declared in self.captured.inputs]
        runs = _Captured(self.captured, self._drawn, nodes)
        with torch.no_grad(), DisableAutocast():
            returned = runs.run(*given, enable_io_processing=False)
        return {output.name: value for output, value in zip(self.captured.outputs, returned, strict=True)}

    def _whole_inputs(self) -> Values:
        placed = {declared.name: declared for declared in self.partitioned[0].inputs}
        wholes = {}
        for node, declared in zip(self.captured.placeholders, self.captured.inputs, strict=True):
            parts = [values[declared.name] for values in self.inputs]
            placement = placed[declared.name].placement
            whole = put_together(parts, declared.shape, placement, self.meshes, self.rounding)
            wholes[declared.name] = _laid_out(whole, node.meta.get("val"))
        return wholes

    def _collect_draws(self, nodes: Sequence[fx.Node], values: Sequence[Any]) -> None:
        name = nodes[0].meta.get("captured")
        source = nodes[0].args[0] if nodes[0].args else None
        is_drawn = nodes[0].target is draw or (isinstance(source, fx.Node) and source.target is draw)
        placement = nodes[0].meta.get("placement")
        if name is None or not is_drawn or placement is None or any(_is_unknown(entry) for entry in placement):
            return
        self._drawn[name] = self._together(nodes, values)
        self._check_shards_differ(nodes, values)

    def _check_shards_differ(self, nodes: Sequence[fx.Node], values: Sequence[Any]) -> None:
        """Raise unless ranks that have different parts of a tensor drew different numbers."""
        placement = nodes[0].meta["placement"]
        owners = {
            tuple(a.coordinate for a, p in zip(m.axes, placement, strict=True) if p.is_shard()): k
            for k, m in enumerate(self.meshes)
        }
        for one, other in combinations(owners.values(), 2):
            a, b = values[one], values[other]
            if a.numel() >= _ENOUGH and a.unique().numel() > 1 and a.shape == b.shape and torch.equal(a, b):
                says = f"ranks {one} and {other} have different parts of it, but drew the same numbers"
                raise _WrongNode(nodes[0], Difference("different numbers", "equal numbers", says))

    def _together(self, nodes: Sequence[fx.Node], values: Sequence[Any]) -> Any:
        captured = self._captured_nodes[nodes[0].meta["captured"]]
        try:
            return put_together(
                values, captured.meta["val"].shape, nodes[0].meta["placement"], self.meshes, self.rounding
            )
        except UnequalReplicasError as error:
            raise _WrongNode(nodes[0], error.difference) from None

    @cached_property
    def _captured_nodes(self) -> Mapping[str, fx.Node]:
        return {node.name: node for node in self.captured.graph.nodes}

    def first_guilty(self, stages: Sequence[Stage]) -> Guilty | None:
        """The first stage that is wrong, None if all are right."""
        try:
            before: list[Values] | None = None
            expected = self.expected
        except _WrongNode as wrong:
            return Guilty("partition", str(wrong.node), wrong.difference, wrong.node)
        for stage in stages:
            found = self._guilty(stage, expected, before)
            if isinstance(found, Guilty):
                return found
            before = found
        return None

    def _guilty(self, stage: Stage, expected: Values, before: list[Values] | None) -> Guilty | list[Values]:
        watched = self.draws and before is None  # what a random op reads is not in what the captured one gives
        try:
            after = run_stage(stage.programs, self.inputs, self._compare if watched else None)
        except LockstepError as error:
            wrong = Difference("", "", str(error))
            return Guilty(stage.name, str(error.node), wrong, error.node)
        except _WrongNode as wrong_node:
            return Guilty(stage.name, str(wrong_node.node), wrong_node.difference, wrong_node.node)
        found = self._wrong_output(expected, after)
        node = self._first_wrong_node(stage) if found is not None else None
        if found is not None and node is None and self._is_enlarged_output(found[0], after):
            node = self._first_too_wrong()
        while found is not None and node is None and self._is_enlarged_output(found[0], after):
            self.enlarged.add(found[0])
            expected[found[0]] = self._whole_output(found[0], after)  # for the stages behind, and for what is written
            found = self._wrong_output(expected, after)
        if found is None and stage.exact and before is not None:
            after = [kept(values) for values in after]
            found = self._changed_bits(stage, before, after)
            node = self._first_wrong_node(stage) if found is not None else None
        if found is None:
            return [kept(values) for values in after]
        what, wrong = found
        return Guilty(stage.name, what, wrong if node is None else node[1], None if node is None else node[0])

    def _changed_bits(
        self, stage: Stage, before: Sequence[Values], after: Sequence[Values]
    ) -> tuple[str, Difference] | None:
        """The first bits that a stage changed; not those of a GPU's kernels that give others each time they run."""
        names = sorted({name for values in after for name in values})
        found = _changed_bits(before, after, names)
        if found is not None and any(isinstance(x, Tensor) and x.is_cuda for x in after[0].values()):
            again = [run_stage(stage.programs, self.inputs) for _ in range(_RERUNS)]
            names = [name for name in names if all(_changed_bits(after, each, [name]) is None for each in again)]
            found = _changed_bits(before, after, names)
        return found

    def _wrong_output(self, expected: Values, after: Sequence[Values]) -> tuple[str, Difference] | None:
        for name, value in expected.items():
            try:
                whole = self._whole_output(name, after)
            except UnequalReplicasError as error:
                return name, error.difference
            found = difference(value, whole, self.rounding)
            if found is not None:
                return name, found
        return None

    def _whole_output(self, name: str, after: Sequence[Values]) -> Any:
        output: Output = next(output for output in self.partitioned[0].outputs if output.name == name)
        parts = [values[name] for values in after]
        return put_together(parts, output.shape, output.placement, self.meshes, self.rounding)

    def _is_enlarged_output(self, name: str, after: Sequence[Values]) -> bool:
        """Whether a result is that of a node which enlarges rounding."""
        (returned,) = self.captured.graph.output_node().args
        nodes = zip(self.captured.outputs, returned, strict=True)  # type: ignore[arg-type]
        node = str(next(node for output, node in nodes if output.name == name))
        if node not in self._enlarging:
            return False
        whole = self._whole_output(name, after)
        return difference(self._held.get(node, whole), whole, self.rounding) is None

    def _first_too_wrong(self) -> tuple[fx.Node, Difference] | None:
        """The first node whose error is more than rounding of its operands makes, as far as these are held.

        Values that are small beside 1 were compared with a tolerance that an op may enlarge.
        """
        generator = torch.Generator().manual_seed(0)
        for name, whole in self._held.items():
            captured = self._captured_nodes[name]
            held = self._operands(captured)
            if held is None or not whole.is_floating_point():
                continue
            expected, allowed = self._applied(captured, held), torch.zeros_like(whole)
            for _ in range(_SAMPLES):
                moved = {node: _rounded(value, self.rounding, generator) for node, value in held.items()}
                allowed = allowed.maximum(_TIMES * (self._applied(captured, moved) - expected).abs())
            wrong = (whole - expected).abs() > allowed + self.rounding * expected.abs()
            if wrong.any():
                at = int(torch.where(wrong, (whole - expected).abs(), -1.0).argmax())
                one, other = expected.reshape(-1)[at].item(), whole.reshape(-1)[at].item()
                return self._nodes[name], Difference(one, other, f"expected {one!r}, got {other!r}")
        return None

    def _first_wrong_node(self, stage: Stage) -> tuple[fx.Node, Difference] | None:
        self._held.clear()
        try:
            run_stage(stage.programs, self.inputs, self._compare)
        except _WrongNode as wrong:
            return wrong.node, wrong.difference
        except LockstepError as error:
            return error.node, Difference("", "", str(error))
        return None

    def _compare(self, nodes: Sequence[fx.Node], values: Sequence[Any]) -> None:
        """Raise ``_WrongNode`` where the value of a node is not that of its captured node."""
        node = nodes[0]
        name, placement = node.meta.get("captured"), node.meta.get("placement")
        if name not in self.values or placement is None or is_collective(node):
            return
        if not all(isinstance(value, Tensor) for value in values) or any(_is_unknown(entry) for entry in placement):
            return
        self._held[name] = whole = self._together(nodes, values)
        self._nodes[name] = node
        found = difference(self.values[name], whole, self.rounding)
        if found is None:
            return
        if not self._follows_from_operands(self._captured_nodes[name], whole):
            raise _WrongNode(node, found)
        self._enlarging.add(name)

    def _follows_from_operands(self, captured: fx.Node, whole: Any) -> bool:
        """Whether the captured op makes ``whole`` of the operands that the ranks have, each of which was compared."""
        held = self._operands(captured)
        return held is not None and difference(self._applied(captured, held), whole, self.rounding) is None

    def _operands(self, captured: fx.Node) -> dict[fx.Node, Any] | None:
        """The operands of a captured op that the ranks have; of an element of several results, those of their op."""
        if captured.op != "call_function" or self.draws:
            return None
        if captured.target is operator.getitem:
            return self._operands(captured.all_input_nodes[0])
        held = {each: self._held.get(each.name, self._given(each)) for each in captured.all_input_nodes}
        return None if any(value is None for value in held.values()) else held

    def _applied(self, captured: fx.Node, held: Mapping[fx.Node, Any]) -> Any:
        """Apply a captured op to operands."""
        target: Any = captured.target
        if target is operator.getitem:
            return self._applied(captured.all_input_nodes[0], held)[captured.args[1]]
        args, kwargs = fx.map_arg((captured.args, captured.kwargs), held.__getitem__)
        with torch.no_grad(), DisableAutocast():
            return (aten.reshape.default if target in _VIEWS else target)(*args, **kwargs)

    def _given(self, captured: fx.Node) -> Any:
        """The value that all ranks have: of an input, or a number; None of any other node."""
        value = self.values.get(captured.name)
        return value if captured.op == "placeholder" or not isinstance(value, Tensor) else None


class _WrongNode(Exception):
    def __init__(self, node: fx.Node, wrong: Difference) -> None:
        super().__init__(wrong.says)
        self.node, self.difference = node, wrong


class _Captured(fx.Interpreter):
    """Runs the captured program, with what the ranks drew; keeps the value of each node."""

    def __init__(self, program: Program, drawn: Mapping[str, Any], values: dict[str, Any]) -> None:
        super().__init__(program.graph_module, garbage_collect_values=True)
        self.drawn, self.values = drawn, values

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Views as reshapes: kernels may choose other strides than their fakes did."""
        return super().call_function(aten.reshape.default if target in _VIEWS else target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node."""
        if n.name in self.drawn:
            value = self.drawn[n.name]
        elif isinstance(n.target, OpOverload) and draws(n.target, n.args, n.kwargs):
            value = None if _has_several(n) else super().run_node(n)
        else:
            value = super().run_node(n)
        if isinstance(value, (Tensor, int, float)) and n.name not in self.drawn and not _is_uninitialized(n):
            self.values[n.name] = value
        return value


def _rounded(value: Any, rounding: float, generator: torch.Generator) -> Any:
    """A value as other rounding may leave it."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    noise = 2 * torch.rand(value.shape, generator=generator, dtype=torch.float64) - 1
    return value * (1 + rounding * noise).to(value.device, value.real.dtype)


def _laid_out(value: Any, val: Any) -> Any:
    """A copy with the strides of a fake tensor."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(val.shape, val.stride(), dtype=value.dtype, device=value.device).copy_(value)


def _has_several(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (tuple, list))


def _is_uninitialized(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        source, index = node.args
        return isinstance(source, fx.Node) and index in _OF_DROPOUT.get(_name_of_op(source), ())
    return _name_of_op(node) in _UNINITIALIZED


def _name_of_op(node: fx.Node) -> str:
    return schema(node.target).name if isinstance(node.target, OpOverload) else ""


def _is_unknown(entry: Any) -> bool:
    """Whether parts under this placement cannot be put together: data says whose rows are whose, or it is no sum."""
    return isinstance(entry, OwnRows) or (isinstance(entry, Partial) and entry.reduce_op != "sum")


def _changed_bits(
    before: Sequence[Values], after: Sequence[Values], names: Sequence[str]
) -> tuple[str, Difference] | None:
    for rank, (one, other) in enumerate(zip(before, after, strict=True)):
        for name in names:
            found = difference(one[name], other[name], 0.0) if name in one and name in other else None
            if found is not None:
                says = f"on rank {rank}, the stage is exact, but {found.says}"
                return name, Difference(found.expected, found.actual, says)
    return None
