"""``torch.amp.GradScaler`` among the arguments of a step.

Its scale and growth tracker are state, which stays on the user's object. Eager reads the value of "some gradient is not
finite" and steps the optimizer or skips the step. A graph has no such branch: here the optimizer always steps, and for
each tensor that it wrote, the old or the new value is selected. State that a skipped step would not make is not stored.
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
from .nested_state import Path, leaves_of, tensors_in, with_item
from .refusals import refuse


def start(path: str, scaler: GradScaler, device: torch.device) -> dict[str, str]:
    """The keys of a scaler's state, by name; a new scaler makes its initial state now.

    Raises ``CaptureError`` for a scaler that has unscaled gradients and has not been updated since.
    """
    if not scaler.is_enabled():
        return {}
    if _waits(scaler):
        raise CaptureError(
            f"{path} has unscaled gradients and waits for its update. Call unscale_, step and update all in the step, "
            "or none of them"
        )
    if vars(scaler)[SCALER_STATE["scale"]] is None:
        getattr(scaler, SCALER_LAZY_START)(device)
    return SCALER_STATE


def state_of(scaler: GradScaler) -> list[Tensor] | None:
    """The state of a scaler, in the order of ``start``; None if it has none yet, or waits for its update."""
    if not scaler.is_enabled():
        return []
    found = [vars(scaler)[key] for key in SCALER_STATE.values()]
    return None if any(tensor is None for tensor in found) or _waits(scaler) else found


def _waits(scaler: GradScaler) -> bool:
    records = vars(scaler).get(SCALER_OPTIMIZERS, {})
    return any(record["found_inf_per_device"] for record in records.values())


@dataclass(frozen=True)
class Settings:
    """The settings of a scaler, which are constants of a program."""

    scaler: GradScaler = field(repr=False)
    enabled: bool
    rates: tuple[float, ...]

    @classmethod
    def of(cls, scaler: GradScaler) -> Settings:
        """The settings now."""
        if not scaler.is_enabled():
            return cls(scaler, False, ())
        rates = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
        return cls(scaler, True, rates)


@dataclass(eq=False)
class SkippedSteps:
    """Optimizer steps that were traced under a condition, and the state that they made."""

    made: dict[tuple[int, int, Any], Tensor] = field(default_factory=dict)

    def condition(self, optimizer: Optimizer, parameter: Tensor, key: Any) -> Tensor | None:
        """True if ``optimizer.state[parameter][key]`` is not made after all; None if it is made in any case."""
        return self.made.get((id(optimizer), id(parameter), key))

    @contextmanager
    def watch(self, scalers: dict[str, GradScaler], optimizers: dict[str, Optimizer]) -> Iterator[None]:
        """Let scalers select instead of branching, for the length of the context."""
        with ExitStack() as stack:
            stack.enter_context(_refuse_other_scalers())
            for optimizer in optimizers.values() if scalers else ():
                # A fused optimizer would skip its step itself.
                stack.enter_context(_set(vars(optimizer), STEP_HANDLES_SCALING, False))
            for scaler in (each for each in scalers.values() if each.is_enabled()):
                records: dict[int, Any] = defaultdict(vars(scaler)[SCALER_OPTIMIZERS].default_factory)
                stack.enter_context(_set(vars(scaler), SCALER_OPTIMIZERS, records))
                stack.enter_context(_set(vars(scaler), SCALER_STEP, self._step))
            yield

    def check(self, scalers: dict[str, GradScaler]) -> None:
        """Raise ``CaptureError`` if a scaler is left without its update at the end of the step."""
        for path, scaler in scalers.items():
            if _waits(scaler):
                refuse(
                    CaptureError,
                    f"the step unscales gradients with {path} but does not update it, so what {path} found would be "
                    f"lost between calls. Call {path}.update() at the end of the step",
                )

    def _step(self, optimizer: Optimizer, found: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step()``, undone if some gradient is not finite."""
        with torch.no_grad():
            infs = list(found["found_inf_per_device"].values())
            skip = sum(infs[1:], infs[0]) != 0
            snapshots = [_Snapshot(tensor) for tensor in _tensors_of(optimizer)]
            state = {parameter: _tensors_by_path(values) for parameter, values in optimizer.state.items()}
            keys = {(id(owner), key) for owner, values in optimizer.state.items() for key in _keys_of(values)}
        result = optimizer.step(*args, **kwargs)
        with torch.no_grad():
            for each in snapshots:
                each.restore(skip)
            self._note_made(optimizer, keys, skip)
            self._undo_state(optimizer, state, {id(each.tensor): each.before for each in snapshots}, skip)
        return result

    def _note_made(self, optimizer: Optimizer, before: set[tuple[int, Any]], skip: Tensor) -> None:
        """Remember the entries that a step has made, numbers and texts, too: a step that is skipped makes none."""
        for owner, values in optimizer.state.items():
            new = [key for key in _keys_of(values) if (id(owner), key) not in before]
            self.made |= {(id(optimizer), id(owner), key): skip for key in new}

    def _undo_state(
        self, optimizer: Optimizer, state: dict[Any, dict[Path, Tensor]], before: dict[int, Tensor], skip: Tensor
    ) -> None:
        """Undo, if ``skip``, what a step replaced in ``state``; remember what it made under that condition."""
        for parameter, values in [*optimizer.state.items()]:
            for path, value in _tensors_by_path(values).items():
                old = state.get(parameter, {}).get(path)
                if old is not None and value is not old:
                    kept = torch.where(skip, before[id(old)], value)
                    optimizer.state[parameter] = with_item(optimizer.state[parameter], path, kept)


class _Snapshot:
    """The value of a tensor before an optimizer's step, which may write it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version, self.before = tensor, version_of(tensor), tensor.detach().clone()

    def restore(self, condition: Tensor) -> None:
        """Restore the value if ``condition`` is true."""
        if version_of(self.tensor) != self.version:
            self.tensor.copy_(torch.where(condition, self.before, self.tensor))


def _tensors_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Parameters, gradients and state, the tensors that a step may write."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
    for values in optimizer.state.values():
        yield from tensors_in(values)


def _keys_of(values: Any) -> list[Any]:
    """The keys of the state of a parameter; None for what is by itself under a text."""
    return [*values] if isinstance(values, dict) else [None]


def _tensors_by_path(values: Any) -> dict[Path, Tensor]:
    return {path: leaf for path, leaf in leaves_of(values) if isinstance(leaf, Tensor)}


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
def _refuse_other_scalers() -> Iterator[None]:
    """Raise ``CaptureError`` if a scaler starts that is no state of the step: it would hold traced tensors then."""
    lazy_start = getattr(GradScaler, SCALER_LAZY_START)

    def refuse(scaler: GradScaler, device: torch.device) -> NoReturn:
        raise CaptureError(
            "the step uses a GradScaler that it was not given and that no name in its code leads to. Pass it as an "
            "argument, and make it outside of the step"
        )

    setattr(GradScaler, SCALER_LAZY_START, refuse)
    try:
        yield
    finally:
        setattr(GradScaler, SCALER_LAZY_START, lazy_start)
