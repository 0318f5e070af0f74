"""Make ahead the state that optimizers make in their first step: the program of the first call then serves all calls.

Torch's optimizers begin with constants (zeros, a count of none) and go on as in any later step, so the step computes
the same whether they or we have made these; unless it looks at the state itself, or changes numbers of a parameter
group. What was made is removed then, and the step is traced without it. So is state that it leaves alone.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from passes import OutputKind, Program

from .._torch import TorchDispatchMode, begin_optimizer_state, optimizer_hooks
from .state import Arguments, Slot

# Rprop and ASGD begin with the learning rate, which the step may change before they read it.
_FROM_CONSTANTS = {
    *(optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
    *(optim.Adadelta, optim.RMSprop, optim.Adafactor, optim.Muon),
}
_LARGE = 1 << 20  # bytes from which zeros take no memory until they are written


Idle = WeakTensorKeyDictionary
"""The parameters that a step was found not to update. Were state made for them, each compilation would trace twice."""


class InitialState:
    """The state made ahead for one call: of each optimizer, for the parameters that it had none for."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Optimizer, Tensor]] = {}  # by the id of the dict that holds a parameter's state
        self.is_seen = False  # whether the step, and not the optimizer's own code, may have noticed that it was made

    @classmethod
    def of(cls, arguments: Arguments, idle: Idle | None = None) -> InitialState:
        """Make what torch's optimizers lack, but for ``idle`` parameters.

        With a scaler nothing is made: it may skip the first step.
        """
        initial = cls()
        for optimizer in () if arguments.scalers else arguments.optimizers.values():
            if any(optimizer_hooks(optimizer)):
                continue  # they may look at the state, too
            missing = [p for group in optimizer.param_groups for p in group["params"] if _lacks(optimizer, p)]
            missing = [p for p in missing if idle is None or p not in idle]
            try:
                _make(optimizer, missing)
            except Exception as error:
                _remove(optimizer, missing)
                if isinstance(error, (MemoryError, OSError, torch.OutOfMemoryError)):
                    raise  # there is no memory for it
                continue  # the step itself raises it too, and is traced next
            initial._made |= {id(state): (optimizer, p) for p in missing if (state := optimizer.state.get(p))}
        return initial

    @property
    def made_any(self) -> bool:
        """Whether there is state that was made here."""
        return bool(self._made)

    def holds(self, slot: Slot) -> bool:
        """Whether a tensor was made here, and so is equal on all ranks."""
        return id(slot.holder) in self._made

    def remove_idle(self, program: Program, slots: list[Slot], idle: Idle) -> bool:
        """Remove the state of parameters that the step does not update, or all that it saw; whether there was any.

        Those that an optimizer leaves alone which updates others, as it does without a gradient, become ``idle``.
        """
        updated = {output.name for output in program.outputs if output.kind is OutputKind.UPDATE}
        in_use = {id(slot.holder) for slot in slots if slot.input.name in updated}
        for key, (optimizer, parameter) in self._made.items():
            if key not in in_use and any(id(state) in in_use for state in optimizer.state.values()):
                idle[parameter] = None
        return self._remove(lambda key: self.is_seen or key not in in_use)

    def remove(self) -> None:
        """Remove everything that was made here."""
        self._remove(lambda key: True)

    def remover(self) -> Callable[[], None]:
        """Make what removes all that is there now, also of parameters that are split since; it holds on to none."""
        optimizers = {id(optimizer): weakref.ref(optimizer) for optimizer, _ in self._made.values()}
        return partial(_remove_states, [*optimizers.values()], frozenset(self._made))

    def _remove(self, condition: Callable[[int], bool]) -> bool:
        found = {key: each for key, each in self._made.items() if condition(key)}
        for key, (optimizer, parameter) in found.items():
            if id(optimizer.state.get(parameter)) == key:
                del optimizer.state[parameter], self._made[key]
        return bool(found)


def _remove_states(optimizers: Sequence[weakref.ref[Optimizer]], made: frozenset[int]) -> None:
    """Remove the states with these ids."""
    for optimizer in (found for each in optimizers if (found := each()) is not None):
        for parameter in [p for p, state in optimizer.state.items() if id(state) in made]:
            del optimizer.state[parameter]


def _lacks(optimizer: Optimizer, parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter not in optimizer.state


def _make(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    """Make the state with which the optimizer would begin, by its own code where it has constants only."""
    if type(optimizer) is optim.SGD:
        _make_momentum(optimizer, parameters)
    elif type(optimizer) in _FROM_CONSTANTS and parameters:
        with torch.no_grad(), _gradients_of(optimizer, parameters), _ZerosOnDemand():  # type: ignore[no-untyped-call]
            for group in optimizer.param_groups:
                begin_optimizer_state(optimizer, group)


def _make_momentum(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    """Zeros: times the momentum, plus the gradient, they are the gradient, with which torch begins."""
    wanted = set(map(id, parameters))
    with torch.no_grad(), _ZerosOnDemand():  # type: ignore[no-untyped-call]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in wanted and group["momentum"] != 0 and group["dampening"] == 0:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _remove(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    for parameter in parameters:
        optimizer.state.pop(parameter, None)


@contextmanager
def _gradients_of(optimizer: Optimizer, parameters: list[Tensor]) -> Iterator[None]:
    """Let these parameters alone have gradients: torch makes state for parameters with gradients. Nobody reads them."""
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.grad for p in everything]
    wanted = set(map(id, parameters))
    try:
        for p in everything:
            p.grad = _gradient_like(p) if id(p) in wanted else None
        yield
    finally:
        for p, gradient in zip(everything, before, strict=True):
            p.grad = gradient


def _gradient_like(parameter: Tensor) -> Tensor:
    """A gradient in its shape that takes next to no memory."""
    if isinstance(parameter, DTensor):
        return torch.empty_like(parameter)
    return parameter.new_empty(()).expand_as(parameter)


def is_zeros_on_demand(tensor: Tensor) -> bool:
    """Whether the memory of a tensor was made here, for it alone."""
    return _on_demand.get(tensor.data_ptr()) is tensor


_on_demand: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # by first address


class _ZerosOnDemand(TorchDispatchMode):
    """Large zeros on the CPU are pages that exist once they are written: a rank may soon keep a part of them only."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.zeros_like.default:
            return _zeros_like(args[0], kwargs or {})
        return func(*args, **(kwargs or {}))


def _zeros_like(tensor: Tensor, options: dict[str, Any]) -> Tensor:
    like = torch.empty_like(tensor, **options)
    if type(like) is not Tensor or like.device.type != "cpu" or like.nbytes < _LARGE:
        return like.zero_()
    pages = mmap.mmap(-1, like.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = torch.frombuffer(pages, dtype=torch.uint8).view(like.dtype)
    zeros = flat.as_strided(like.shape, like.stride())
    _on_demand[zeros.data_ptr()] = zeros
    return zeros
