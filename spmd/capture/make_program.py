"""Capture: from the user's function and its arguments to one functional graph on global shapes.

Two traces. The first (``trace.py``) runs the step with autograd and the optimizer and records mutations as they happen.
The second runs the first one's graph once more, below autograd, to make it functional and to take ops apart
(``decompositions.py``). Where a node came from is noted in the first and carried over.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from traceback import extract_tb
from typing import Any, Literal

import torch
from torch import fx, nn

from passes import CaptureError, Input, Output, OutputKind, Program, Role, SpmdError
from passes.ir.ops import draws
from passes.ir.origin import Origin

from .._torch import (
    ConstantSource,
    DataDependentOutputException,
    DimDynamic,
    DisableAutocast,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    TreeSpec,
    UnsupportedOperatorException,
    get_proxy_mode,
    make_fx,
    rename,
    tree_unflatten,
    use_lazy_graph_module,
)
from ..call.call import Call
from ..call.inputs import BatchInput
from ..call.state import Arguments, HyperParameter, Slot, gradient_name, state_name, submodules_of
from ..source_lines import describe_line, module_of, user_place
from .constraint import constraints_on
from .decompositions import table
from .fake_mode import ShapesOnly
from .hyper_conditions import HyperGuards
from .python_reads import Reads
from .trace import Fakes, Trace
from .unsupported import Refused, check_modules


@dataclass(frozen=True)
class NewState:
    """State that the step made: where it goes after the call."""

    parameter: str
    value: Any  # ``FromOutput``, or a plain Python value
    optimizer: str = ""  # empty for a gradient
    key: Any = None
    unless: FromOutput | None = None  # true in a call that did not make it after all


@dataclass
class Captured:
    """A captured step: the program, and what is needed to put its outputs where they belong."""

    program: Program
    guards: HyperGuards
    constants: list[torch.Tensor]
    result_leaves: list[Any]  # plain values, and ``FromOutput`` where a traced value goes
    result_spec: TreeSpec
    new_state: list[NewState]
    gone_gradients: list[str]  # parameters whose kept gradient the step sets to None

    def result(self, outputs: Sequence[Any]) -> Any:
        """What the user's function returns, from the program's results in order."""
        leaves = [outputs[leaf.index] if isinstance(leaf, FromOutput) else leaf for leaf in self.result_leaves]
        return tree_unflatten(leaves, self.result_spec)


@dataclass(frozen=True)
class FromOutput:
    """A value that the graph computes: its place among the outputs that are no updates."""

    index: int


def capture(function: Callable[..., Any], call: Call, name: str, reads: Reads) -> Captured:
    """Trace one call of ``function``, and note in ``reads`` what plain Python state it looks at.

    Raises ``CaptureError`` where it cannot be traced; nothing is changed then.
    """
    arguments, slots, hyper_parameters, inputs = call.arguments, call.slots, call.hyper_parameters, call.inputs
    check_modules(submodules_of(arguments.modules))
    fakes = _fakes(slots, hyper_parameters, inputs)
    trace = Trace(function, arguments, slots, hyper_parameters, fakes, reads)
    with _explained(function, arguments), constraints_on(call.mesh):
        first = trace.graph_module()
    assert trace.ends is not None
    second, constants = _functional(first, fakes)
    declared = [
        *[slot.input for slot in slots],
        *[Input(Role.HYPER_PARAMETER, h.name, dtype=_dtype_of(h.get())) for h in hyper_parameters],
        *[Input(x.role, x.name, x.shape, x.dtype, x.placement) for x in inputs],
        *[Input(Role.CONSTANT, f"constant.{k}", tuple(c.shape), c.dtype) for k, c in enumerate(constants)],
    ]
    program = Program(second, declared, [], call.mesh, name=name)
    captured = _bind_outputs(program, trace, constants)
    _drop_unread_hyper_parameters(program)
    captured.guards = HyperGuards.of(fakes.shapes, fakes.symbols, trace.branches)
    second.graph.lint()
    second.recompile()
    return captured


def _dtype_of(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, torch.Tensor) else None


def _fakes(slots: list[Slot], hyper_parameters: list[HyperParameter], inputs: Sequence[BatchInput]) -> Fakes:
    shapes = ShapeEnv(allow_dynamic_output_shape_ops=False)  # a shape that depends on values raises at its line
    mode = ShapesOnly(shape_env=shapes, static_shapes=True)
    with mode:
        numbers = [_fake_number(shapes, hyper) for hyper in hyper_parameters]
        return Fakes(
            mode,
            shapes,
            [_fake_state(slot) for slot in slots],
            [fake for fake, _ in numbers],
            [symbol for _, symbol in numbers],
            [_fake_input(x) for x in inputs],
        )


def _fake_state(slot: Slot) -> torch.Tensor:
    """A stand-in of global shape; never a copy of the live value."""
    live = slot.get()
    fake = torch.empty_strided(tuple(live.shape), live.stride(), dtype=live.dtype, device=live.device)
    if isinstance(live, nn.Parameter):
        return nn.Parameter(fake, requires_grad=live.requires_grad)
    return fake.requires_grad_(live.requires_grad) if live.requires_grad else fake


def _fake_input(described: BatchInput) -> torch.Tensor:
    """Contiguous, as every argument is when the program runs."""
    live = described.value
    fake = torch.empty(described.shape, dtype=live.dtype, device=live.device)
    return fake.requires_grad_(live.requires_grad) if live.requires_grad else fake


def _fake_number(shapes: ShapeEnv, hyper: HyperParameter) -> tuple[Any, Any]:
    """(a stand-in, its symbol)."""
    value = hyper.get()
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device=value.device), None
    source = ConstantSource(hyper.name)
    symbol = shapes.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    make = shapes.create_symintnode if isinstance(value, int) else shapes.create_symfloatnode
    return make(symbol, hint=value, source=source), symbol


class _explained:
    """Turn what tracing raises into a sentence at the user's own line."""

    def __init__(self, function: Callable[..., Any], arguments: Arguments) -> None:
        self.function = function
        self.names = {id(module): name for name, module in submodules_of(arguments.modules)}

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> Literal[False]:
        if error is None or isinstance(error, SpmdError) or not isinstance(error, Exception):
            return False
        place = user_place(traceback)
        where = f"{place[0]}:{place[1]}" if place else _definition(self.function)
        module = module_of(traceback, self.names)
        where += f" in {module}" if module else ""
        reason = _reason(error)
        if reason is None:
            error.add_note(f"raised at {where} while spmd traced {self.function.__qualname__}; nothing was changed")
            return False
        line = f"\n    {describe_line(*place)}" if place else ""
        raise CaptureError(
            f"{self.function.__qualname__} cannot be traced into one graph: {reason} at {where}.{line}"
        ) from error


def _definition(function: Callable[..., Any]) -> str:
    """Where ``function`` is defined, or its name."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


_WAYS_OUT = (
    "Select with torch.where instead of branching, return the tensor and look at it outside of the step, "
    "or replace the submodule through spmd.Override"
)


# What says the same in shapes that are known, by the op whose shape is not.
_INSTEAD: dict[Any, str] = {
    torch.ops.aten.bincount: "Count with torch.nn.functional.one_hot(x, classes).sum(0)",
    torch.ops.aten.nonzero: "Keep all rows and weigh them with the mask, select with torch.where(mask, a, b), or "
    "return the mask and look at it outside of the step",
    torch.ops.aten._ctc_loss: "The memory of the loss is as long as the longest target: compute it from padded targets "
    "and a mask, with torch.logsumexp in a loop over time",
    torch.ops.aten.masked_select: "Keep all entries and weigh them with the mask: (x * mask).sum() / mask.sum()",
}


_CLIPPING = os.path.join("torch", "nn", "utils", "clip_grad.py")
_NORM_OUTSIDE = "leave error_if_nonfinite out, return the norm from the step and look at it there"


def _reason(error: Exception) -> str | None:
    """What went wrong, as a clause that ends before "at <line>"; None for an error of the user's own."""
    if isinstance(error, Refused):
        return str(error)
    if isinstance(error, (DataDependentOutputException, GuardOnDataDependentSymNode)):
        if any(frame.filename.endswith(_CLIPPING) for frame in extract_tb(error.__traceback__)):
            return f"clipping needs the value of the norm, to raise if it is not finite: {_NORM_OUTSIDE}. It was needed"
        return f"it needs the value of a tensor, which is not known while tracing. {_WAYS_OUT}. This was needed"
    if isinstance(error, DynamicOutputShapeException):
        instead = _INSTEAD.get(error.func.overloadpacket, _WAYS_OUT)
        return f"the shape of a result depends on values ({error.func}). {instead}. This was needed"
    if isinstance(error, UnsupportedOperatorException):
        return f"{error.func} has no result that can be told from shapes alone. {_WAYS_OUT}. It is called"
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], torch.Tensor):
        return (
            "it looks up a tensor in a dict, but while tracing, and after a step that splits parameters, other objects "
            "stand in their place. Look up by name. This happens"
        )
    text = str(error)
    return next((reason for hint, reason in _REASONS.items() if hint in text), None)


_FROM_OUTSIDE = (
    "it uses a tensor or a module that is not among its arguments (from a closure, a global or an object that holds "
    "it). Pass it as an argument. It is used"
)
_MEMORY = f"it takes a tensor's memory out of torch. {_WAYS_OUT}. This happens"
_AS_SIZE = f"it takes the value of a tensor for a size, which is not known while tracing. {_WAYS_OUT}. It does so"
_CONVERTED = "it moves or converts a module, or makes one: do so outside of the step. This happens"
_DEVICES = "it computes with tensors on several devices: move them to one before the step. It does so"
_SPARSE = "it makes a sparse tensor, which cannot be split over ranks: use dense ones (sparse=False). It is made"
_NESTED = "it makes a nested tensor, whose shape depends on values: pad, and pass a mask. It is made"

# What torch's errors say, where their type alone does not.
_REASONS = {
    "convert all Tensors to FakeTensors": _FROM_OUTSIDE,
    "Mixing fake modes": _FROM_OUTSIDE,
    "expected to contain only concrete integers": _AS_SIZE,
    "Couldn't swap": _CONVERTED,
    "found at least two devices": _DEVICES,
    "SparseMeta": _SPARSE,
    "is not tracked with proxy": _NESTED,
    "FakeTensor.__format__": f"it formats a tensor as text, and so needs its value. {_WAYS_OUT}. This happens",
    "numpy": _MEMORY,
    ".tolist()": _MEMORY,
    "data_ptr": _MEMORY,
    "storage": _MEMORY,
}


class _Functional(fx.Interpreter):
    """Runs the first trace's graph under the second trace, and carries over where each node came from."""

    def __init__(self, module: fx.GraphModule, constants: Mapping[str, Any]) -> None:
        super().__init__(module)
        self.constants = constants
        self.last: fx.Node | None = None
        self.draws: dict[tuple[int, int], int] = {}  # by the draw of the first trace, and the place in what it became

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.constants[target]

    def run_node(self, n: fx.Node) -> Any:
        origin: Origin | None = n.meta.get("origin")
        try:
            result = super().run_node(n)
        except Exception as error:
            line = f"\n    {origin.source}" if origin is not None else ""
            raise CaptureError(f"{n.target} cannot be made functional or taken apart: {error}{line}") from error
        mode = get_proxy_mode()
        assert mode is not None
        added = []
        for node in reversed(mode.tracer.graph.nodes):
            if node is self.last or node.op == "placeholder":
                break
            added.append(node)
        if added and origin is not None:
            for node in added[1:]:
                node.meta["origin"] = replace(origin, grad_of=None, cotangent_of=None)
            added[0].meta["origin"] = origin
            self._number(added[::-1], origin)
        self.last = added[0] if added else self.last
        return result

    def _number(self, added: list[fx.Node], origin: Origin) -> None:
        """Number the random ops that one became; where it draws what another did, so do they."""
        if origin.draw is None:
            return
        random = [node for node in added if draws(node.target, node.args, node.kwargs)]
        for place, node in enumerate(random):
            node.meta["draw"] = self.draws.setdefault((origin.draw, place), len(self.draws))


def _functional(first: fx.GraphModule, fakes: Fakes) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """(the functional graph, the constants it takes as its last inputs)."""
    names = [node.target for node in first.graph.find_nodes(op="get_attr")]
    names = list(dict.fromkeys(names))
    constants = [getattr(first, str(name)) for name in names]
    with fakes.mode:
        stand_ins = [torch.empty_strided(c.shape, c.stride(), dtype=c.dtype, device=c.device) for c in constants]

    def run(*flat: Any) -> Any:
        count = len(fakes.flat)
        interpreter = _Functional(first, dict(zip(names, flat[count:], strict=True)))
        return interpreter.run(*flat[:count])

    functional = torch.func.functionalize(run, remove="mutations")
    with torch.no_grad(), DisableAutocast(), use_lazy_graph_module(True):
        second = make_fx(functional, decomposition_table=table(), tracing_mode="fake")(*fakes.flat, *stand_ins)
    return second, constants


def _take_write_backs(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Erase the copies into inputs that functionalization ends with; return what each input was to become."""
    written: dict[fx.Node, fx.Node] = {}
    for node in reversed(graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)):
        target, value = node.args[:2]
        assert isinstance(target, fx.Node) and target.op == "placeholder" and isinstance(value, fx.Node)
        node.replace_all_uses_with(value)
        graph.erase_node(node)
        written[target] = value
    return written


def _bind_outputs(program: Program, trace: Trace, constants: list[torch.Tensor]) -> Captured:
    """Say what each traced value at the end is: a result, an update or new state."""
    ends = trace.ends
    assert ends is not None
    written = _take_write_backs(program.graph)
    values = iter(program.output_values())
    captured = Captured(program, HyperGuards(), constants, [], ends.result_spec, [], [])
    returned: list[Any] = []
    outputs: list[Output] = []

    def add(output: Output, value: Any = None) -> FromOutput:
        value = next(values) if value is None else value
        returned.append(value)
        outputs.append(_with_val(output, value))
        return FromOutput(sum(o.kind is not OutputKind.UPDATE for o in outputs) - 1)

    for index, leaf in enumerate(ends.results):
        result = Output(OutputKind.RESULT, f"result.{index}", Role.RESULT)
        captured.result_leaves.append(add(result) if _traced(leaf) else leaf)
    placeholders = program.placeholders
    for position, (slot, end) in enumerate(zip(trace.slots, ends.slots, strict=True)):
        update = Output(OutputKind.UPDATE, slot.input.name, slot.input.role, of=slot.input.of)
        if not _traced(end):
            captured.gone_gradients.append(slot.input.of or "")
        else:
            add(update)
            if returned[-1] is placeholders[position]:  # unchanged
                returned.pop(), outputs.pop()
    for node, declared in zip(placeholders, program.inputs, strict=True):
        if node in written and not declared.role.is_state:  # an argument that the step writes into
            add(Output(OutputKind.UPDATE, declared.name, declared.role), written[node])
    for parameter in ends.gradients:
        new = add(Output(OutputKind.NEW, gradient_name(parameter), Role.GRADIENT, of=parameter))
        captured.new_state.append(NewState(parameter, new))
    skips = [add(Output(OutputKind.RESULT, f"skipped.{index}", Role.RESULT)) for index, _ in enumerate(ends.skips)]
    for entry in ends.optimizer_state:
        name = state_name(entry.optimizer, entry.key, entry.parameter)
        made = Output(OutputKind.NEW, name, Role.OPTIMIZER_STATE, of=entry.parameter)
        value = add(made) if _traced(entry.value) else entry.value
        unless = None if entry.unless is None else skips[entry.unless]
        captured.new_state.append(NewState(entry.parameter, value, entry.optimizer, entry.key, unless))
    program.set_outputs(returned, outputs)
    _describe_nodes(program)
    for node, declared in zip(placeholders, program.inputs, strict=True):
        rename(node, re.sub(r"\W+", "_", declared.name).strip("_"))
    return captured


def _traced(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, torch.SymFloat, torch.SymInt))


def _with_val(output: Output, value: Any) -> Output:
    val = value.meta["val"] if isinstance(value, fx.Node) else value
    if isinstance(val, torch.Tensor):
        return replace(output, shape=tuple(val.shape), dtype=val.dtype)
    return output


def _describe_nodes(program: Program) -> None:
    """Spell an ``Origin`` out in ``meta``, in the words that passes, dumps and errors use."""
    became: dict[int, list[fx.Node]] = {}  # by the number of an origin
    for node in program.graph.nodes:
        origin: Origin | None = node.meta.get("origin")
        if origin is None:
            continue
        became.setdefault(origin.number, []).append(node)
        if origin.recompute_of is not None:
            place, originals = len(became[origin.number]) - 1, became.get(origin.recompute_of, [node])
            node.meta["recompute_of"] = originals[min(place, len(originals) - 1)].name
        node.meta["phase"], node.meta["module"], node.meta["source"] = origin.phase, origin.module, origin.source
        if origin.grad_of is not None:
            node.meta["grad_of"] = origin.grad_of


def _drop_unread_hyper_parameters(program: Program) -> None:
    inputs = []
    for node, declared in zip(program.placeholders, program.inputs, strict=True):
        if declared.role is Role.HYPER_PARAMETER and not node.users:
            program.graph.erase_node(node)
        else:
            inputs.append(declared)
    program.inputs = inputs
