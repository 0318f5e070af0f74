"""Provenance of traced nodes: phase, module, the user's line, and in backward, the value whose gradient a node is.

A dispatch mode sees every op while ``make_fx`` traces and records the state of that moment; nothing is guessed from the
graph afterwards. A backward op is run by an autograd node, whose sequence number leads to the forward op that made it:
it inherits that op's module and line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any
from warnings import catch_warnings, filterwarnings

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from passes import Phase
from passes.ir.ops import draws
from passes.ir.origin import Origin

from .._torch import (
    FakeTensor,
    HigherOrderOperator,
    TorchDispatchMode,
    current_autograd_node,
    get_proxy_mode,
    get_proxy_slot,
    newest_sequence_number,
    register_module_forward_hook,
    register_module_forward_pre_hook,
    sequence_number_of,
    tree_flatten,
)
from ..call.refusals import passes, refuse
from ..call.rng import Draws
from ..failed_ops import note_op
from ..interpreter.interrupts import answer_interrupt
from ..interpreter.source_lines import user_line
from ..python_state.reads import Reads
from .checkpointing import Recomputed, recomputing
from .tensor_attributes import check_outside
from .unsupported import Refused, check_collective, check_op, refuse_regions
from .values.kept_tensors import carry_kept
from .values.own_collectives import OwnCollectives, result_of
from .values.stand_ins import beside_the_graph, can_stand_in, stand_in

_TORCH_OPS = {"aten", "prim", "prims"}
_IS_NONZERO = torch.ops.aten.is_nonzero.default  # which lacks the tag of ops that return a value


@dataclass
class _Forward:
    """The forward op behind an autograd node."""

    number: int
    module: str
    source: str


class Recorder(TorchDispatchMode):
    """Writes an ``Origin`` to every node that ``make_fx`` adds while this mode is on."""

    supports_higher_order_operators = True  # they come here to be refused in a sentence

    def __init__(self, module_names: dict[int, str], reads: Reads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reads = reads
        self.constants: frozenset[int] | None = None  # ids of tensors that are lifted; None: all that are found
        self.collectives = OwnCollectives()
        self.updating = 0  # depth of Optimizer.step and zero_grad calls
        self.asked = 0  # how often the step has asked for the value of a tensor
        self._names = module_names
        self._modules: list[str] = []
        self._outside: int | None = None  # in a recomputation: how many modules were running when it began
        self._differentiable = False  # whether autograd follows the op that runs now
        self.last: fx.Node | None = None  # of those that have their origin
        self._count = 0
        self._forward: dict[int, _Forward] = {}
        self._hooked: set[int] = set()
        self._draws = Draws()
        self._recomputed = Recomputed()
        self._alive: list[Any] = []  # hooked autograd nodes, so that their ids stay unique
        self._hooks: list[Any] = []  # our hooks on them

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            refuse_regions(func)
        if any(issubclass(kind, DTensor) for kind in types):
            carry_kept(self._reads, (args, kwargs))
        # The shape function of a user's op is code of the user's.
        inside_torch = func.namespace in _TORCH_OPS and all(kind is FakeTensor for kind in types)
        with self._reads.unwatched() if inside_torch else nullcontext():
            return self._run_op(func, args, kwargs)

    def _run_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        current = current_autograd_node()
        if current is not None:
            self._hook_upstream(current)
            if func.namespace == "aten" and not torch.is_grad_enabled():  # else, torch asks where it must not raise
                answer_interrupt()
        if self.constants is not None:
            check_outside(func, args, self.constants)
        if func.namespace == "c10d" and (copies := self.collectives.copies(func, args)) is not None:
            for out, given in copies:
                self._run_op(torch.ops.aten.copy_.default, (out, given), {})
            return result_of(func, args)
        if check_collective(func):
            return beside_the_graph(func, args, kwargs or {})
        drawn = self._number(func, args, kwargs or {})
        if drawn is not None:  # a check goes on without a generator of the step's own
            kwargs = {name: None if isinstance(value, torch.Generator) else value for name, value in kwargs.items()}
        self._differentiable = _is_differentiable(func, args)
        try:
            result = func(*args, **(kwargs or {}))
        except Exception as error:
            note_op(error, func, args, kwargs or {})
            if not (can_stand_in(error, args) and passes(error)):
                raise
            result = self._stand_in(error, func, args, kwargs or {})
        result = check_op(func, args, result)
        self.asked += func is _IS_NONZERO or torch.Tag.data_dependent_output in func.tags
        self._note(current, drawn)
        return result

    def _stand_in(self, error: Exception, func: Any, args: Any, kwargs: Any) -> Any:
        """What a check takes for the result of an op, of which the failed trace leaves nothing in the graph."""
        for node in reversed(added_since(self.last, get_proxy_mode().tracer.graph)):  # type: ignore[union-attr]
            node.graph.erase_node(node)
        return stand_in(error, func, args, kwargs)

    def __enter__(self) -> Any:
        for node in added_since(None, get_proxy_mode().tracer.graph):  # type: ignore[union-attr]
            self.last = node  # nodes that are there already are not the step's
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for hook in self._hooks:  # they keep all traced tensors alive, where Python's collector does not look
            hook.remove()
        self._hooks.clear()
        self._alive.clear()

    def restored_generators(self) -> AbstractContextManager[None]:
        """Restore the states of the default generators at the end of the context."""
        return self._draws.restored_generators()

    @contextmanager
    def watch_modules(self) -> Iterator[None]:
        """Follow which module is running, by hooks on every module call."""

        def enter(module: nn.Module, args: Any) -> None:
            if self._outside is None and current_autograd_node() is not None:
                self._outside = len(self._modules)
            answer_interrupt()
            self._modules.append(self._names.get(id(module), type(module).__name__))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            del self._modules[-1:]

        with ExitStack() as stack:
            stack.enter_context(catch_warnings())
            filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")  # these
            stack.callback(register_module_forward_pre_hook(enter).remove)
            stack.callback(register_module_forward_hook(leave, always_call=True).remove)
            yield

    def tag_gradient(self, gradient: torch.Tensor, parameter: str) -> None:
        """Record that ``gradient`` is, for now, the whole gradient of ``parameter``."""
        origin = self._origin_of(gradient)
        if origin is not None:
            origin.grad_of = parameter

    def source_of(self, tensor: torch.Tensor) -> str:
        """The user's line that made a traced tensor, empty if it is not known."""
        origin = self._origin_of(tensor)
        return origin.source if origin is not None else ""

    def copy(self, nodes: Sequence[fx.Node], operands: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
        """Add copies of ops that read ``operands`` in the place of others; returns these with all copies."""
        graph, copies, numbers = nodes[0].graph, dict(operands), dict[int, int]()
        for node in nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: copies.get(each, each))
            name = node.name.rstrip("0123456789").removesuffix("_")  # FX makes it unique, and is slow with a number
            self.last = copies[node] = copy = graph.create_node(node.op, node.target, args, kwargs, name)
            origin: Origin = node.meta["origin"]
            if origin.number not in numbers:
                self._count = numbers[origin.number] = self._count + 1
            copy.meta = {**node.meta, "origin": replace(origin, number=numbers[origin.number])}
        return copies

    def _origin_of(self, tensor: torch.Tensor) -> Origin | None:
        mode = get_proxy_mode()
        assert mode is not None, "gradients are tagged while tracing"
        node = proxy_node(tensor, mode.tracer)
        return node.meta.get("origin") if node is not None else None

    def _number(self, op: Any, args: Any, kwargs: Any) -> int | None:
        """The number of a random op among the draws of the step; None for other ops."""
        if not draws(op, args, kwargs):
            return None
        if any(isinstance(given, torch.Generator) for given in (*args, *kwargs.values())):
            refuse(
                Refused,
                f"{op} draws from a generator of its own, which every rank would advance by itself. Leave generator= "
                "out, and call spmd.seed to choose the numbers, or draw outside of the step and pass the result.",
            )
        return self._draws.number(args, kwargs)

    def _note(self, current: Any, drawn: int | None) -> None:
        graph = get_proxy_mode().tracer.graph  # type: ignore[union-attr]
        added = added_since(self.last, graph)
        if not added:
            return
        run = recomputing(sys._getframe(2)) if current is not None else None
        if run is None and self._outside is not None:  # checkpoint leaves modules by an exception when it has enough
            del self._modules[self._outside :]
            self._outside = None
        origin = replace(self._origin(None if run else current), draw=drawn)
        for node in added:
            if node.op == "call_function":
                node.meta["origin"] = replace(origin)
                if run is not None:
                    self._mark(node, run)
        self.last = added[-1]

    def _mark(self, node: fx.Node, run: FrameType) -> None:
        """Record that checkpoint computes ``node`` again, in backward."""
        origin: Origin = node.meta["origin"]
        original = self._recomputed.original(node, run)
        of = original.meta.get("origin") if original is not None else None
        origin.phase, origin.recompute_of = Phase.BACKWARD, of.number if of is not None else origin.number

    def _origin(self, current: Any) -> Origin:
        self._count += 1
        if current is not None:
            forward = self._forward.get(sequence_number_of(current))
            module, source = (forward.module, forward.source) if forward else ("", user_line(sys._getframe(3)))
            return Origin(self._count, Phase.BACKWARD, module, source)
        module = self._modules[-1] if self._modules else ""
        source = user_line(sys._getframe(3))
        # An op's autograd node is made before the op is dispatched: the newest number is its own. Ops without one
        # come later under the same number and must not replace it.
        self._forward.setdefault(newest_sequence_number(), _Forward(self._count, module, source))
        return Origin(self._count, self._phase(), module, source)

    def _phase(self) -> Phase:
        if self.updating:
            return Phase.UPDATE
        # After backward and without autograd the step works on state: an average of parameters, a clip of gradients.
        after_backward = bool(self._hooked) and not self._differentiable and not self._modules
        return Phase.UPDATE if after_backward else Phase.FORWARD

    def _hook_upstream(self, node: Any) -> None:
        """Hook all autograd nodes that will run after ``node``, to learn which value's gradient each receives."""
        pending = [child for child, _ in node.next_functions if child is not None]
        while pending:
            child = pending.pop()
            if id(child) in self._hooked:
                continue
            self._hooked.add(id(child))
            self._alive.append(child)
            if hasattr(child, "variable"):  # accumulates into a leaf; tagged by the leaf's own hook
                continue
            self._hooks.append(child.register_prehook(self._cotangent_hook(sequence_number_of(child))))
            pending += [grandchild for grandchild, _ in child.next_functions if grandchild is not None]

    def _cotangent_hook(self, sequence_number: int) -> Any:
        def note(gradients: tuple[torch.Tensor | None, ...]) -> None:
            forward = self._forward.get(sequence_number)
            for index, gradient in enumerate(gradients):
                if forward is not None and isinstance(gradient, torch.Tensor):
                    origin = self._origin_of(gradient)
                    if origin is not None and origin.cotangent_of is None:
                        origin.cotangent_of = (forward.number, index)

        return note


def _is_differentiable(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether autograd has a node for this call; what is detached from a parameter is state from there on."""
    if not torch.is_grad_enabled() or func is torch.ops.aten.detach.default:
        return False
    return any(leaf.requires_grad for leaf in tree_flatten(args)[0] if isinstance(leaf, torch.Tensor))


def proxy_node(tensor: torch.Tensor, tracer: Any) -> fx.Node | None:
    """The node that made a traced tensor."""
    proxy = get_proxy_slot(tensor, tracer, None)
    if proxy is None:
        return None
    traced: Any = getattr(proxy, "proxy", proxy)
    node: fx.Node = traced.node
    return node


def symbol_node(symbol: torch.SymBool, tracer: Any) -> fx.Node | None:
    """The node that made a traced symbol; None for one that the trace did not compute."""
    proxy = get_proxy_slot(symbol, tracer, None)
    if proxy is None:
        return None
    node: fx.Node = proxy.force().node
    return node


def added_since(last: fx.Node | None, graph: fx.Graph) -> list[fx.Node]:
    """The nodes of ``graph`` behind ``last``, in order."""
    nodes: list[fx.Node] = []
    for node in reversed(graph.nodes):
        if node is last:
            break
        nodes.append(node)
    return nodes[::-1]
