"""A network of two layers on two ranks, one each: a bundle of three programs that send to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from passes import Axis, Input, Mesh, Output, OutputKind, Phase, Program, Role, check, fill_vals
from passes.ir.bundle import Bundle
from passes.ir.collectives import WAIT
from passes.runtime.message_collectives import recv, send

aten = torch.ops.aten
ROWS, WIDE, MIDDLE, NARROW = 4, 5, 3, 2
SHAPES = {"w0": (WIDE, MIDDLE), "w1": (MIDDLE, NARROW), "x": (ROWS, WIDE), "y": (ROWS, NARROW)}
ROLES = {"w0": Role.PARAMETER, "w1": Role.PARAMETER, "x": Role.BATCH, "y": Role.BATCH, "lr": Role.HYPER_PARAMETER}
CALLS = {"step": (("forward", "backward"), ("loss",))}
GROUP, CPU = "0", torch.device("cpu")
_NAMES = {"hidden": "pending.hidden", "sent": "pending.sent"}

Function = Callable[..., tuple[Any, ...]]


def received(traced: Any, shape: list[int], peer: int, channel: str, dtype: torch.dtype = torch.float64) -> Any:
    """A recv, which reads nothing that is traced."""
    arguments = shape, dtype, CPU, peer, channel, GROUP
    return traced.tracer.create_proxy("call_function", recv.default, arguments, {})


def forward(w0: Any, x: Any) -> Any:
    """Stage 0: the hidden values go to stage 1, and backward keeps them."""
    hidden = aten.tanh.default(aten.mm.default(x, w0))
    WAIT(send.default(hidden, 1, "hidden", GROUP))
    return (hidden,)


def forward_sending(w0: Any, x: Any) -> Any:
    """Stage 0, whose send goes on while it runs another program."""
    hidden = aten.tanh.default(aten.mm.default(x, w0))
    return hidden, send.default(hidden, 1, "hidden", GROUP)


def loss(w1: Any, y: Any, lr: Any) -> Any:
    """Stage 1: forward, backward and update of the second layer; the loss goes to stage 0, too."""
    hidden = WAIT(received(w1, [ROWS, MIDDLE], 0, "hidden"))
    error = aten.sub.Tensor(aten.mm.default(hidden, w1), y)
    mean = aten.mean.default(aten.pow.Tensor_Scalar(error, 2))
    gradient = aten.mul.Tensor(error, 2 / (ROWS * NARROW))
    sent = send.default(aten.mm.default(gradient, aten.t.default(w1)), 0, "gradient", GROUP)
    reported = send.default(mean, 0, "loss", GROUP)
    step = aten.mul.Tensor(aten.mm.default(aten.t.default(hidden), gradient), lr)
    WAIT(sent)
    WAIT(reported)
    return mean, aten.sub.Tensor(w1, step)


def backward(w0: Any, x: Any, lr: Any, hidden: Any) -> Any:
    """Stage 0: the gradient of the hidden values comes, and the first layer is updated."""
    gradient = WAIT(received(w0, [ROWS, MIDDLE], 1, "gradient"))
    mean = WAIT(received(w0, [], 1, "loss"))
    inner = aten.mul.Tensor(gradient, aten.rsub.Scalar(aten.mul.Tensor(hidden, hidden), 1))
    step = aten.mul.Tensor(aten.mm.default(aten.t.default(x), inner), lr)
    return mean, aten.sub.Tensor(w0, step)


def backward_ending(w0: Any, x: Any, lr: Any, hidden: Any, sent: Any) -> Any:
    """Stage 0, where the send of forward ends."""
    WAIT(sent)
    return backward(w0, x, lr, hidden)


def plain(state: dict[str, Any], x: Any, y: Any) -> torch.Tensor:
    """The same step on one device; writes to ``state``."""
    hidden = (x @ state["w0"]).tanh()
    error = hidden @ state["w1"] - y
    gradient = error * 2 / error.numel()
    inner = (gradient @ state["w1"].T) * (1 - hidden * hidden)
    steps = {"w1": hidden.T @ gradient, "w0": x.T @ inner}
    for name, each in steps.items():
        state[name] = state[name] - state["lr"] * each
    return error.pow(2).mean()


def whole(w0: Any, w1: Any, x: Any, y: Any, lr: Any) -> Any:
    """The same step in the same ops, as capture would have it."""
    hidden = aten.tanh.default(aten.mm.default(x, w0))
    error = aten.sub.Tensor(aten.mm.default(hidden, w1), y)
    mean = aten.mean.default(aten.pow.Tensor_Scalar(error, 2))
    gradient = aten.mul.Tensor(error, 2 / (ROWS * NARROW))
    back = aten.mm.default(gradient, aten.t.default(w1))
    inner = aten.mul.Tensor(back, aten.rsub.Scalar(aten.mul.Tensor(hidden, hidden), 1))
    first = aten.mul.Tensor(aten.mm.default(aten.t.default(x), inner), lr)
    second = aten.mul.Tensor(aten.mm.default(aten.t.default(hidden), gradient), lr)
    return mean, aten.sub.Tensor(w0, first), aten.sub.Tensor(w1, second)


def program_of(
    function: Function,
    name: str,
    coordinate: int,
    group: str = GROUP,
    backend: str = "gloo",
    device: torch.device = CPU,
) -> Program:
    """One rank's program of ``function``: a result is the loss, the others are what it updates or hands on."""
    graph_module = fx.symbolic_trace(function)
    graph_module.graph._codegen = fx.graph.CodeGen()
    shapes = SHAPES | {"hidden": (ROWS, MIDDLE), "sent": (0,)}
    with FakeTensorMode():
        vals = {key: torch.empty(shape, dtype=torch.float64, device=device) for key, shape in shapes.items()}
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = vals.get(node.name, 0.5)
        elif isinstance(node.target, torch._ops.OpOverload):
            node._rename(node.target._schema.name.split("::")[1])
            node.meta["phase"] = Phase(name) if name in list(Phase) else Phase.UPDATE
            placed = {GROUP: group, CPU: device}
            node.args = tuple(
                placed.get(each, each) if isinstance(each, (str, torch.device)) else each for each in node.args
            )
    mesh = Mesh((Axis("pp", 2, group, coordinate, backend),))
    program = Program.from_graph(graph_module, _roles_of(graph_module), mesh)
    program.name = name
    program.inputs = [replace(each, name=_NAMES.get(each.name, each.name)) for each in program.inputs]
    fill_vals(program)
    program.outputs = [_output(program, k, value) for k, value in enumerate(program.output_values())]
    check(program)
    return program


def _roles_of(graph_module: fx.GraphModule) -> list[Role]:
    return [ROLES.get(node.name, Role.CHANNEL) for node in graph_module.graph.find_nodes(op="placeholder")]


def _output(program: Program, position: int, value: Any) -> Output:
    val = value.meta["val"]
    described = (tuple(val.shape), val.dtype)
    if program.name == "forward":
        return Output(OutputKind.CHANNEL, list(_NAMES.values())[position], Role.CHANNEL, *described)
    updated: list[Input] = [each for each in program.inputs if each.role is Role.PARAMETER]
    if position == 0:
        return Output(OutputKind.RESULT, "loss", Role.RESULT, *described)
    return Output(OutputKind.UPDATE, updated[position - 1].name, Role.PARAMETER, *described)


def pipeline(
    functions: Sequence[Function] = (forward, loss, backward),
    calls: Any = CALLS,
    group: str = GROUP,
    backend: str = "gloo",
    device: torch.device = CPU,
) -> Bundle:
    """The bundle; with other functions in the place of those above, or other orders."""
    names, coordinates = ("forward", "loss", "backward"), (0, 1, 0)
    programs = {
        name: program_of(function, name, coordinate, group, backend, device)
        for function, name, coordinate in zip(functions, names, coordinates, strict=True)
    }
    return Bundle.of("two layers", programs, calls, axis="pp")


def initial() -> dict[str, Any]:
    """The state of both layers, and the learning rate."""
    random = torch.Generator().manual_seed(0)
    state: dict[str, Any] = {k: torch.randn(SHAPES[k], generator=random, dtype=torch.float64) for k in ("w0", "w1")}
    return state | {"lr": 0.5}


def batch(step: int) -> dict[str, torch.Tensor]:
    """What a call is given, on both ranks."""
    random = torch.Generator().manual_seed(1 + step)
    return {key: torch.randn(SHAPES[key], generator=random, dtype=torch.float64) for key in ("x", "y")}
