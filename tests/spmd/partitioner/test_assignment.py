"""Assignments: written, read back, changed for one node, emitted, refused, and their cost without a program."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn import functional as F

import passes
import spmd
from passes.ir.collectives import input_bytes
from spmd.partitioner.assignment import Move, MoveKind
from spmd.partitioner.partition_program import emit
from tests.harness.fake import fake_world
from tests.harness.pool import Ranks

R, P, HALF = Replicate(), Partial(), torch.float32  # half of the model's float64


def S(dim: int) -> Shard:
    return Shard(dim)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def training(classes: int = 12) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, classes)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, torch.randn(16, 8, dtype=torch.float64), torch.randint(classes, (16,))


SEEN: list[tuple[passes.Program, spmd.Plan]] = []


class Given(spmd.DTensorExpand):
    """Plans with an assignment or a solver."""

    def __init__(self, assignment: Any = None, solver: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.given, self.solver = assignment, solver

    def plan(self, program: passes.Program) -> spmd.Plan:
        plan = replace(super().plan(program), assignment=self.given, solver=self.solver)
        SEEN.append((program, plan))
        return plan


COLUMNS = {"model.0.weight": {"tp": Shard(0)}, "model.0.bias": {"tp": Shard(0)}, "model.2.weight": {"tp": Shard(1)}}
MODES: dict[str, Callable[[], dict[str, Any]]] = {
    "replicate": lambda: {"mode": spmd.DataParallel("replicate", shard_optimizer=True)},
    "fully_shard": lambda: {"mode": spmd.DataParallel("fully_shard")},
    "narrow": lambda: {"mode": spmd.DataParallel("fully_shard", reduce_dtype=HALF, gather_dtype=HALF)},
    "wide": lambda: {"mode": spmd.DataParallel("replicate", reduce_dtype=torch.float32), "dtype": torch.bfloat16},
    "two axes": lambda: {"sizes": (2, 2), "params": COLUMNS},
    "classes": lambda: {"sizes": (2, 2), "params": {"model.2.*": {"tp": Shard(0)}}},
    "uneven": lambda: {"sizes": (1, 3), "params": {"model.2.*": {"tp": Shard(0)}, "model.0.*": {"tp": Shard(0)}}},
}


@cache
def partitioned(name: str) -> tuple[spmd.Problem, passes.Program]:
    """The problem of the training step in a mode, and the program that it is partitioned to."""
    options = MODES[name]()
    sizes, mode, dtype = options.pop("sizes", (4,)), options.pop("mode", None), options.pop("dtype", torch.float64)
    found: list[tuple[passes.Program, spmd.Plan]] = []
    with fake_world(torch.Size(sizes).numel()):
        if mode is None:
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
            mode = spmd.DTensorExpand(mesh=mesh, inputs={"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}}, **options)
        plan = mode.plan
        mode.plan = lambda program: found.append((program, plan(program))) or found[-1][1]
        model, optimizer, x, y = training(12 if name != "uneven" else 10)
        spmd.compile(step, parallel_mode=mode, passes=())(model.to(dtype), optimizer, x.to(dtype), y)
        problem = spmd.Problem.of(*found[0])
        return problem, spmd.partition(*found[0])


def whole(problem: spmd.Problem, **choices: spmd.Choice) -> spmd.Assignment:
    return spmd.Assignment(problem.axes, choices)


def product(problem: spmd.Problem, number: int) -> str:
    """The name of a forward product of the model, in order."""
    ops = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return [n.name for n in problem.program.graph.nodes if n.target in ops][number]


@pytest.mark.parametrize("name", MODES)
def test_an_assignment_is_read_back_and_emits_the_same_program(name: str) -> None:
    problem, program = partitioned(name)
    read = spmd.Assignment.read(program.assignment.text({"mm": "a comment"}))
    assert read == program.assignment and hash(read) == hash(program.assignment) and read.digest
    again = spmd.partition(problem.program, problem.plan, read)
    assert again.assignment == read and passes.print_program(again) == passes.print_program(program)
    other = read.changed({product(problem, 0): spmd.Choice()})
    assert other != read and other.digest != read.digest
    assert spmd.Assignment.read(str(other)) == other == copy.deepcopy(other)


@pytest.mark.parametrize("name", MODES)
def test_the_cost_of_an_assignment_is_that_of_its_program(name: str) -> None:
    problem, program = partitioned(name)
    assert_costs_what_it_communicates(problem, program)
    assert problem.cost(whole(problem)) == problem.cost(program.assignment)


def assert_costs_what_it_communicates(problem: spmd.Problem, program: passes.Program) -> None:
    cost, emitted = problem.cost(program.assignment), program.collectives()
    assert emitted and cost.seconds > 0
    expected = Counter((n.meta["collective"].kind, n.meta["collective"].axis, input_bytes(n)) for n in emitted)
    assert Counter((each.kind, each.axis, each.nbytes) for each in cost.traffic) == expected


def test_a_decomposition_can_be_assigned() -> None:
    problem, usual = partitioned("classes")
    op = torch.ops.aten._log_softmax.default
    name = next(node.name for node in problem.program.graph.nodes if node.target is op)
    given = whole(problem, **{name: spmd.Choice(decomposed=not usual.assignment.choices[name].decomposed)})
    program = spmd.partition(problem.program, problem.plan, given)
    inner = [[n for n in p.assignment.choices if n.startswith(f"{name}/")] for p in (usual, program)]
    assert sorted(map(bool, inner)) == [False, True]
    read = spmd.Assignment.read(str(program.assignment))
    assert passes.print_program(emit(problem, problem.complete(read))) == passes.print_program(program)
    assert_costs_what_it_communicates(problem, program)


def test_a_part_is_obeyed_and_the_rest_filled_in() -> None:
    problem, program = partitioned("two axes")
    name = product(problem, 1)
    assert program.assignment.choices[name].gives == ((S(0), P),)
    given = whole(problem, **{name: spmd.Choice(gives=((S(0), S(1)),))})
    changed = spmd.partition(problem.program, problem.plan, given)
    assert changed.assignment.choices[name].gives == ((S(0), S(1)),)
    assert changed.assignment.choices[name].reads != program.assignment.choices[name].reads
    assert problem.cost(given).seconds > problem.cost(program.assignment).seconds
    assert problem.cost(given).traffic != problem.cost(program.assignment).traffic
    assert passes.print_program(emit(problem, problem.complete(given))) == passes.print_program(changed)


def test_alternatives_are_listed_with_their_costs_and_each_can_be_assigned() -> None:
    problem, program = partitioned("two axes")
    name = product(problem, 1)
    listed = problem.alternatives(program.assignment)[name]
    assert len(listed) > 4 and all(seconds >= 0 for _, seconds in listed)
    assert program.assignment.choices[name].gives in [choice.gives for choice, _ in listed]
    tried = [choice for choice, _ in listed[:: len(listed) // 4]]
    completed = [problem.complete(whole(problem, **{name: choice})) for choice in tried]
    assert [each.choices[name].gives for each in completed] == [choice.gives for choice in tried]
    assert len({problem.cost(each).traffic for each in completed}) > 1


class Columns:
    """A solver that computes the second product by columns, and leaves the rest open."""

    def solve(self, problem: spmd.Problem, given: spmd.Assignment) -> spmd.Assignment:
        return given.changed({product(problem, 1): spmd.Choice(gives=((S(0), S(1)),))})


@pytest.mark.parametrize("by", ["assignment", "solver"])
def test_a_changed_assignment_computes_what_the_plain_step_does(by: str) -> None:
    problem, program = partitioned("two axes")
    by_columns = program.assignment.changed({product(problem, 1): spmd.Choice(gives=((S(0), S(1)),))})
    given = {"assignment": by_columns} if by == "assignment" else {"solver": Columns()}
    mode = Given(inputs={"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}}, params=COLUMNS, **given)
    assert spmd.verify(spmd.compile(step, parallel_mode=mode), *training(), steps=2, mesh={"dp": 2, "tp": 2})
    changed = spmd.Problem.of(*SEEN[-1])
    usual, other = (counted(changed, each) for each in (spmd.Assignment(problem.axes), by_columns))
    assert usual == counted(problem, program.assignment) != other
    emitted = Counter(node.meta["collective"].kind for node in spmd.partition(*SEEN[-1]).collectives())
    assert emitted == other


def counted(problem: spmd.Problem, assignment: spmd.Assignment) -> Counter[Any]:
    return Counter(each.kind for each in problem.cost(assignment).traffic)


GRADIENT = Move(MoveKind.GRADIENT, 0, (R, R))
WRONG: dict[str, tuple[Callable[[str], dict[str, spmd.Choice]], str]] = {
    "no such node": (lambda name: {"mm_99": spmd.Choice(gives=((R, R),))}, "the program has no such node"),
    "no option": (lambda name: {name: spmd.Choice(gives=((S(0), S(0)),), reads=((R, R),) * 3)}, "no option reads"),
    "operands": (lambda name: {name: spmd.Choice(reads=((R, R),))}, r"has 3 tensor operands, but is assigned reads="),
    "axes": (lambda name: {name: spmd.Choice(gives=((R,),))}, r"one placement per mesh axis \['dp', 'tp'\]"),
    "moves": (lambda name: {name: spmd.Choice(then=(GRADIENT,))}, "has no result 0 that is a gradient to move"),
    "rows": (lambda name: {name: spmd.Choice(then=(Move(MoveKind.ROWS, 0, (S(0), R)),))}, "no result 0 that is a rows"),
    "sum": (lambda name: {name: spmd.Choice(then=(Move(MoveKind.SUM, 0, (S(7), R)),))}, "that can be moved to"),
    "before": (lambda name: {name: spmd.Choice(then=(Move(MoveKind.SUM, -1, (R, R)),))}, "no value -1 that can"),
    "decomposed": (lambda name: {name: spmd.Choice(decomposed=True)}, "has no decomposition"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_by_a_sentence(case: str) -> None:
    problem, _ = partitioned("two axes")
    name = product(problem, 1)
    choices, sentence = WRONG[case]
    with pytest.raises(spmd.PartitionError, match=sentence) as caught:
        spmd.partition(problem.program, problem.plan, whole(problem, **choices(name)))
    if case != "no such node":
        assert f"{name} (aten.addmm.default, test_assignment.py:" in str(caught.value)
    if case == "no option":
        assert "The options are: reads [" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("assignment('dp', whole=True)\nnode('mm', reads=[S(x)])", "in line 2"),
        ("node('mm', reeds=[R])", "line 1"),
        ("mm = 3", "line 1 is no call"),
        ("node(", "the text is no assignment"),
    ],
)
def test_text_that_is_no_assignment_is_refused_with_its_line(text: str, sentence: str) -> None:
    with pytest.raises(spmd.PartitionError, match=sentence):
        spmd.Assignment.read(text)


def test_another_mesh_and_another_placement_of_state_are_refused() -> None:
    problem, program = partitioned("two axes")
    with pytest.raises(spmd.PartitionError, match=r"over the mesh axes \['dp', 'tp'\], got one over \['x'\]"):
        spmd.partition(problem.program, problem.plan, spmd.Assignment(("x",)))
    outputs = {name: (S(0), S(0)) for name in program.assignment.outputs if "0.weight" in name}
    with pytest.raises(spmd.PartitionError, match="is assigned"):
        spmd.partition(problem.program, problem.plan, replace(program.assignment, outputs=outputs))


class ByDim:
    """Computes the batched product by one of its dims."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def solve(self, problem: Any, given: spmd.Assignment) -> spmd.Assignment:
        graph = problem.program.graph
        (product,) = graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)
        return given.changed({product.name: spmd.Choice(gives=((S(self.dim),),))})


def solves_alone(rank: int, world: int) -> str:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    model, x = nn.Linear(4, 4).double(), torch.rand(2, 4, 4, dtype=torch.float64)
    mode = Given(solver=ByDim(1 + rank), mesh=mesh, inputs={"x": {"tp": R}})
    with pytest.raises(passes.RankMismatchError, match="assignment of nodes") as raised:
        spmd.compile(lambda model, x: torch.bmm(x, x) + model.bias, parallel_mode=mode)(model, x)
    return str(raised.value)


def test_ranks_whose_solvers_choose_differently_raise(ranks: Ranks) -> None:
    ranks.run(2, solves_alone)
