"""``torch.amp.GradScaler`` among the arguments of a step.

Its scale and growth tracker are state, kept on the user's object. In eager it asks for the value of "some gradient is
not finite" and then steps the optimizer or does not. A graph has no such branch: here the optimizer always steps, and
each tensor that it wrote is selected, old or new. State that the skipped step would not have made is not stored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from passes import CaptureError

from .._torch import SCALER_LAZY_START, SCALER_OPTIMIZERS, SCALER_STATE, SCALER_STEP, STEP_HANDLES_SCALING, version_of


def start(path: str, scaler: GradScaler, device: torch.device) -> dict[str, str]:
    """The keys of a scaler's state, by name; a scaler that is new makes it now, with the values it would begin with.

    Raises ``CaptureError`` for a scaler that has unscaled gradients and waits for its update.
    """
    if not scaler.is_enabled():
        return {}
    if _waits(scaler):
        raise CaptureError(
            f"{path} waits for its update: call unscale_, step and update all in the step, or none there"
        )
    if vars(scaler)[SCALER_STATE["scale"]] is None:
        getattr(scaler, SCALER_LAZY_START)(device)
    return SCALER_STATE


def state_of(scaler: GradScaler) -> list[Tensor] | None:
    """The state of a scaler, as ``start`` names it; None if it has to be started, or is not ready."""
    if not scaler.is_enabled():
        return []
    found = [vars(scaler)[key] for key in SCALER_STATE.values()]
    return None if any(tensor is None for tensor in found) or _waits(scaler) else found


def _waits(scaler: GradScaler) -> bool:
    notes = vars(scaler).get(SCALER_OPTIMIZERS, {})
    return any(note["found_inf_per_device"] for note in notes.values())


@dataclass(frozen=True)
class Settings:
    """What a trace takes for granted of a scaler."""

    scaler: GradScaler = field(repr=False)
    enabled: bool
    rates: tuple[float, ...]

    @classmethod
    def of(cls, scaler: GradScaler) -> Settings:
        """Those it has now."""
        if not scaler.is_enabled():
            return cls(scaler, False, ())
        rates = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
        return cls(scaler, True, rates)


@dataclass
class Skips:
    """The steps that were taken under a condition while traced."""

    made: dict[tuple[int, int, Any], Tensor] = field(default_factory=dict)

    def condition(self, optimizer: Optimizer, parameter: Tensor, key: Any) -> Tensor | None:
        """True where ``optimizer.state[parameter][key]`` was not made after all; None if it was made in any case."""
        return self.made.get((id(optimizer), id(parameter), key))

    @contextmanager
    def watch(self, scalers: dict[str, GradScaler], optimizers: dict[str, Optimizer]) -> Iterator[None]:
        """Let scalers select instead of branching. Raises ``CaptureError`` if one is left without its update."""
        with ExitStack() as stack:
            stack.enter_context(_no_others_start())
            for optimizer in optimizers.values() if scalers else ():
                stack.enter_context(_set(vars(optimizer), STEP_HANDLES_SCALING, False))  # as fused ones do on their own
            for scaler in (each for each in scalers.values() if each.is_enabled()):
                notes: dict[int, Any] = defaultdict(vars(scaler)[SCALER_OPTIMIZERS].default_factory)
                stack.enter_context(_set(vars(scaler), SCALER_OPTIMIZERS, notes))
                stack.enter_context(_set(vars(scaler), SCALER_STEP, self._step))
            yield

    def check(self, scalers: dict[str, GradScaler]) -> None:
        """Raise ``CaptureError`` if a scaler is left without its update at the end of the step."""
        for path, scaler in scalers.items():
            if _waits(scaler):
                raise CaptureError(
                    f"the step unscales gradients with {path} but does not update it: what {path} found would be lost "
                    f"between calls. Call {path}.update() at the end of the step"
                )

    def _step(self, optimizer: Optimizer, found: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step()``, taken back where some gradient is not finite."""
        with torch.no_grad():
            infs = list(found["found_inf_per_device"].values())
            skip = sum(infs[1:], infs[0]) != 0
            written = [_Written(tensor) for tensor in _tensors_of(optimizer)]
            state = {parameter: dict(values) for parameter, values in optimizer.state.items()}
        result = optimizer.step(*args, **kwargs)
        with torch.no_grad():
            before = {id(each.tensor): each.before for each in written}
            for each in written:
                each.undo(skip)
            for parameter, values in optimizer.state.items():
                for key, value in values.items():
                    old = state.get(parameter, {}).get(key)
                    if old is None and isinstance(value, Tensor):
                        self.made[id(optimizer), id(parameter), key] = skip
                    elif isinstance(value, Tensor) and value is not old:
                        values[key] = torch.where(skip, before[id(old)], value)
        return result


class _Written:
    """A tensor that an optimizer may write, as it was before."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version, self.before = tensor, version_of(tensor), tensor.detach().clone()

    def undo(self, condition: Tensor) -> None:
        """Put the values from before back where ``condition`` holds."""
        if version_of(self.tensor) != self.version:
            self.tensor.copy_(torch.where(condition, self.before, self.tensor))


def _tensors_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Parameters, gradients and state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
    for values in optimizer.state.values():
        yield from (value for value in values.values() if isinstance(value, Tensor))


@contextmanager
def _set(attributes: dict[str, Any], key: str, value: Any) -> Iterator[None]:
    before = {key: attributes[key]} if key in attributes else {}
    attributes[key] = value
    try:
        yield
    finally:
        del attributes[key]
        attributes.update(before)


@contextmanager
def _no_others_start() -> Iterator[None]:
    """A scaler that is no argument must not come to hold traced tensors."""
    lazy_start = getattr(GradScaler, SCALER_LAZY_START)

    def refuse(scaler: GradScaler, device: torch.device) -> NoReturn:
        raise CaptureError("the step uses a GradScaler that is not among its arguments: pass it as an argument")

    setattr(GradScaler, SCALER_LAZY_START, refuse)
    try:
        yield
    finally:
        setattr(GradScaler, SCALER_LAZY_START, lazy_start)
