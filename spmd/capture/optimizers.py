"""Optimizers while the step is traced: one tensor at a time, with counters computed as eager computes them.

In: an optimizer whose groups and state hold fakes, for the length of a trace. torch's optimizers are traced tensor by
tensor and with counters as tensors, so that nothing in the graph needs a value. Eager reads a counter out of its tensor
and computes with a Python float; ``TensorsAsFloats`` makes a tensor behave like one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from passes import CaptureError

from .._torch import TorchFunctionMode, compiling, tree_flatten, tree_map
from ..call.refusals import refuse
from .provenance import Recorder
from .unsupported import Refused
from .values.repeated_updates import RepeatedUpdates

# State of torch's optimizers that eager reads out of its tensor, to compute with Python floats.
_COUNTERS = {"step", "mu_product", "eta", "mu"}
# Optimizers that branch on the value of a counter, except in the form that keeps counters as tensors.
_BRANCHING = (torch.optim.RAdam, torch.optim.ASGD)
# Optimizers whose form with counters in tensors divides by the learning rate: where that is 0, a parameter without
# gradients so far would become 0/0. They take the form with counters as floats; ``TensorsAsFloats`` makes it traceable.
_DIVIDES_BY_RATE = (torch.optim.Adam, torch.optim.AdamW)
# Functions that return the number that they are given.
_COPIES = {"clone", "detach"}
# Optimizers that no graph can hold, each with the reason and what to do instead.
_REFUSED: dict[type[Optimizer], str] = {
    torch.optim.LBFGS: (
        "LBFGS calls its closure until the loss is small enough, so how much it computes depends on the data. Use an "
        "optimizer that needs no closure, or return the gradients from the step and run LBFGS outside of it"
    ),
    torch.optim.SparseAdam: (
        "SparseAdam needs sparse gradients, whose sizes depend on the data. Make the embedding without sparse=True, "
        "and use Adam"
    ),
}


def check_traceable(path: str, optimizer: Optimizer) -> None:
    """Raise ``CaptureError`` for an optimizer that no graph can hold."""
    for kind, reason in _REFUSED.items():
        if isinstance(optimizer, kind):
            raise CaptureError(f"{path} cannot be part of a compiled step: {reason}")


@contextmanager
def other_optimizers(optimizers: Iterable[Optimizer], recorder: Recorder) -> Iterator[None]:
    """Trace those that the step makes, whose state ends with it; raise ``Refused`` if any other steps or clears.

    The state of such a one is live, or it updates nothing.
    """
    known = {id(optimizer): optimizer for optimizer in optimizers}
    zero_grad, init = Optimizer.zero_grad, Optimizer.__init__
    stack = ExitStack()

    def begin(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        init(optimizer, *args, **kwargs)
        check_traceable("an optimizer that the step makes", optimizer)
        known[id(optimizer)] = optimizer
        traced = TracedOptimizer(optimizer, recorder)
        traced.use_plain_form()
        stack.enter_context(traced.watch_steps())

    def check(optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) not in known:
            raise Refused(
                f"it uses an optimizer ({type(optimizer).__name__}) that is not among its arguments, nor found with "
                "its module by a name in the step's code (an attribute of self, a closure variable, a global). Pass it "
                "as an argument, and the module, too."
            )

    def checked(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        check(optimizer)
        zero_grad(optimizer, *args, **kwargs)

    before_steps = register_optimizer_step_pre_hook(check)
    Optimizer.zero_grad = checked  # type: ignore[method-assign, assignment]
    Optimizer.__init__ = begin  # type: ignore[method-assign, assignment]
    try:
        with stack:
            yield
    finally:
        before_steps.remove()
        Optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        Optimizer.__init__ = init  # type: ignore[method-assign]


@contextmanager
def refuse_schedulers() -> Iterator[None]:
    """Raise ``Refused`` if a scheduler of torch's steps: what it counts is Python state of torch's own."""

    def refused(scheduler: Any, *_: Any, **__: Any) -> None:
        refuse(
            Refused,
            f"it calls a scheduler ({type(scheduler).__name__}), which a compiled step would do only once, while it is "
            "traced. Call schedulers outside of the step.",
        )

    kinds = [kind for kind in vars(lr_scheduler).values() if isinstance(kind, type) and "step" in vars(kind)]
    before = [(kind, vars(kind)["step"]) for kind in kinds if issubclass(kind, lr_scheduler.LRScheduler)]
    for kind, _ in before:
        kind.step = refused  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for kind, step in before:
            kind.step = step  # type: ignore[method-assign]


class TensorsAsFloats(TorchFunctionMode):
    """Makes some 0-dim tensors behave as Python floats.

    These are the counters given to ``add``, tensors that are made from no other, and what is computed from these alone.
    Among themselves they compute in fp64; next to other 0-dim tensors they take their dtype, as they do next to a
    counter that is written.
    """

    def __init__(self) -> None:
        super().__init__()
        self.active = True
        self._floats: dict[int, Tensor] = {}

    def add(self, tensor: Tensor) -> None:
        """Let ``tensor`` behave as a float."""
        self._floats[id(tensor)] = tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        no_float = bool(operands) and not any(map(self._is_float, operands))
        if not self.active or no_float or func.__name__ in ("__get__", "__set__"):
            return func(*args, **kwargs)
        written = operands[:1] if _is_in_place(func) else []
        others = [x for x in operands if not self._is_float(x)] + written
        dtype = _dtype_beside(others)

        def read(x: Any) -> Any:
            is_read = self._is_float(x) and x.is_floating_point() and not any(x is w for w in written)
            return x.to(dtype) if is_read and dtype is not None and func.__name__ not in _COPIES else x

        if func is Tensor.addcdiv_ and self._is_float(kwargs.get("value")):
            return args[0].add_(args[1] / args[2] * read(kwargs["value"]))  # it takes a Python number only
        result = func(*tree_map(read, args), **tree_map(read, kwargs))
        if not others and isinstance(result, Tensor) and not result.ndim:
            self.add(result)
        return result

    def _is_float(self, value: Any) -> bool:
        return id(value) in self._floats


def _is_in_place(func: Any) -> bool:
    name: str = func.__name__
    return name.endswith("_") and not name.endswith("__")


def _dtype_beside(others: Iterable[Tensor]) -> torch.dtype | None:
    """The dtype of floats next to ``others``; None where torch's own promotion treats 0-dim tensors as floats."""
    dtypes = [x.dtype for x in others if x.is_floating_point() or x.is_complex()]
    if any(x.ndim for x in others):
        return None
    return reduce(torch.promote_types, dtypes) if dtypes else torch.float64


class TracedOptimizer:
    """One optimizer for the length of a trace: it runs in its plain form, and its steps are recorded as updates.

    Make it before ``use_plain_form`` of any other: which form the user chose is read from groups that may be shared.
    """

    def __init__(self, optimizer: Optimizer, recorder: Recorder) -> None:
        self.optimizer, self.recorder = optimizer, recorder
        groups = optimizer.param_groups
        counts_in_tensors = any(group.get("capturable") or group.get("differentiable") for group in groups)
        fused = any(group.get("fused") for group in groups)
        rates = [group["lr"] for group in groups if isinstance(group.get("lr"), Tensor)]
        counts_in_floats = _is_torchs(optimizer) and not counts_in_tensors
        # A learning rate that is a tensor rounds its operands in an order that the form with tensor counters changes.
        self.in_floats = bool(counts_in_floats and rates and not fused and not isinstance(optimizer, _BRANCHING))
        self.floats = TensorsAsFloats() if counts_in_floats and not self.in_floats else None

    def use_plain_form(self) -> None:
        """Set the groups to one tensor at a time, and to counters as tensors where torch has that form."""
        divides = self.floats is not None and isinstance(self.optimizer, _DIVIDES_BY_RATE)
        plain = {"foreach": False, "fused": False, "capturable": not (self.in_floats or divides)}
        for group in self.optimizer.param_groups:
            if self.floats is not None and group.get("fused") and isinstance(group["lr"], Tensor):
                self.floats.add(group["lr"])  # a fused kernel reads it as a float, too
            group.update({key: value for key, value in plain.items() if key in group})

    @contextmanager
    def watch_steps(self) -> Iterator[None]:
        """Record every call of ``optimizer.step`` as an update for the length of the context."""
        attributes = self.optimizer.__dict__
        before = {key: attributes[key] for key in ("step",) if key in attributes}  # a scheduler sets one
        step: Callable[..., Any] = self.optimizer.step

        def watched(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = tree_map(self._outside_update, (args, kwargs))
            with self.floats or nullcontext(), self._updating(True), RepeatedUpdates(self.recorder).of(self.optimizer):
                self._add_counters()  # one that the step makes may have state before it steps
                return step(*args, **kwargs)

        self._add_counters()
        attributes["step"] = watched
        try:
            yield
        finally:
            del attributes["step"]
            attributes.update(before)

    def _add_counters(self) -> None:
        for values in self.optimizer.state.values():
            for key, value in values.items() if isinstance(values, dict) else ():
                if key in _COUNTERS and self.floats is not None and isinstance(value, Tensor):
                    self.floats.add(value)

    def _outside_update(self, closure: Any) -> Any:
        """A closure of ``step`` that is not recorded as a part of the update."""
        if not callable(closure):
            return closure

        def run() -> Any:
            with self._updating(False):
                return closure()

        return run

    @contextmanager
    def _updating(self, inside: bool) -> Iterator[None]:
        by = 1 if inside else -1
        self.recorder.updating += by
        if self.floats is not None:
            self.floats.active = inside
        try:
            with compiling(not (inside and self.in_floats)):
                yield
        finally:
            self.recorder.updating -= by
            if self.floats is not None:
                self.floats.active = not inside


def _is_torchs(optimizer: Optimizer) -> bool:
    """Whether the optimizer's class is torch's, or derived from one of torch's."""
    classes = [kind for kind in type(optimizer).__mro__ if kind is not Optimizer]
    return any(kind.__module__.startswith("torch.optim") for kind in classes)
