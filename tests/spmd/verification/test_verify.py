"""``spmd.verify``: clean steps agree, and nothing of the user's changes."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import passes
import spmd
from passes.ir.program import Axis, Mesh
from spmd.call.rng import random_state_kept
from spmd.lowering.lower import Executable
from spmd.verification.compared_stages import kept
from spmd.verification.copies import Subject
from spmd.verification.peer import Peer
from spmd.verification.rank import SimulatedRank
from spmd.verification.verdict import Verdict
from spmd.verification.verifier import PlainStep, Verification
from spmd.verification.wholes import put_together
from spmd.verification.world import simulated_world


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def arguments(rows: int = 8, optimizer: str = "SGD", dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.LayerNorm(12), nn.Linear(12, 3)).to(dtype)
    x, y = torch.randn(rows, 6, dtype=dtype), torch.randn(rows, 3, dtype=dtype)
    return model, getattr(torch.optim, optimizer)(model.parameters(), lr=0.1), x, y


pytestmark = pytest.mark.slow

TENSOR = {"*.0.weight": {"tp": Shard(0)}, "*.0.bias": {"tp": Shard(0)}}
ROUNDED = {"shard_optimizer": True, "gather_dtype": torch.bfloat16}
CLEAN: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "fully_shard, odd rows, three ranks": (
        {"parallel_style": "fully_shard"},
        {"rows": 7, "optimizer": "Adam"},
        {"world": 3},
    ),
    "hybrid": ({"parallel_style": "fully_shard"}, {}, {"mesh": {"replicate": 2, "shard": 2}}),
    "tensor parallel": ({"params": TENSOR}, {}, {"mesh": {"dp": 2, "tp": 2}}),
    "kept by two ranks": ({"parallel_style": "fully_shard", "reshard_after_forward": 2}, {}, {}),
    "ZeRO 1, float32": ({"shard_optimizer": True}, {"dtype": torch.float32, "optimizer": "Adam"}, {"world": 2}),
    "ZeRO 1, rounded": (ROUNDED | {"params": TENSOR}, {"optimizer": "Adam"}, {"mesh": {"dp": 2, "tp": 2}}),
}


HELD = ("hybrid", "tensor parallel")  # by clean programs that have mutants


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.exhaustive) if n in HELD else n for n in CLEAN])
def test_a_clean_step_agrees(name: str) -> None:
    mode, given, options = CLEAN[name]
    step = spmd.compile(train_step, parallel_mode=spmd.DataParallel(**mode))
    verdict = spmd.verify(step, *arguments(**given), steps=2, **options)
    assert verdict, verdict
    assert verdict.compared >= 20


@dataclass(frozen=True)
class Departs(passes.Pass):
    """A pass that lets one rank hold another value of a parameter than the others, in the last bits."""

    numerics = "reassociates"

    def rewrite(self, program: passes.Program) -> int:
        values = list(program.output_values())
        k = next(k for k, out in enumerate(program.outputs) if out.role is passes.Role.PARAMETER)
        with program.graph.inserting_before(program.output_node):
            factor = 1 + 1e-15 * program.mesh.axes[0].coordinate
            new = program.graph.call_function(torch.ops.aten.mul.Tensor, (values[k], factor))
        new.meta["val"], values[k] = values[k].meta["val"], new
        program.set_outputs(values, program.outputs)
        return 1


@pytest.mark.parametrize("mode", [{}, ROUNDED], ids=["exact", "rounded"])
def test_replicas_that_differ_in_the_last_bits_are_found(mode: dict[str, Any]) -> None:
    """However far what is rounded may be from the plain step."""
    step = spmd.compile(train_step, parallel_mode=spmd.DataParallel(**mode), passes=(Departs(),))
    verdict = spmd.verify(step, *arguments(), steps=1, world=2)
    assert not verdict and "ranks 0 and 1 should hold the same value" in verdict.says


@dataclass(frozen=True)
class Freezes(passes.Pass):
    """A pass that reads a number of the optimizer once, as if it never changed."""

    name: str
    value: float

    def rewrite(self, program: passes.Program) -> int:
        node = program.placeholders[program.positions()[self.name]]
        for user in list(node.users):
            given = user.args, user.kwargs
            user.args, user.kwargs = fx.node.map_arg(given, lambda arg: self.value if arg is node else arg)
        return 1


@pytest.mark.parametrize("key, value", [("lr", 0.1), ("weight_decay", 0.5)])
def test_a_number_that_is_stale_in_a_later_step_is_found(key: str, value: float) -> None:
    model, _, x, y = arguments()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    step = spmd.compile(train_step, passes=(Freezes(f"optimizer.0.{key}", value),))
    verdict = spmd.verify(step, model, optimizer, x, y, steps=2, world=2)
    assert not verdict and verdict.stage == "Freezes"
    assert optimizer.param_groups[0][key] == value


def test_a_learning_rate_that_the_step_writes_is_each_ranks_own() -> None:
    def halves_its_rate(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
    verdict = spmd.verify(spmd.compile(halves_its_rate), model, optimizer, torch.randn(4, 4), steps=3, world=2)
    assert verdict, verdict


def test_nothing_of_the_users_changes() -> None:
    step = spmd.compile(train_step, parallel_mode=spmd.DataParallel("fully_shard"))
    given = arguments(optimizer="Adam")
    before = copy.deepcopy((given[0].state_dict(), given[1].state_dict(), given[2:]))
    state, world, hook = torch.get_rng_state(), dist.group.WORLD, sys.excepthook
    assert spmd.verify(step, *given, steps=1, world=2)
    after = (given[0].state_dict(), given[1].state_dict(), given[2:])
    for one, other in zip(tree_leaves(before), tree_leaves(after), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
    assert torch.equal(torch.get_rng_state(), state) and dist.group.WORLD is world
    assert sys.excepthook is hook
    assert step.programs == ()


class Halved(torch.optim.SGD):
    """An optimizer with an attribute of its own, which torch's copies of it lack."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.factor = 0.5

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(parameter.grad, alpha=-group["lr"] * self.factor)


def test_copies_of_optimizers_are_whole_and_a_scheduler_steps_nothing_of_the_users() -> None:
    model, _, x, y = arguments()
    optimizer = Halved(model.parameters(), 0.1)
    torch.optim.lr_scheduler.LinearLR(optimizer)  # puts a function into the optimizer
    before = copy.deepcopy(model.state_dict())
    assert spmd.verify(spmd.compile(train_step), model, optimizer, x, y, steps=1, world=2)
    assert all(torch.equal(one, other) for one, other in zip(before.values(), model.state_dict().values(), strict=True))


class Trainer:
    def __init__(self) -> None:
        self.model, self.optimizer, *_ = arguments()

    @spmd.compile
    def step(self, x: Tensor, y: Tensor) -> Tensor:
        return train_step(self.model, self.optimizer, x, y)


@pytest.mark.usefixtures("alone")
def test_a_method_and_a_step_that_was_called_before() -> None:
    trainer, (*_, x, y) = Trainer(), arguments()
    trainer.step(x, y)
    weight = trainer.model[0].weight.clone()
    assert spmd.verify(trainer.step, x, y, steps=1, world=2)
    assert torch.equal(trainer.model[0].weight, weight)
    trainer.step(x, y)
    assert len(trainer.step.programs) == 1  # the process group is the one that it was


class Detours(spmd.Override):
    """Replaces a module while tracing, and edits the partitioned graph."""

    def replacement(self, fqn: str, orig_submodule: nn.Module) -> nn.Module:
        return nn.Sigmoid() if isinstance(orig_submodule, nn.ReLU) else orig_submodule

    def transform(self, gm: fx.GraphModule, flat_state: list[Tensor]) -> fx.GraphModule:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
            node.replace_all_uses_with(node.args[0])
        return gm


def without_an_update(gm: fx.GraphModule) -> fx.GraphModule:
    """A user's edit of the final graph, which was meant for another one."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten._fused_adam_.default):
        gm.graph.erase_node(node)
    return gm


def test_overrides_and_transformations_are_stages() -> None:
    mode, given = spmd.DataParallel("fully_shard"), arguments(optimizer="Adam")
    right = spmd.compile([Detours()], lambda gm: gm, mode)(train_step)
    assert spmd.verify(right, *given, steps=1, world=2)
    wrong = spmd.compile([Detours()], without_an_update, mode)(train_step)
    verdict = spmd.verify(wrong, *given, steps=1, world=2)
    assert not verdict
    assert (verdict.stage, verdict.what) == ("gm_transformation", "model.0.weight")
    assert "gm_transformation" in str(verdict) and verdict.to_dict()["after"] == 0


def silent_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    train_step(model, optimizer, x, y)


def another_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    train_step(model, optimizer, x, y + 1)


def beside(plain: Subject, moved: float, rate: float = 0.1) -> Verdict:
    """The verdict on ``silent_step`` beside another plain step, whose parameters are ``moved`` before it begins."""
    subject = Subject.of(spmd.compile(silent_step), arguments(), {})
    other = PlainStep(plain, subject.copied(in_double=False), in_double=False)
    with random_state_kept(), simulated_world(2, None, "cpu") as mesh:
        first = SimulatedRank(subject, subject.copied(in_double=False), 0, mesh)
        peer = Peer(first, 1, kept(other.state()))
        with torch.no_grad():
            other.copied.args[0][3].bias.add_(moved)
        other.copied.args[1].param_groups[0]["lr"] = rate
        return Verification(subject, other, first, [peer], 1).run()


def test_a_wrong_capture_is_no_rounding() -> None:
    """Without a guilty stage, the captured program is run on the state of the plain step."""
    moved = beside(Subject(spmd.compile(silent_step), arguments(), {}), 1e-6)  # as earlier rounding may leave it
    assert moved and "rounding" in moved.notes[0]
    another = beside(Subject(spmd.compile(another_step), arguments(), {}), 0.0)
    assert not another and another.stage == "capture"
    assert not beside(Subject(spmd.compile(silent_step), arguments(), {}), 0.0, rate=0.2)


def normalised_step(model: nn.Module, x: Tensor) -> None:
    """The gradient of the bias is nothing but rounding, of which a division by its own size makes a step."""
    h = model(x)
    (h - h.mean(0)).square().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p.sub_(0.1 * p.grad / p.grad.norm())
            p.grad = None


class Doubled(passes.Pass):
    """A mistake where rounding is enlarged, too: quotients are doubled."""

    def rewrite(self, program: passes.Program) -> int:
        quotients = program.graph.find_nodes(op="call_function", target=torch.ops.aten.div.Tensor)
        for node in quotients:
            with program.graph.inserting_before(node):
                twice = program.graph.call_function(torch.ops.aten.mul.Tensor, (node.args[0], 2))
                twice.meta |= node.args[0].meta
            node.update_arg(0, twice)
        return len(quotients)


@pytest.mark.parametrize("mode", ["replicate", pytest.param("fully_shard", marks=pytest.mark.exhaustive)])
def test_rounding_that_an_op_enlarges_is_no_error_and_a_mistake_is(mode: str) -> None:
    given = nn.Linear(5, 3).double(), torch.randn(9, 5, dtype=torch.float64)
    verdict = spmd.verify(spmd.compile(normalised_step, parallel_mode=mode), *given, world=2)
    assert verdict and "enlarges" in verdict.notes[0], verdict
    wrong = spmd.compile(normalised_step, parallel_mode=mode, passes=(Doubled(),))
    verdict = spmd.verify(wrong, *given, world=2)
    assert not verdict and verdict.stage == "Doubled", verdict


class Rolled(passes.Pass):
    """The same mistake on all ranks, before rounding is enlarged: what was summed is in another order."""

    numerics = "reassociates"

    def rewrite(self, program: passes.Program) -> int:
        waits = [wait for start in program.collectives() for wait in start.users]
        for wait in waits:
            with program.graph.inserting_after(wait):
                rolled = program.graph.call_function(torch.ops.aten.roll.default, (wait, [1], [0]))
            rolled.meta |= wait.meta
            wait.replace_all_uses_with(rolled, delete_user_cb=lambda user, rolled=rolled: user is not rolled)
        return len(waits)


class Trebled(passes.Pass):
    """A mistake behind what enlarges rounding: other values become the new state."""

    numerics = "reassociates"

    def rewrite(self, program: passes.Program) -> int:
        output = program.graph.output_node()
        values = list(output.args[0])  # type: ignore[arg-type, call-overload]
        names = [each.name for each in program.outputs]
        at = names.index("model.bias")
        with program.graph.inserting_before(output):
            new = program.graph.call_function(torch.ops.aten.mul.Tensor, (values[at], 3.0))
        new.meta |= {"val": values[at].meta["val"]}
        output.args = ((*values[:at], new, *values[at + 1 :]),)
        return 1


def tiny_step(model: nn.Module, x: Tensor) -> None:
    """Gradients are smaller than what counts as rounding beside 1, and a division by their size makes steps of them."""
    (model(x).square().mean() * 1e-11).backward()
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p.sub_(0.1 * p.grad / p.grad.norm())
            p.grad = None


@pytest.mark.parametrize(("step", "mistake"), [(tiny_step, Rolled), (normalised_step, Trebled)])
def test_a_mistake_before_or_behind_what_enlarges_rounding_is_found(step: Any, mistake: type[passes.Pass]) -> None:
    given = nn.Linear(5, 3).double(), torch.randn(9, 5, dtype=torch.float64)
    verdict = spmd.verify(spmd.compile(step, passes=(mistake(),)), *given, world=2, steps=1)
    assert not verdict and verdict.stage == mistake.__name__, verdict


def nudge(program: passes.Program) -> None:
    """Change last bits, as no memory does that values are put into."""
    (node,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
    with program.graph.inserting_before(node):
        nudged = program.graph.call_function(torch.ops.aten.mul.Tensor, (node.args[0], 1 + 1e-15))
    nudged.meta |= node.args[0].meta
    node.update_arg(0, nudged)


class NudgingStorage(passes.OneStorage):
    def rewrite(self, program: passes.Program) -> int:
        nudge(program)
        return 1 + super().rewrite(program)


class NudgingMemory(passes.ReuseMemory):
    def rewrite(self, program: passes.Program) -> int:
        nudge(program)
        return 1 + super().rewrite(program)


@pytest.mark.parametrize("bits", [None, "same"])
@pytest.mark.parametrize("kind", [NudgingStorage, NudgingMemory])
@pytest.mark.in_turn("bits")
def test_what_only_moves_values_keeps_their_bits(kind: type[passes.Pass], bits: Any) -> None:
    """Widths are odd, so that operands of products begin anywhere: kernels round by that, and ``verify`` does not."""
    layers = [nn.Linear(37, 11), nn.Linear(11, 37, bias=False), nn.Linear(37, 67), nn.Tanh(), nn.Linear(67, 3)]
    model, mode = nn.Sequential(*layers).double(), spmd.DataParallel(bits=bits)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    given = model, optimizer, torch.randn(48, 37).double(), torch.randn(48, 3).double()
    verdict = spmd.verify(spmd.compile(train_step, parallel_mode=mode), *given, world=2, steps=1)
    assert verdict, verdict
    wrong = tuple(kind() if issubclass(kind, type(each)) else each for each in passes.default())
    verdict = spmd.verify(spmd.compile(train_step, parallel_mode=mode, passes=wrong), *given, world=2, steps=1)
    assert not verdict and verdict.stage == kind.__name__ and "is exact" in verdict.says, verdict


def dropped_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    return train_step(lambda x: F.dropout(model(x), 0.5), optimizer, x, y)  # type: ignore[arg-type]


def test_a_step_that_draws_is_compared_with_its_captured_program() -> None:
    verdict = spmd.verify(spmd.compile(dropped_step), *arguments(optimizer="Adam"), steps=1, world=2)
    assert verdict and verdict.compared >= 10
    assert "with its captured program" in str(verdict)


class Lookup(nn.Module):
    """One expert a row, whose weight is looked up by number, behind rows that were dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up = nn.Linear(6, 2), nn.Parameter(torch.randn(2, 6, 3))

    def forward(self, x: Tensor) -> Tensor:
        share, expert = self.router(F.dropout(x, 0.5)).softmax(-1).max(-1)
        return (x[:, None] @ self.up[expert]).squeeze(1) * share[:, None]


RUNS: dict[str, tuple[dict[str, Any], type[nn.Module] | None, dict[str, Any]]] = {
    "ranks divide runs of two parts each": ({"bits": "same"}, None, {"world": 3}),
    "a gathered value has rows of all ranks in each run": (
        {"micro_batches": 4, "axes": {"batch": "dp", "experts": "dp"}},
        Lookup,
        {"world": 2, "mesh": {"dp": 2}},
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_draws_of_several_runs_are_put_together_in_the_order_of_rows(name: str) -> None:
    options, kind, on = RUNS[name]
    model, optimizer, *batch = arguments(rows=48)
    if kind is not None:
        model = kind().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mode = spmd.DataParallel(**{"micro_batches": 2} | options)
    verdict = spmd.verify(spmd.compile(dropped_step, parallel_mode=mode), model, optimizer, *batch, steps=1, **on)
    assert verdict, verdict


@pytest.mark.parametrize(("kernel", "dtype"), [(1, torch.float64), (3, torch.bfloat16)])
def test_images_with_their_channels_last_have_the_same_bits(kernel: int, dtype: torch.dtype) -> None:
    """On all ranks, where kernels round by how operands lie, and beside flat memory, which has no weights of 1 x 1."""
    layers = nn.Conv2d(4, 4, kernel, bias=False), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 4, kernel)
    model = nn.Sequential(*layers).to(dtype=dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
    x, y = (torch.randn(8, 4, size, size, dtype=dtype) for size in (5, 5 - 2 * (kernel - 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    verdict = spmd.verify(spmd.compile(train_step), model, optimizer, x, y, world=2, steps=2)
    assert verdict, verdict


@pytest.mark.parametrize("step", [train_step, dropped_step])
def test_state_that_is_written_wrongly_is_no_rounding(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs are right, what is done with their results is not."""
    write = Executable._write

    def write_other_values(self: Executable, outputs: Any, inputs: Any) -> None:
        write(self, [3 * x if isinstance(x, Tensor) and x.ndim == 2 else x for x in outputs], inputs)

    monkeypatch.setattr(Executable, "_write", write_other_values)
    verdict = spmd.verify(spmd.compile(step, passes=()), *arguments(), steps=1, world=1)
    assert not verdict and verdict.stage == "run" and verdict.what == "model.0.weight"


MODEL = nn.Linear(2, 2)


def on_a_global(optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = MODEL(x).sum()
    loss.backward()
    optimizer.step()
    return loss


def test_what_cannot_be_verified_is_refused() -> None:
    step, given = spmd.compile(train_step), arguments()
    with pytest.raises(TypeError, match=r"spmd\.compile"):
        spmd.verify(train_step, *given)
    with pytest.raises(ValueError, match="MODEL by name"):
        spmd.verify(spmd.compile(on_a_global), torch.optim.SGD(MODEL.parameters()), torch.randn(4, 2))
    for options, says in (({"world": 17}, "16 ranks"), ({"steps": 0}, "1 or more"), ({"mesh": {"dp": 3}}, "3 ranks")):
        with pytest.raises(ValueError, match=says):
            spmd.verify(step, *given, **options)
    given[0][0].computed = given[0][0].weight * 2  # a tensor with its graph
    with pytest.raises(ValueError, match="copies of them, but it raises RuntimeError: Only Tensors"):
        spmd.verify(step, *given)
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="meta device"):
        spmd.verify(step, model, given[1], *given[2:])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parts_are_put_together_where_they_are(device: str) -> None:
    meshes = [Mesh((Axis("dp", 2, "0", coordinate),)) for coordinate in range(2)]
    parts = [torch.tensor([[1.0], [2.0]], device=device), torch.tensor([[3.0]], device=device)]
    whole = put_together(parts, (3, 1), (Shard(0),), meshes, 0.0)
    assert whole.device.type == device
    assert device == "meta" or whole.tolist() == [[1.0], [2.0], [3.0]]


def test_weights_are_put_back_where_state_is_split_by_an_earlier_call() -> None:
    """A call that compiles looks at split parts as a call on ranks does."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        weight = model[0].weight
        kept = weight.data.clone()
        weight.data = kept * 1.1
        loss = F.mse_loss(model(x), y)
        loss.backward()
        weight.data = kept
        optimizer.step()
        return loss  # the gradients stay: the second call needs another program

    compiled = spmd.compile(step, parallel_mode=spmd.DataParallel("fully_shard"))
    assert spmd.verify(compiled, *arguments(), world=2, steps=2)


def test_what_a_step_logs_in_its_arguments_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    @spmd.compile()
    def step(model: nn.Module, optimizer: Any, log: list[Any], x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.append({"loss": loss.detach(), "rows": x.shape[0]})
        return loss

    model = nn.Linear(4, 2).double()
    given = (model, torch.optim.SGD(model.parameters(), lr=0.1), [], *map(torch.randn, ((4, 4), (4, 2))))
    given = tuple(each.double() if isinstance(each, Tensor) else each for each in given)
    verdict = spmd.verify(step, *given, world=2)
    assert verdict and given[2] == [], verdict
    logged = Verification._compare_logs

    def loses(self: Verification, logs: Any) -> Any:
        """Compare what is logged with a number that is another one."""
        logs["log"].container[-1]["loss"] = logs["log"].container[-1]["loss"] + 1.0
        return logged(self, logs)

    monkeypatch.setattr(Verification, "_compare_logs", loses)
    assert "log" in str(spmd.verify(step, *given, world=2))
