"""Make small programs from functions over ``torch.ops``, and run them on simulated ranks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from passes import (
    Axis,
    Canonicalize,
    FoldLayoutCopies,
    Kind,
    Mesh,
    OutputKind,
    Pass,
    Program,
    ReuseMemory,
    Role,
    check,
    fill_vals,
    print_program,
    run,
)
from passes.communication.published import reduces_in_place
from passes.ir.collectives import (
    WAIT,
    c10d,
    group_of,
    is_collective,
    is_shared,
    is_wait,
    kind_of,
    operands,
    reduction_of,
)
from passes.runtime.collective_ops import bounds
from passes.runtime.message_collectives import swap

GROUP = "0"
MESH = Mesh((Axis("dp", 2, GROUP),))
PLAN_MEMORY: tuple[Pass, ...] = (Canonicalize(), FoldLayoutCopies(), ReuseMemory())


def all_reduce(x: Any, reduction: str = "sum") -> Any:
    return WAIT(c10d.all_reduce.default(x, reduction, GROUP))


def all_gather(x: Any) -> Any:
    return WAIT(c10d.all_gather_into_tensor.default(x, MESH.size, GROUP))


def reduce_scatter(x: Any, reduction: str = "sum", ranks: int = MESH.size) -> Any:
    return WAIT(c10d.reduce_scatter_tensor.default(x, reduction, ranks, GROUP))


def f64(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float64)


def make_program(
    function: Callable[..., tuple[Any, ...]],
    updates: dict[int, str] | None = None,
    roles: Sequence[Role] = (),
    mesh: Mesh = MESH,
    **inputs: Any,
) -> Program:
    """The program of ``function`` on a mesh, traced without data.

    ``updates``: by position of the output, the input whose new value it is. ``roles``: one for each collective, in
    order, or one for all.
    """
    graph_module = fx.symbolic_trace(function)
    graph_module.graph._codegen = fx.graph.CodeGen()
    with FakeTensorMode() as mode:
        vals = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in inputs.values()]
    for node, val in zip(graph_module.graph.find_nodes(op="placeholder"), vals, strict=True):
        node.meta["val"] = val
    _rename(graph_module.graph)
    program = Program.from_graph(graph_module, mesh=mesh)
    fill_vals(program)
    _describe(program, roles)
    program.outputs = [
        replace(output, kind=OutputKind.UPDATE, name=updates[k]) if k in (updates or {}) else output
        for k, output in enumerate(program.outputs)
    ]
    check(program)
    return program


def _rename(graph: fx.Graph) -> None:
    """Call nodes as make_fx calls them: ``mul``, not ``mul_tensor``."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            node._rename(node.target._schema.name.split("::")[1])


def _describe(program: Program, roles: Sequence[Role]) -> None:
    nodes = program.collectives()
    each = list(roles) * (len(nodes) if len(roles) == 1 else 1)
    for node, role in zip(nodes, each, strict=False):
        of = (operands(node)[0].name,)
        node.meta["collective"] = replace(node.meta["collective"], role=role, of=of, why=f"{role} of {of[0]}")


def before_and_after(program: Program, *passes: Pass) -> tuple[Program, str]:
    """The program after ``passes``, and the text of both."""
    after = run(program, passes)
    return after, f"{print_program(program)}\n{'=' * 40} after {'=' * 40}\n\n{print_program(after)}"


@dataclass
class Step:
    """What one call leaves: results, and the value of every input."""

    results: dict[str, Any]
    inputs: dict[str, Any]


def simulate(programs: Program | Sequence[Program], inputs: Sequence[Sequence[Any]]) -> list[Step]:
    """Run one program, or one for each rank, on a list of inputs per rank, and apply updates. Inputs are not touched.

    A collective other than all_reduce, which copies first, reads its operands only at the wait: the
    latest that a backend may. Ranks that share memory may read it until all are known to have
    (``_Published``).
    """
    each_its = [programs] * len(inputs) if isinstance(programs, Program) else programs
    copies = [[x.clone() if isinstance(x, torch.Tensor) else x for x in each] for each in inputs]
    ranks = [_Rank(program, each) for program, each in zip(each_its, copies, strict=True)]
    published = _Published()
    for nodes in zip(*(program.graph.nodes for program in each_its), strict=True):
        everyone = list(zip(ranks, nodes, strict=True))
        if is_collective(nodes[0]):
            pending = [[rank.env[operand] for operand in operands(node)] for rank, node in everyone]
            if is_shared(nodes[0]):
                published.start(nodes[0], [x for each in pending for x in each])
            early = kind_of(nodes[0]) is Kind.ALL_REDUCE
            for rank, node in everyone:
                rank.env[node] = [[x.clone() for x in each] for each in pending] if early else pending
        elif is_wait(nodes[0]):
            for k, (rank, node) in enumerate(everyone):
                started = node.args[0]
                rank.env[node] = _written(started, rank, _collect(started, rank.env[started], k))
            if is_shared(nodes[0].args[0]) and reduces_in_place(nodes[0].args[0]):
                published.start(nodes[0].args[0], _reduce_in_operands(everyone))
            published.wait(nodes[0].args[0])
        else:
            for rank, node in everyone:
                rank.step(node)
    published.check(published.all)
    return [rank.finish() for rank in ranks]


class _Published:
    """What other ranks may look at, and must find unchanged.

    Who waits for a collective knows that all ranks have waited for those that were waited for before it started.
    """

    def __init__(self) -> None:
        self.all: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.waited: list[Any] = []
        self.before: dict[Any, list[Any]] = {}

    def start(self, node: fx.Node, tensors: list[torch.Tensor]) -> None:
        self.all[node] = [(x, x.clone()) for x in tensors]
        self.before[node] = list(self.waited)

    def wait(self, node: Any) -> None:
        if node in self.all:
            self.waited.append(node)
            self.check(self.before[node])

    def check(self, nodes: Iterable[Any]) -> None:
        for node in list(nodes):
            assert all(torch.equal(now, then) for now, then in self.all.pop(node, ()))


def _written(started: fx.Node, rank: _Rank, value: torch.Tensor) -> torch.Tensor:
    """The result, in the memory that a collective was given for it."""
    in_place = started.target is c10d.all_reduce_.default
    target = started.args[0] if in_place else started.kwargs.get("out")
    return rank.env[target].copy_(value) if isinstance(target, fx.Node) else value


def _reduce_in_operands(waits: Sequence[tuple[_Rank, fx.Node]]) -> list[torch.Tensor]:
    """The operands, in which each rank has reduced its part."""
    published = []
    for k, (rank, wait) in enumerate(waits):
        operand = rank.env[wait.args[0].args[0]].view(-1)  # type: ignore[union-attr, index]
        start, stop = bounds(operand.numel(), len(waits))[k : k + 2]
        operand[start:stop] = rank.env[wait].view(-1)[start:stop]
        published.append(operand)
    return published


def _collect(node: fx.Node, sent: list[list[torch.Tensor]], rank: int) -> torch.Tensor:
    tensors = [each[0] for each in sent]
    assert group_of(node) == GROUP and all(t.is_contiguous() for t in tensors if kind_of(node) is not Kind.ALL_REDUCE)
    if "lengths" in [argument.name for argument in node.target._schema.arguments]:
        return _member_by_member(node, tensors, rank)
    if kind_of(node) is Kind.ALL_GATHER:
        return torch.cat(tensors)
    if node.target is swap.default:
        return tensors[1 - rank].chunk(2)[rank]
    if kind_of(node) is Kind.ALL_TO_ALL:
        return torch.stack([t.chunk(len(sent))[rank] for t in tensors])
    total = torch.stack([t.contiguous() for t in tensors])
    total = {"sum": total.sum(0, dtype=total.dtype), "max": total.amax(0)}[str(reduction_of(node))]
    return total if kind_of(node) is Kind.ALL_REDUCE else total.chunk(len(sent))[rank].clone()


def _member_by_member(node: fx.Node, tensors: list[torch.Tensor], rank: int) -> torch.Tensor:
    """What a bucket gives whose members lie one after the other."""
    if kind_of(node) is Kind.ALL_GATHER:
        pieces = [each.split(node.args[1]) for each in tensors]
        return torch.cat([piece for member in zip(*pieces, strict=True) for piece in member])
    members = sum(tensors).split([len(tensors) * length for length in node.args[2]])  # type: ignore[union-attr]
    return torch.cat([member.chunk(len(tensors))[rank] for member in members])


class _Rank(fx.Interpreter):
    def __init__(self, program: Program, inputs: list[Any]) -> None:
        super().__init__(program.graph_module)
        self.program, self.inputs = program, inputs
        self.args_iter = iter(inputs)
        self.returned: tuple[Any, ...] = ()

    def step(self, node: fx.Node) -> None:
        if node.op == "output":
            self.returned = fx.node.map_arg(node.args[0], self.env.__getitem__)
        else:
            self.env[node] = self.run_node(node)

    def finish(self) -> Step:
        values = _unfolded(self.program, self.inputs)
        pairs = list(zip(self.program.outputs, self.returned, strict=True))
        results = {output.name: value for output, value in pairs if output.kind is not OutputKind.UPDATE}
        values |= {output.name: value for output, value in pairs if output.kind is OutputKind.UPDATE}
        return Step(results, values)


def random_inputs(program: Program, ranks: int = 2, seed: int = 0) -> list[list[Any]]:
    """Inputs for each rank, different on each."""
    generator = torch.Generator().manual_seed(seed)
    vals = [node.meta["val"] for node in program.placeholders]
    return [
        [
            torch.randn(val.shape, generator=generator, dtype=torch.float64).to(val.dtype)
            if isinstance(val, torch.Tensor)
            else val
            for val in vals
        ]
        for _ in range(ranks)
    ]


def assert_same_bits(before: Program, after: Program | Sequence[Program], ranks: int = 2) -> None:
    """Both leave the same bits on each of two ranks with different inputs; ``after``, of one for all ranks or one for
    each, shares no more memory.
    """
    inputs = random_inputs(before, ranks)
    stored = after if isinstance(after, Program) else after[0]
    same = [stored_flat(before, stored, each) for each in inputs]
    for one, other in zip(simulate(before, inputs), simulate(after, same), strict=True):
        _assert_equal(one.results, other.results)
        _assert_equal(one.inputs, other.inputs)
        assert _overlaps(other) <= _overlaps(one)


def _overlaps(left: Step) -> set[tuple[str, str]]:
    """The pairs of results, and of a result and an input, that share memory."""
    results, everything = _spans(left.results), _spans(left.inputs | left.results)
    return {
        (one, other)
        for one, (start, end) in results.items()
        for other, (begin, stop) in everything.items()
        if one != other and start < stop and begin < end
    }


def _spans(values: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """The first and last address of each tensor."""
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor) and value.numel()}
    return {
        name: (
            x.data_ptr(),
            x.data_ptr() + x.element_size() * (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))),
        )
        for name, x in tensors.items()
    }


def _assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other[name]), f"{name}: {value} became {other[name]}"
            assert value.dtype == other[name].dtype
        else:
            assert value == other[name]


def stored_flat(before: Program, after: Program, inputs: Sequence[Any]) -> list[Any]:
    """The inputs of ``before`` as ``after`` takes them, which may store some of them flat."""
    given = {declared.name: value for declared, value in zip(before.inputs, inputs, strict=True)}
    return [
        torch.cat([given[part.input.name].reshape(-1) for part in declared.parts])
        if declared.parts
        else given[declared.name]
        for declared in after.inputs
    ]


def _unfolded(program: Program, inputs: Sequence[Any]) -> dict[str, Any]:
    """The inputs by name, with the parts of flat ones instead of these."""
    values: dict[str, Any] = {}
    for declared, value in zip(program.inputs, inputs, strict=True):
        parts = {p.input.name: value[p.offset : p.offset + p.numel].view(p.shape) for p in declared.parts}
        values |= parts or {declared.name: value}
    return values


def targets(program: Program) -> list[str]:
    """The ops of a program, in order: ``mul.Tensor``, ``getitem``."""
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    return [
        "getitem"
        if node.target is operator.getitem
        else str(node.target).removeprefix("aten.").removeprefix("_c10d_functional.")
        for node in nodes
    ]


CUDA = torch.device("cuda", 0)


def moved_to_cuda(value: Any) -> Any:
    """A fake tensor like this one on a GPU."""
    if not isinstance(value, torch.Tensor):
        return value
    with value.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CUDA)
