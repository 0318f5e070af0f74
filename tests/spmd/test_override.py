"""``Override``: untraceable modules are replaced while tracing, and their graph is put in right after partition."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import spmd
from tests.harness.cases import MLP, make_optimizer
from tests.harness.oracle import all_unequal, compiled_run, plain_run
from tests.harness.pool import Ranks


@torch.library.custom_op("dummy::ddm", mutates_args=())
def ddm(x: Tensor) -> Tensor:
    """Twice ``x``."""
    return x + x


@torch.library.custom_op("dummy::ddm_backward", mutates_args=())
def ddm_backward(grad: Tensor) -> Tensor:
    """Its gradient."""
    return grad + grad


ddm.register_fake(torch.empty_like)
ddm_backward.register_fake(torch.empty_like)
FORWARD, BACKWARD = torch.ops.dummy.ddm.default, torch.ops.dummy.ddm_backward.default


class DDMFunction(torch.autograd.Function):
    """The op with its backward op."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.ops.dummy.ddm(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return torch.ops.dummy.ddm_backward(grad)


class Untraceable(nn.Module):
    """Branches on data; ``inner`` and ``unused`` are for the tests of which modules are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        if float(x.abs().max()) > 1000:
            return x
        return self.inner(x) + x


class Replacement(nn.Module):
    """Calls the op."""

    def forward(self, x: Tensor) -> Tensor:
        return DDMFunction.apply(x)


@dataclass(frozen=True)
class TwoUntraceable(MLP):
    sizes: tuple[int, ...] = (15, 16, 4)
    rows: int = 6
    optimizer: str = "SGD"

    def build(self) -> tuple[Any, ...]:
        layers = [nn.Linear(15, 16), Untraceable(), nn.Linear(16, 4), Untraceable()]
        model = nn.Sequential(*layers).double()
        return model, make_optimizer(self.optimizer, model.parameters())


@dataclass
class Watching(spmd.Override):
    """Replaces what is untraceable; ``real_ops`` also replaces the ops by additions. Records what it sees."""

    real_ops: bool = True
    asked: list[str] = field(default_factory=list)
    seen: list[list[str]] = field(default_factory=list)
    states: list[list[tuple[int, ...]]] = field(default_factory=list)

    def replacement(self, fqn: str, orig_submodule: nn.Module) -> nn.Module:
        self.asked.append(fqn)
        return Replacement() if isinstance(orig_submodule, Untraceable) else orig_submodule

    def transform(self, gm: fx.GraphModule, flat_state: list[Tensor]) -> fx.GraphModule:
        ours = [node for node in gm.graph.nodes if node.target in (FORWARD, BACKWARD)]
        self.seen.append([str(node.target) for node in ours])
        self.states.append([tuple(tensor.shape) for tensor in flat_state])
        for node in ours if self.real_ops else []:
            with gm.graph.inserting_before(node):
                node.replace_all_uses_with(gm.graph.call_function(torch.add, (node.args[0], node.args[0])))
            gm.graph.erase_node(node)
        gm.recompile()
        return gm


def run(rank: int, world: int, style: str, passes: Any, real_ops: bool) -> tuple[list[str], Watching]:
    override = Watching(real_ops)
    mode = spmd.DataParallel(style)
    options = {"parallel_mode": mode, "passes": passes, "module_override": [override]}
    _, got = compiled_run(rank, TwoUntraceable(), 5, **options)
    return all_unequal(plain_run(TwoUntraceable(), world, 5), got, rank, world), override


@pytest.mark.parametrize("real_ops", [True, False], ids=["real ops", "custom ops"])
@pytest.mark.parametrize("passes", [None, ()], ids=["default passes", "no passes"])
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
@pytest.mark.in_turn("style")
def test_the_numbers_are_those_of_the_replaced_modules(ranks: Ranks, style: str, passes: Any, real_ops: bool) -> None:
    for differ, _ in ranks.run(2, run, style, passes, real_ops):
        assert differ == []


def test_transform_sees_the_forward_op_twice_then_the_backward_op_twice(ranks: Ranks) -> None:
    for _, override in ranks.run(2, run, "replicate", None, True):
        ops = ["dummy.ddm.default"] * 2 + ["dummy.ddm_backward.default"] * 2
        assert override.seen == [ops]


def test_flat_state_is_what_the_first_placeholders_take(ranks: Ranks) -> None:
    for style in ("replicate", "fully_shard"):
        for _, override in ranks.run(2, run, style, None, True):
            rows = 16 if style == "replicate" else 8
            assert all((rows, 15) in shapes for shapes in override.states)


def test_parents_are_asked_before_children_not_the_root_and_not_what_was_replaced(ranks: Ranks) -> None:
    for _, override in ranks.run(2, run, "replicate", None, True):
        assert override.asked[:4] == ["0", "1", "2", "3"]
        assert set(override.asked) == {"0", "1", "2", "3"}


def compile_alone(override: Any, steps: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    case = TwoUntraceable()
    model, optimizer = case.build()
    compiled = spmd.compile(module_override=[override])(case.step)
    for k in range(steps):
        compiled(model, optimizer, *case.part(0, k))
    return model, optimizer


@pytest.mark.usefixtures("alone")
def test_the_model_is_as_it_was_afterwards() -> None:
    case = TwoUntraceable()
    model, optimizer = case.build()
    modules, parameters = list(model.modules()), list(model.parameters())
    forwards = [module.__dict__.get("forward") for module in modules]
    spmd.compile(module_override=[Watching()])(case.step)(model, optimizer, *case.part(0, 0))
    assert all(new is old for new, old in zip(model.modules(), modules, strict=True))
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    assert [module.__dict__.get("forward") for module in modules] == forwards
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


@pytest.mark.usefixtures("alone")
def test_parameters_of_a_replaced_module_get_no_gradient_and_no_update() -> None:
    model, optimizer = compile_alone(Watching(), steps=3)
    assert torch.equal(model[1].unused, torch.ones(3, dtype=torch.float64))
    assert model[1].unused.grad is None
    assert model[1].unused not in optimizer.state


class Broken(Watching):
    """Fails where it is asked to transform."""

    def transform(self, gm: fx.GraphModule, flat_state: list[Tensor]) -> fx.GraphModule:
        raise RuntimeError("not today")


@pytest.mark.usefixtures("alone")
def test_the_model_is_as_it_was_when_a_transform_raised() -> None:
    case = TwoUntraceable()
    model, optimizer = case.build()
    modules = list(model.modules())
    with pytest.raises(Exception, match="not today"):
        spmd.compile(module_override=[Broken()])(case.step)(model, optimizer, *case.part(0, 0))
    assert all(new is old for new, old in zip(model.modules(), modules, strict=True))
    assert optimizer.state == {}


class NamedOverride(spmd.Override):
    """Replaces one submodule by its name and transforms nothing."""

    def __init__(self, fqn: str, new: nn.Module) -> None:
        self.fqn, self.new = fqn, new

    def replacement(self, fqn: str, orig_submodule: nn.Module) -> nn.Module:
        return self.new if fqn == self.fqn else orig_submodule

    def transform(self, gm: fx.GraphModule, flat_state: list[Tensor]) -> fx.GraphModule:
        return gm


@pytest.mark.usefixtures("alone")
def test_the_first_override_that_returns_another_object_wins() -> None:
    x = torch.ones(2, 3, dtype=torch.float64)
    model = nn.Sequential(nn.Identity())

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)

    overrides = [NamedOverride("1", nn.Tanh()), NamedOverride("0", nn.ReLU()), NamedOverride("0", nn.Sigmoid())]
    assert torch.equal(spmd.compile(module_override=overrides)(forward)(model, -x), torch.zeros_like(x))


class Scaled(nn.Module):
    """A leaky ReLU of plain ops."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, x * self.slope)


class Rescaling(spmd.Override):
    """Reads the slope of the module, and ``least`` of itself; keeps notes of what it did."""

    def __init__(self) -> None:
        self.least, self.count, self.slopes = 0.0, 0, list[float]()

    def replacement(self, fqn: str, orig_submodule: nn.Module) -> nn.Module:
        self.count += 1
        self.slopes.append(orig_submodule.negative_slope)
        return Scaled(orig_submodule.negative_slope) if self.slopes[-1] > self.least else orig_submodule

    def transform(self, gm: fx.GraphModule, flat_state: list[Tensor]) -> fx.GraphModule:
        self.slopes.clear()
        return gm


def rescaled(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum()


@pytest.mark.usefixtures("alone")
def test_what_a_replacement_reads_is_never_stale_and_its_own_notes_are_not_guarded() -> None:
    override, model, x = Rescaling(), nn.Sequential(nn.LeakyReLU(0.5)), -torch.ones(2, 2)
    steps = [spmd.compile(module_override=[override])(rescaled) for _ in range(2)]
    for slope, programs in [(0.5, 1), (0.5, 1), (0.25, 2), (0.25, 2), (0.125, 3)]:
        model[0].negative_slope = slope
        for step in steps:
            assert step(model, x) == -4 * slope
            assert len(step.programs) == programs


@pytest.mark.usefixtures("alone")
def test_what_a_replacement_reads_of_its_override_is_guarded() -> None:
    override, model, x = Rescaling(), nn.Sequential(nn.LeakyReLU(0.5)), -torch.ones(2, 2)
    step = spmd.compile(module_override=[override])(rescaled)
    programs = []
    for least in (0.0, 0.0, 1.0, 1.0):
        override.least = least
        step(model, x)
        programs.append(len(step.programs))
    assert programs == [1, 1, 2, 2]


class Counting(Rescaling):
    """Looks at notes that it writes once the program is partitioned."""

    def replacement(self, fqn: str, orig_submodule: nn.Module) -> nn.Module:
        assert self.count >= 0 and len(self.slopes) >= 0
        return orig_submodule

    def transform(self, gm: fx.GraphModule, flat_state: list[Tensor]) -> fx.GraphModule:
        self.count += 1
        self.slopes.append(0.0)
        return gm


@pytest.mark.usefixtures("alone")
def test_notes_that_two_steps_share_are_not_guarded() -> None:
    override, model, x = Counting(), nn.Sequential(nn.LeakyReLU(0.5)), -torch.ones(2, 2)
    steps = [spmd.compile(module_override=[override])(rescaled) for _ in range(2)]
    for step in steps * 3:
        step(model, x)
    assert [len(step.programs) for step in steps] == [1, 1] and override.count == 2


def test_without_the_override_the_error_names_the_module_s_line(ranks: Ranks) -> None:
    case = TwoUntraceable()
    assert ranks.run(1, untraceable, case, process_group=False) == [True]


def untraceable(rank: int, world: int, case: MLP) -> bool:
    with pytest.raises(spmd.CaptureError) as caught:
        spmd.compile(case.step)(*case.build(), *case.part(0, 0))
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    line = Untraceable.forward.__code__.co_firstlineno + 1
    return "test_override.py" in text and str(line) in text and "Override" in text
