"""What autograd offers beyond a plain backward: own functions, hooks, torch.func, gradients of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import spmd
from passes import print_program
from tests.harness.cases import MLP, mlp
from tests.harness.oracle import assert_agrees
from tests.harness.pool import Ranks

Loss = Callable[[Any, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Trained(MLP):
    """A 5-7-6 regression with a loss, and a model, from the tables below."""

    sizes: tuple[int, ...] = (5, 7, 6)
    rows: int = 8
    optimizer: str = "SGD momentum"
    loss: str = "mse"
    model: str = "plain"

    def build(self) -> tuple[Any, ...]:
        model, optimizer = super().build()
        MODELS[self.model](model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return model, optimizer, self.loss

    @staticmethod
    def step(model: Any, optimizer: Any, loss: str, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        value = LOSSES[loss](model, x, y)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value


class Powers(torch.autograd.Function):
    """``(x * w) ** power``, with a gradient only for what needs one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, power: int) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.power = power
        return (x * w).pow(power)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, w = ctx.saved_tensors
        inner = gradient * ctx.power * (x * w).pow(ctx.power - 1)
        needs_x, needs_w, _ = ctx.needs_input_grad
        return inner * w if needs_x else None, (inner * x).sum(0) if needs_w else None, None


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.sign(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Sorted(torch.autograd.Function):
    """The second result has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ordered, order = x.sort(1)
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(order)
        return ordered, order

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
        (order,) = ctx.saved_tensors
        return torch.zeros_like(gradient).scatter(1, order, gradient)


class DoubledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Exponential(torch.autograd.Function):
    """In the form that ``torch.func`` takes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return gradient * result


def own_functions(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h = model(x)
    ordered, order = Sorted.apply(h)
    rounded = (h.round() - h).detach() + h
    trained, frozen = model[2].bias, torch.arange(6.0, dtype=h.dtype)
    powers = Powers.apply(h, trained, 2) + Powers.apply(h, frozen, 3)
    terms = (StraightThrough.apply(h) * y, ordered * y + order, rounded.square(), DoubledInPlace.apply(h * 1), powers)
    return sum(term.mean() for term in terms) + torch.func.vmap(Exponential.apply)(h / 10).mean()


def tensor_hooks(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h = model(x)
    h.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05) * len(h))
    return F.mse_loss(h, y)


def of_each_sample(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The squared gradients of every sample's own loss."""

    def loss(parameters: Any, row: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(torch.func.functional_call(model, parameters, (row,)), target)

    parameters = dict(model.named_parameters())
    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
    return F.mse_loss(model(x), y) + 0.01 * sum(gradient.square().sum() for gradient in gradients.values())


def after_an_inner_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """MAML: the loss after one step of gradient descent on four rows of the global batch."""

    def inner(parameters: Any) -> Tensor:
        return F.mse_loss(torch.func.functional_call(model, parameters, (x[:4],)), y[:4])

    parameters = dict(model.named_parameters())
    gradients = torch.func.grad(inner)(parameters)
    moved = {name: parameter - 0.1 * gradients[name] for name, parameter in parameters.items()}
    return F.mse_loss(torch.func.functional_call(model, moved, (x,)), y)


def products_with_jacobians(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out, forward = torch.func.jvp(model, (x,), (y[:, :5],))
    _, pull_back = torch.func.vjp(model, x)
    jacobians = torch.func.vmap(torch.func.jacrev(model))(x)
    return F.mse_loss(out, y) + 0.1 * (forward.square().mean() + pull_back(y)[0].square().mean() + jacobians.mean())


def gradient_penalty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    out = model(x)
    (of_rows,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss = F.mse_loss(out, y)
    of_parameters = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    penalty = (of_rows.norm(2, 1) - 1).square().mean()
    return loss + penalty + 0.1 * sum(gradient.square().sum() for gradient in of_parameters)


def parts_without_gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        target = model(x).softmax(1)
    with torch.inference_mode():
        weight = model(x).sigmoid()
    h = model(x)
    return F.cross_entropy(h, target) + (h.detach() * h).mean() + (weight.clone() * h).mean()


def written_in_place(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Into activations, views of them, and rows of the global batch."""
    h = model(x) * 1
    h[:, 0] = 0
    h[:, 1:3].mul_(2)
    h[0] = 1
    h[2:4] *= 3
    h[y > 0] = 0.5
    h.T[4].add_(y[:, 1])
    return h.clamp_(-2, 2).square().mean()


def through_a_cache(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with parametrize.cached():
        return F.mse_loss(model(x), y) + F.mse_loss(model(-x), y)


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def plain(model: nn.Sequential) -> None:
    pass


def with_module_hooks(model: nn.Sequential) -> None:
    model[0].register_forward_hook(lambda module, args, out: out * 2)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model[2].register_full_backward_hook(lambda module, into, out: (into[0] * 3,))
    model[0].register_full_backward_pre_hook(lambda module, out: (out[0] * 0.5,))


def with_parameter_hooks(model: nn.Sequential) -> None:
    """Both kinds look at the whole gradient: its norm, and its largest entry."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient / (gradient.norm() + 0.001))
        parameter.register_post_accumulate_grad_hook(divided_by_largest)


def divided_by_largest(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad / (parameter.grad.abs().max() + 0.1)


def with_norms(model: nn.Sequential) -> None:
    """A parametrization with new parameters, and one that writes its buffers in every forward."""
    parametrizations.weight_norm(model[0])
    parametrizations.spectral_norm(model[2])


def with_orthogonal_weight(model: nn.Sequential) -> None:
    parametrizations.orthogonal(model[2], orthogonal_map="cayley")


def with_old_norm(model: nn.Sequential) -> None:
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model[0])


def with_compiled_part(model: nn.Sequential) -> None:
    model[1] = torch.compile(nn.Sequential(nn.Tanh(), mlp(7, 7)), backend="eager")
    model[2].compile(backend="eager")


def with_complex_part(model: nn.Sequential) -> None:
    model[1] = Spectral()


class Spectral(nn.Module):
    """A complex weight in the frequencies of the rows, and a table of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 7, dtype=torch.complex128))
        self.register_buffer("order", torch.randperm(7))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.fft.fft(x.to(torch.complex128), dim=1) @ self.weight).abs()[:, self.order]


LOSSES: dict[str, Loss] = {
    loss.__name__: loss
    for loss in (
        *(mse, own_functions, tensor_hooks, of_each_sample, after_an_inner_step, products_with_jacobians),
        *(gradient_penalty, parts_without_gradient, written_in_place, through_a_cache),
    )
}
MODELS: dict[str, Callable[[nn.Sequential], None]] = {
    model.__name__: model
    for model in (
        *(plain, with_module_hooks, with_parameter_hooks, with_norms, with_orthogonal_weight, with_old_norm),
        *(with_compiled_part, with_complex_part),
    )
}


def cases() -> Iterator[Any]:
    """Each loss with the plain model, each model with the mean loss; styles in turn, and three ranks once."""
    pairs = [*((loss, "plain") for loss in LOSSES), *(("mse", model) for model in MODELS if model != "plain")]
    pairs.append(("through_a_cache", "with_norms"))
    for index, (loss, model) in enumerate(pairs):
        style, world = ("fully_shard" if index % 3 else "replicate"), (3 if index == 11 else 2)
        yield pytest.param(Trained(loss=loss, model=model), style, world, id=f"{loss} {model}")


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_what_was_traced_before_changes_no_program() -> None:
    """Ranks have pasts of their own, and torch's cache of fake tensors is that of the process."""

    def captured() -> str:
        case = Trained(loss="products_with_jacobians")
        torch.manual_seed(0)
        step = spmd.compile(case.step)
        step(*case.build(), *case.part(0, 0))
        return print_program(step._dispatch.programs.last.captured.program)

    FakeTensorMode.cache_clear()
    first = captured()
    FakeTensorMode.cache_clear()
    with torch.no_grad():
        spmd.compile(lambda x: x.clone().t().sum())(torch.ones(7, 6, dtype=torch.float64))  # as a tangent of zeros is
    assert captured() == first


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("case, style, world", list(cases()))
def test_what_autograd_offers_is_exact(ranks: Ranks, case: Trained, style: str, world: int) -> None:
    assert_agrees(ranks, world, case, style)


class Scaled:
    """A hook that is an object."""

    def __call__(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad.mul_(0.5)


def counted(parameter: Tensor) -> int:
    return parameter.numel()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("hook", "name", "value"),
    [(Scaled(), "Scaled", "a tensor"), (counted, "counted", "6"), (partial(counted), "counted", "6")],
)
def test_a_hook_after_accumulation_that_returns_a_value_is_named(hook: Any, name: str, value: str) -> None:
    """Torch raises, too, and names no hook."""
    model = nn.Linear(3, 2)
    model.weight.register_post_accumulate_grad_hook(hook)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    line = getattr(hook, "func", hook if name == "counted" else Scaled.__call__).__code__.co_firstlineno
    expected = rf"runs {name} \(.*test_autograd.py:{line}\), a hook on model.weight .* returned {value}, where torch"
    with pytest.raises(spmd.CaptureError, match=expected) as refused:
        spmd.compile(step)(model, torch.ones(2, 3))
    assert "loss.backward()" in str(refused.value) and model.weight.grad is None
