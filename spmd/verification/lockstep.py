"""Run the programs of all ranks in one process, node by node, in lockstep: collectives are computed over all ranks.

A result is not there before it is waited for, and operands are read as late as a backend may read them, so that a
missing wait and memory that is written too early show in the numbers. Memory that ranks publish to each other has to
keep its values until all ranks are known to have read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from passes import Mesh, Program, SpmdError
from passes.communication.published import reduces_in_place
from passes.ir.collectives import c10d, group_of, is_collective, is_shared, is_wait
from passes.ir.inline import inlined
from passes.ir.schemas import argument, schema
from passes.runtime.collective_ops import bounds

from .._torch import DisableAutocast, storage_id
from .collectives import COPIES_FIRST, SEMANTICS
from .poison import poison, poisoned, share_memory, tensors_of

Watch = Callable[[Sequence[fx.Node], Sequence[Any]], None]  # the node of each rank, and its value there


class LockstepError(SpmdError):
    """The programs of the ranks do not fit together, or a node raised. ``node``: the one of rank 0."""

    def __init__(self, message: str, node: fx.Node) -> None:
        super().__init__(message)
        self.node = node


def run_in_lockstep(
    programs: Sequence[Program], inputs: Sequence[Sequence[Any]], watch: Watch | None = None
) -> list[tuple[Any, ...]]:
    """Run the program of each rank on its inputs, which are written to as a program says; returns its outputs.

    ``watch`` is called after every node, in a region too. Raises ``LockstepError``.
    """
    programs = [inlined(program) for program in programs]
    lengths = [len(program.graph.nodes) for program in programs]
    if len(set(lengths)) != 1:
        raise LockstepError(
            f"expected all ranks to run the same ops, but their programs have {lengths} nodes", programs[0].output_node
        )
    with torch.no_grad(), DisableAutocast():
        return _Lockstep(programs, inputs, watch).run()


@dataclass
class _Pending:
    """A collective that was started: the operands of all ranks, their arguments, and where the results go."""

    node: fx.Node
    operands: list[Any]
    arguments: list[dict[str, Any]]
    results: list[list[Tensor]]


@dataclass
class _Lockstep:
    programs: Sequence[Program]
    inputs: Sequence[Sequence[Any]]
    watch: Watch | None
    pending: list[_Pending] = field(default_factory=list)

    def run(self) -> list[tuple[Any, ...]]:
        ranks = [_Rank(program, given) for program, given in zip(self.programs, self.inputs, strict=True)]
        self.published = Published()
        for nodes in zip(*(program.graph.nodes for program in self.programs), strict=True):
            self._check_equal(nodes)
            try:
                values = self._step(ranks, nodes)
            except LockstepError:
                raise
            except Exception as error:
                raise LockstepError(f"{type(error).__name__}: {error}", nodes[0]) from error
            if nodes[0].op == "output":
                self.published.check_all(nodes[0])
                return [tuple(each) if isinstance(each, (list, tuple)) else (each,) for each in values]
            if self.watch is not None:
                self.watch(nodes, values)
            for rank, node, value in zip(ranks, nodes, values, strict=True):
                rank.keep(node, value)
        raise AssertionError("every graph ends in an output")

    def _check_equal(self, nodes: Sequence[fx.Node]) -> None:
        for rank, node in enumerate(nodes):
            if (node.op, node.target) != (nodes[0].op, nodes[0].target) and node.op not in ("placeholder", "get_attr"):
                raise LockstepError(
                    f"expected all ranks to run the same ops, but rank 0 runs {nodes[0].format_node()} where rank "
                    f"{rank} runs {node.format_node()}",
                    nodes[0],
                )

    def _step(self, ranks: Sequence[_Rank], nodes: Sequence[fx.Node]) -> list[Any]:
        if is_collective(nodes[0]):
            return self._start(ranks, nodes)
        values = [rank.value(node) for rank, node in zip(ranks, nodes, strict=True)]
        if is_wait(nodes[0]):
            self._wait(values)
        return values

    def _start(self, ranks: Sequence[_Rank], nodes: Sequence[fx.Node]) -> list[Any]:
        node = nodes[0]
        arguments = [rank.arguments(each) for rank, each in zip(ranks, nodes, strict=True)]
        names = [each.name for each in schema(node.target).arguments]
        operands = [given[names[0]] for given in arguments]
        if is_shared(node):
            self.published.start(node, [x for x in operands if isinstance(x, Tensor)])
        if node.target in COPIES_FIRST:
            operands = [_cloned(x) for x in operands]
        given = [_target(each) for each in arguments]
        if node.target is c10d.all_reduce_.default:
            given = [each[names[0]] for each in arguments]
        results = [x if x is not None else poisoned(each.meta["val"]) for x, each in zip(given, nodes, strict=True)]
        flat = [tensors_of(each) for each in results]
        reads_late = is_shared(node) and given[0] is not None  # and writes late, so others may use the memory so long
        for written, read in zip(flat, operands, strict=True):
            if not reads_late and (node.target in COPIES_FIRST or not share_memory(written, tensors_of(read))):
                poison(written)
        self.pending.append(_Pending(node, operands, arguments, flat))
        return results

    def _wait(self, values: Sequence[Any]) -> None:
        """Finish what writes into the storage of ``values``; nothing, if that was waited for."""
        storages = [{storage_id(x) for x in tensors_of(value)} for value in values]
        for each in [p for p in self.pending if _writes_to(p, storages)]:
            self.pending.remove(each)
            self._finish(each)

    def _finish(self, pending: _Pending) -> None:
        group = group_of(pending.node)
        computed: dict[int, Any] = {}
        for members in groups_of(self.programs, group, pending.node):
            operands = [pending.operands[rank] for rank in members]
            arguments = [pending.arguments[rank] for rank in members]
            results = SEMANTICS[pending.node.target](operands, arguments)
            computed |= dict(zip(members, results, strict=True))
        for rank, into in enumerate(pending.results):
            for tensor, result in zip(into, tensors_of(computed[rank]), strict=True):
                tensor.copy_(result.reshape(tensor.shape))
        if is_shared(pending.node) and reduces_in_place(pending.node):
            self._overwrite_operands(pending, computed)
        self.published.wait(pending.node)

    def _overwrite_operands(self, pending: _Pending, computed: Mapping[int, Any]) -> None:
        """Let each rank have reduced its part in its operand, where the others read it from then on."""
        for members in groups_of(self.programs, group_of(pending.node), pending.node):
            for k, rank in enumerate(members):
                operand, result = pending.operands[rank].view(-1), computed[rank].reshape(-1)
                start, stop = list(pairwise(bounds(operand.numel(), len(members))))[k]
                operand[start:stop].copy_(result[start:stop])
        self.published.publish_again(pending.node)


class _Rank(fx.Interpreter):
    """One rank: the values that later nodes read."""

    def __init__(self, program: Program, inputs: Sequence[Any]) -> None:
        super().__init__(program.graph_module)
        self.args_iter = iter(inputs)

    def value(self, node: fx.Node) -> Any:
        """The value of a node; of the output node, what the graph returns."""
        return self.run_node(node)

    def arguments(self, node: fx.Node) -> dict[str, Any]:
        """The values of a node's arguments, by the names of the op's schema."""
        declared = [each.name for each in schema(node.target).arguments]
        return {name: fx.node.map_arg(argument(node, name), self.env.__getitem__) for name in declared}

    def keep(self, node: fx.Node, value: Any) -> None:
        """Keep a value, and let go of those that this node was the last to read."""
        self.env[node] = value
        for dead in self.user_to_last_uses.get(node, ()):
            self.env.pop(dead, None)


class Published:
    """Tensors that other ranks may look at, and must find unchanged.

    Who waits for a collective knows that all ranks have waited for those that were waited for before it started.
    """

    def __init__(self) -> None:
        self._all: dict[fx.Node, list[tuple[Tensor, Tensor]]] = {}
        self._waited: list[fx.Node] = []
        self._before: dict[fx.Node, list[fx.Node]] = {}

    def start(self, node: fx.Node, tensors: Sequence[Tensor]) -> None:
        """A collective publishes these."""
        self._all[node] = [(x, x.clone()) for x in tensors]
        self._before[node] = list(self._waited)

    def publish_again(self, node: fx.Node) -> None:
        """Other ranks read what the operands hold now."""
        self._all[node] = [(now, now.clone()) for now, _ in self._all.get(node, ())]

    def wait(self, node: fx.Node) -> None:
        """A collective was waited for. Raises ``LockstepError`` if what was read by then has changed."""
        if node in self._all:
            self._waited.append(node)
            for read in self._before[node]:
                self._check(read)

    def check_all(self, node: fx.Node) -> None:
        """The call is over. Raises ``LockstepError`` if anything that was published has changed."""
        for each in list(self._all):
            self._check(each)

    def _check(self, node: fx.Node) -> None:
        for now, then in self._all.pop(node, ()):
            if not same_bits(now, then):
                raise LockstepError(
                    f"the operand of {node} is overwritten while other ranks may still read it: it has to keep its "
                    "values until they have",
                    node,
                )


def groups_of(programs: Sequence[Program], group: str, node: fx.Node) -> Iterator[list[int]]:
    """The groups of ranks, by number, that communicate under a name: those that differ along its axis alone."""
    coordinates = [_position(program.mesh, group, node) for program in programs]
    found: dict[Any, list[tuple[int, int]]] = {}
    for rank, (others, coordinate) in enumerate(coordinates):
        found.setdefault(others, []).append((coordinate, rank))
    for members in found.values():
        yield [rank for _, rank in sorted(members)]


def _position(mesh: Mesh, group: str, node: fx.Node) -> tuple[Any, int]:
    """(the coordinates that the ranks of this rank's group have in common, its place among them)."""
    axis = mesh.axis_of_group(group)
    if axis is None:
        raise LockstepError(f"{node} communicates in a group that is no axis of the mesh: {group!r}", node)
    whole = next(each for each in mesh.axes if each.name == axis.name.partition("/")[0])
    others = tuple(each.coordinate for each in mesh.axes if each is not whole)
    return (others, whole.coordinate // axis.size if axis is not whole else 0), axis.coordinate


def _target(arguments: dict[str, Any]) -> Any:
    """The tensor that an out variant writes into, None for any other op."""
    return arguments.get("out")


def _cloned(value: Any) -> Any:
    return [x.clone() for x in value] if isinstance(value, (list, tuple)) else value.clone()


def _writes_to(pending: _Pending, storages: Sequence[set[int]]) -> bool:
    """By storage, as torch does it, and not by address: results of two collectives may lie in the same memory."""
    written = zip(pending.results, storages, strict=True)
    return any(storage_id(x) in waited for results, waited in written for x in results)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaN being equal to NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or (
        (one.is_floating_point() or one.is_complex()) and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    )
