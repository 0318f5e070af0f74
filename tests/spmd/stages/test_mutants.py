"""Mutants of a small pipeline: wrong orders, messages, sums and memory. The proof or a run of all ranks finds them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn import functional as F

import passes
import spmd
from passes import OutputKind, PassError, Program, Role
from passes.ir.bundle import Bundle, messages_of
from passes.ir.check_bundle import check_bundle
from passes.ir.collectives import Kind, is_wait, kind_of
from passes.ir.micro_batches import ACCUMULATOR
from spmd.verification.certificate import certify_bundle
from spmd.verification.lockstep import LockstepError
from spmd.verification.runs import run_programs
from tests.harness.fake import fake_world

from . import test_bundles

aten = torch.ops.aten
Edit = tuple[str, Callable[[Program], None]]  # the role of a program, and what changes it


class Skips(nn.Module):
    """Two values of one shape go from the first stage to the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.tanh(self.a(x)), torch.sigmoid(self.b(x))
        return self.d(torch.tanh(self.c(left)) * right)


def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


def programs_of(stages: Sequence[str] = ("c",), micro_batches: int = 3, **mode: Any) -> tuple[Program, Program]:
    """The captured step, and the share of rank 0, before any pass."""
    torch.manual_seed(0)
    model, x = Skips().double(), torch.randn(2 * micro_batches, 3).double()
    mode |= {"axes": {"stages": "pp"}, "micro_batches": micro_batches, "stages": [*stages]}
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        compiled = spmd.compile(step, parallel_mode=spmd.DataParallel(mesh=mesh, **mode), passes=())
        compiled(model, torch.optim.SGD(model.parameters(), lr=0.1), x, x)
        last: Any = compiled._dispatch.programs.last
        return last.captured.program, last.program


@pytest.fixture(scope="module")
def programs() -> tuple[Program, Program]:
    """Of two stages, with three micro-batches."""
    return programs_of()


@pytest.fixture(scope="module")
def program(programs: tuple[Program, Program]) -> Program:
    """The share of rank 0."""
    return programs[1]


def outcome(program: Program, bundle: Bundle) -> list[Any]:
    """What the ranks return and update; numbers are drawn for all inputs, as a call would bring them."""
    ranks, random = [], torch.Generator().manual_seed(0)
    for k in range(2):
        axes = tuple(replace(each, coordinate=k) for each in program.mesh.axes)
        ranks.append(replace(program, mesh=replace(program.mesh, axes=axes), stages=bundle))
    assert program.micro_batches is not None
    given, split, count = [], program.micro_batches.split, len(program.micro_batches.runs)
    for declared, node in zip(program.inputs, program.placeholders, strict=True):
        val, value = node.meta["val"], 0.1
        if isinstance(val, Tensor):
            shape = [val.shape[0] * count, *val.shape[1:]] if declared.name in split else val.shape
            value = torch.randn(shape, generator=random, dtype=val.dtype)
        given.append(value)
    returned = run_programs(ranks, [copy.deepcopy(given) for _ in ranks])
    return [value for of_rank in returned for value in of_rank if isinstance(value, Tensor)]


def is_caught(program: Program, expected: list[Any], mutant: Bundle) -> bool:
    """Whether the proof refuses a mutant, or its ranks do not end, or something that they return differs."""
    try:
        check_bundle(mutant)
        got = outcome(program, mutant)
    except (PassError, LockstepError):
        return True
    return len(got) != len(expected) or any(
        a.shape != b.shape or not torch.allclose(a, b, 1e-9, 1e-12) for a, b in zip(expected, got, strict=True)
    )


# Orders


def dropped_programs(bundle: Bundle) -> Iterator[Bundle]:
    """One run of a program is missing."""
    for k, order in enumerate(bundle.calls["step"]):
        for role in dict.fromkeys(order):
            rest = list(order)
            rest.remove(role)
            yield _with_order(bundle, k, rest)


def repeated_programs(bundle: Bundle) -> Iterator[Bundle]:
    """A program runs once too often."""
    for k, order in enumerate(bundle.calls["step"]):
        for role in dict.fromkeys(order):
            at = order.index(role)
            yield _with_order(bundle, k, [*order[:at], role, *order[at:]])


def _with_order(bundle: Bundle, rank: int, order: list[str]) -> Bundle:
    orders = [tuple(order) if k == rank else each for k, each in enumerate(bundle.calls["step"])]
    return bundle.with_orders({"step": tuple(orders)})


# Programs


def _edited(bundle: Bundle, edits: Iterator[Edit]) -> Iterator[Bundle]:
    for role, edit in edits:
        own = bundle.programs[role].copy()
        edit(own)
        yield bundle.with_programs({**bundle.programs, role: own})


def _nodes(bundle: Bundle, wanted: Callable[[fx.Node], bool]) -> Iterator[tuple[str, str]]:
    for role, program in bundle.programs.items():
        yield from ((role, node.name) for node in program.graph.nodes if wanted(node))


def _named(program: Program, name: str) -> fx.Node:
    return next(node for node in program.graph.nodes if node.name == name)


def _is_send(node: fx.Node) -> bool:
    return "collective" in node.meta and kind_of(node) is Kind.SEND


def swapped_sends(bundle: Bundle) -> Iterator[Bundle]:
    """Two values of a shape go to each other's receivers."""

    def operands(program: Program) -> None:
        first, second, *_ = filter(_is_send, messages_of(program))
        given = first.args[0], second.args[0]
        second.prepend(first)
        first.update_arg(0, given[1])
        second.update_arg(0, given[0])

    several = [role for role, each in bundle.programs.items() if sum(map(_is_send, messages_of(each))) > 1]
    yield from _edited(bundle, ((role, operands) for role in several))


def changed_messages(bundle: Bundle) -> Iterator[Bundle]:
    """A message goes to a channel that nobody has."""
    for role, name in _nodes(bundle, lambda node: "collective" in node.meta):

        def edit(program: Program, name: str = name) -> None:
            node = _named(program, name)
            node.update_arg(len(node.args) - 2, "elsewhere")

        yield from _edited(bundle, iter([(role, edit)]))


def missing_events(bundle: Bundle) -> Iterator[Bundle]:
    """What arrives is read before it has."""
    for role, name in _nodes(bundle, lambda node: is_wait(node) and bool(node.users)):

        def edit(program: Program, name: str = name) -> None:
            node = _named(program, name)
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            program.graph.erase_node(node)

        yield from _edited(bundle, iter([(role, edit)]))


def dropped_accumulators(bundle: Bundle) -> Iterator[Bundle]:
    """The value of the last micro-batch, or nothing, in the place of the sum."""
    yield from _outputs(bundle, OutputKind.UPDATE, ACCUMULATOR, lambda value, held: value.args[1])
    yield from _outputs(bundle, OutputKind.UPDATE, ACCUMULATOR, lambda value, held: held)


def lost_updates(bundle: Bundle) -> Iterator[Bundle]:
    """A parameter stays as it is."""
    yield from _outputs(bundle, OutputKind.UPDATE, Role.PARAMETER, lambda value, held: held)


def _outputs(bundle: Bundle, kind: OutputKind, of: Role, other: Callable[[fx.Node, fx.Node], Any]) -> Iterator[Bundle]:
    for role, program in bundle.programs.items():
        for k, output in enumerate(program.outputs):
            if (output.kind, output.role) == (kind, of):

                def edit(program: Program, k: int = k) -> None:
                    values, outputs = list(program.output_values()), program.outputs
                    values[k] = other(values[k], program.placeholders[program.positions()[outputs[k].name]])
                    program.set_outputs(values, outputs)

                yield from _edited(bundle, iter([(role, edit)]))


def lost_norms(bundle: Bundle) -> Iterator[Bundle]:
    """What a stage sends of its gradients' norm is zero, or what arrives of it."""

    def is_exchanged(node: fx.Node) -> bool:
        return is_wait(node) and bool(node.users)

    for role, name in _nodes(bundle, lambda node: _is_send(node) or is_exchanged(node)):
        if role.startswith(("exchange", "update")):

            def edit(program: Program, name: str = name) -> None:
                node = _named(program, name)
                sent = node.args[0] if _is_send(node) else node
                assert isinstance(sent, fx.Node)
                with program.graph.inserting_after(sent):
                    zeros = program.graph.call_function(aten.zeros_like.default, (sent,))
                zeros.meta["val"] = sent.meta["val"]
                sent.replace_all_uses_with(zeros, delete_user_cb=lambda user: user not in (zeros,))

            yield from _edited(bundle, iter([(role, edit)]))


def reused_memory(bundle: Bundle) -> Iterator[Bundle]:
    """What a stage keeps, or still sends, is written over."""
    for role, program in bundle.programs.items():
        for value, output in zip(program.output_values(), program.outputs, strict=True):
            if output.kind is OutputKind.CHANNEL and value.meta["val"].numel():

                def edit(program: Program, name: str = value.name) -> None:
                    with program.graph.inserting_before(program.output_node):
                        program.graph.call_function(aten.zero_.default, (_named(program, name),))

                yield from _edited(bundle, iter([(role, edit)]))


def unwaited_sends(bundle: Bundle) -> Iterator[Bundle]:
    """No program waits for what was sent, whose memory may go."""
    for role, name in _nodes(bundle, lambda node: is_wait(node) and not node.users):

        def edit(program: Program, name: str = name) -> None:
            program.graph.erase_node(_named(program, name))

        yield from _edited(bundle, iter([(role, edit)]))


def lost_results(bundle: Bundle) -> Iterator[Bundle]:
    """A rank returns less, or its results in another order."""
    for role, program in bundle.programs.items():
        if program.outputs and program.outputs[0].kind is OutputKind.RESULT:
            for first in ([1], [1, 0]):

                def edit(program: Program, first: list[int] = first) -> None:
                    pairs = list(zip(program.output_values(), program.outputs, strict=True))
                    pairs = [*(pairs[k] for k in first), *pairs[2:]]
                    program.set_outputs([value for value, _ in pairs], [output for _, output in pairs])

                yield from _edited(bundle, iter([(role, edit)]))


KINDS: dict[Callable[[Bundle], Iterator[Bundle]], int] = {
    dropped_programs: 12,
    repeated_programs: 12,
    swapped_sends: 2,
    changed_messages: 6,
    missing_events: 3,
    dropped_accumulators: 10,
    lost_updates: 8,
    lost_norms: 2,
    reused_memory: 6,
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda each: each.__name__)
def test_mutants_are_caught(program: Program, kind: Callable[[Bundle], Iterator[Bundle]]) -> None:
    expected = outcome(program, program.stages)
    assert not is_caught(program, expected, program.stages)
    caught = [is_caught(program, expected, mutant) for mutant in kind(program.stages)]
    assert len(caught) >= KINDS[kind]
    assert all(caught), f"{caught.count(False)} of {len(caught)} stay: {caught}"


def test_a_send_that_no_program_waits_for_is_refused(program: Program) -> None:
    mutants = list(unwaited_sends(program.stages))
    assert len(mutants) >= 3
    for mutant in mutants:
        with pytest.raises(PassError, match=r"pp=\d never waits for the send of "):
            check_bundle(mutant)


NOT_CERTIFIED = [dropped_accumulators, lost_norms, swapped_sends, reused_memory, unwaited_sends, lost_results]


def is_certified(captured: Program, bundle: Bundle) -> bool:
    with torch.no_grad():
        return bool(certify_bundle(captured, [(bundle, k) for k in range(2)], "step"))


@pytest.mark.slow
def test_what_has_no_mutation_is_certified(programs: tuple[Program, Program]) -> None:
    captured, program = programs
    assert is_certified(captured, program.stages)


@pytest.mark.slow
@pytest.mark.parametrize("kind", NOT_CERTIFIED)
def test_mutants_are_not_certified(
    request: pytest.FixtureRequest, programs: tuple[Program, Program], kind: Callable[[Bundle], Iterator[Bundle]]
) -> None:
    """Every third one, of those of which there are many; all with --exhaustive."""
    captured, program = programs
    mutants = list(kind(program.stages))
    assert len(mutants) >= KINDS.get(kind, 3)
    if len(mutants) > 4 and not request.config.getoption("--exhaustive"):
        mutants = mutants[::3]
    found = [is_certified(captured, mutant) for mutant in mutants]
    assert not any(found), found


def whole_bias(program: Program) -> bool:
    """Each rank along "tp" adds all of a bias to its part of a sum, not its share."""
    shares = [node for node in program.graph.nodes if node.target in (aten.div.Tensor, aten.div.Scalar)]
    shares = [node for node in shares if node.args[0].op == "placeholder" and node.args[1] == 2]
    for node in shares:
        node.replace_all_uses_with(node.args[0])
    return bool(shares)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("edit", [test_bundles.nothing, whole_bias])
def test_stages_beside_tensors_are_certified(edit: Callable[[Program], bool]) -> None:
    """A share of a bias is no value of the captured program, and an addend of one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 3)).double()
    split = {"*.0.*": {"tp": Shard(0)}, "*.2.weight": {"tp": Shard(1)}}
    axes = {"stages": "pp", "tensor": "tp"}
    mode = spmd.DataParallel(axes=axes, params=split, micro_batches=2, stages=["3"])
    compiled = spmd.compile(step, parallel_mode=mode, passes=(test_bundles.Edit(edit), *passes.default()))
    given = model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 4).double(), torch.randn(4, 3).double()
    found = spmd.certify(compiled, *given, world=4, mesh={"pp": 2, "tp": 2})
    assert bool(found) is (edit is not whole_bias), found


# What two ranks do with their own addends of a sum and with those that they receive.
ADDS: dict[str, Callable[[Any, Any], tuple[Any, tuple[Any, ...]]]] = {
    "as it is": lambda own, other: (aten.add.Tensor, (own, other)),
    "own alone": lambda own, other: (aten.mul.Tensor, (own, 1)),
    "received alone": lambda own, other: (aten.mul.Tensor, (other, 1)),
    "own twice": lambda own, other: (aten.add.Tensor, (own, own)),
    "subtracted": lambda own, other: (aten.sub.Tensor, (own, other)),
    "moved": lambda own, other: (aten.roll.default, (other, [1])),
}
# What three do with the rows that they receive: all of them, as they are or rounded, or the first two.
SUMS: dict[str, Callable[[Any], tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {
    "as it is": lambda rows: (aten.sum.dim_IntList, (rows, [0]), {"dtype": torch.float64}),
    "rounded": lambda rows: (aten.sum.dim_IntList, (rows, [0]), {"dtype": torch.float32}),
    "first row": lambda rows: (aten.select.int, (rows, 0, 0), {}),
}


@dataclass(frozen=True)
class Added(passes.Pass):
    """Writes something else for the sums of what ranks have exchanged."""

    add: Callable[[Any, Any], tuple[Any, tuple[Any, ...]]]
    sum_up: Callable[[Any], tuple[Any, tuple[Any, ...], dict[str, Any]]]

    def rewrite(self, program: Program) -> int:
        """Return how many were written."""
        found = [node for node in program.graph.nodes if "completes" in node.meta and node.target is aten.add.Tensor]
        for total in found:
            total.target, total.args = self.add(*total.args)
        sums = [
            node for node in program.graph.nodes if "completes" in node.meta and node.target is aten.sum.dim_IntList
        ]
        for total in sums:
            total.target, total.args, total.kwargs = self.sum_up(total.args[0])
        return len(found) + len(sums)


def certified_addends(add: str, ranks: int, kind: Any = "fully_shard", **options: Any) -> Any:
    """The certificate of two stages, each of ``ranks`` ranks that exchange parts of gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).double()
    pipeline, axes = passes.default(), {"stages": "pp", "batch": "dp"}
    at = next(k for k, each in enumerate(pipeline) if isinstance(each, passes.Realise)) + 1
    added = Added(ADDS.get(add, ADDS["as it is"]), SUMS.get(add, SUMS["as it is"]))
    edited = (*pipeline[:at], added, *pipeline[at:])
    mode = spmd.DataParallel(kind, axes=axes, micro_batches=2, **options)
    compiled = spmd.compile(step, parallel_mode=mode, passes=edited)
    given = model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(12, 4).double(), torch.randn(12, 3).double()
    return spmd.certify(compiled, *given, world=2 * ranks, mesh={"pp": 2, "dp": ranks})


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "add", ["as it is", "moved", *(pytest.param(k, marks=pytest.mark.exhaustive) for k in [*ADDS][1:5])]
)
def test_addends_that_two_ranks_exchange_are_certified(add: str) -> None:
    found = certified_addends(add, 2)
    assert bool(found) is (add == "as it is"), found


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "mode",
    [{}, pytest.param({"kind": "replicate", "shard_optimizer": True}, marks=pytest.mark.exhaustive)],
    ids=["split", "optimizer"],
)
def test_addends_that_three_ranks_exchange_are_certified(mode: dict[str, Any]) -> None:
    assert certified_addends("as it is", 3, **mode)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("add", ["rounded", pytest.param("first row", marks=pytest.mark.exhaustive)])
def test_other_sums_of_what_three_ranks_exchange_are_not_shown(add: str) -> None:
    """Rounded ones were: the dtype in which a sum is computed was not looked at."""
    assert not certified_addends(add, 3)
