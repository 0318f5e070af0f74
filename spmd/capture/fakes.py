"""Fakes of a call for its trace: a fake tensor of global shape for each tensor, a symbolic number for each float."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from passes import Role

from .._torch import DimDynamic, ShapeEnv, constant_source
from ..call.call import Call
from ..call.inputs import BatchInput
from ..call.state import HyperParameter, Slot
from ..python_state.effects.carried import Carried
from ..python_state.reads import ReadSite
from .fake_mode import ShapesOnly
from .sizes.size_symbols import SizeSymbols, TracedSizes


@dataclass(frozen=True)
class Fakes:
    """The inputs of one trace, in the order of the graph's placeholders."""

    mode: ShapesOnly
    shapes: ShapeEnv
    slots: list[torch.Tensor]
    hyper_parameters: list[Any]  # symbolic floats, or tensors
    symbols: list[Any]  # the symbol of each hyper-parameter, None for a tensor
    tensors: list[torch.Tensor]
    kept: list[torch.Tensor]  # that the step keeps in Python state
    sizes: SizeSymbols

    @classmethod
    def of(cls, call: Call, carried: Carried, traced: TracedSizes) -> Fakes:
        """Fakes of a call's state, hyper-parameters and tensor arguments, and of carried numbers and tensors."""
        shapes = traced.shape_env()
        sizes = traced.symbols(shapes)
        mode = ShapesOnly(shape_env=shapes, static_shapes=True)
        with mode:
            arguments = carried.arguments(call.given)
            live: list[HyperParameter | ReadSite] = [*call.hyper_parameters, *carried.numbers, *arguments]
            numbers = [_fake_number(shapes, each) for each in live]
            return cls(
                mode,
                shapes,
                [_fake_state(slot, _device_of(slot, call)) for slot in call.slots],
                [fake for fake, _ in numbers],
                [symbol for _, symbol in numbers],
                [_fake_input(x, sizes.shape(x)) for x in call.inputs],
                [_fake_kept(each.get()) for each in carried.tensors()],
                sizes,
            )

    @property
    def flat(self) -> list[Any]:
        """All inputs, in order."""
        return [*self.slots, *self.hyper_parameters, *self.tensors, *self.kept]

    def as_traced(self, flat: Sequence[Any]) -> Fakes:
        """The same, as the tracer passes them to the function that it traces."""
        remaining = iter(flat)

        def take(fakes: Sequence[Any]) -> list[Any]:
            return list(islice(remaining, len(fakes)))

        return replace(
            self,
            slots=take(self.slots),
            hyper_parameters=take(self.hyper_parameters),
            tensors=take(self.tensors),
            kept=take(self.kept),
        )


def _device_of(slot: Slot, call: Call) -> torch.device:
    """Where the step computes with a state tensor: what is offloaded is copied there, but for counters."""
    live = slot.get()
    counts = slot.input.role is Role.OPTIMIZER_STATE and live.ndim == 0
    offloaded = (slot.input.of or slot.input.name) in call.offloaded and not counts
    return call.device if live.is_meta or offloaded else live.device


def _fake_state(slot: Slot, device: torch.device) -> torch.Tensor:
    """A fake of global shape; never a copy of the live value."""
    live = slot.get()
    fake = torch.empty_strided(tuple(live.shape), live.stride(), dtype=live.dtype, device=device)
    if isinstance(live, nn.Parameter):
        return nn.Parameter(fake, requires_grad=live.requires_grad)
    return fake.requires_grad_(live.requires_grad) if live.requires_grad else fake


def _fake_input(described: BatchInput, shape: list[Any]) -> torch.Tensor:
    """Contiguous, as every argument is when the program runs."""
    live = described.value
    fake = torch.empty(shape, dtype=live.dtype, device=live.device)
    return fake.requires_grad_(live.requires_grad) if live.requires_grad else fake


def _fake_kept(live: torch.Tensor) -> torch.Tensor:
    """Contiguous and of global shape; a DTensor has that shape."""
    return torch.empty(tuple(live.shape), dtype=live.dtype, device=live.device)


def _fake_number(shapes: ShapeEnv, hyper: HyperParameter | ReadSite) -> tuple[Any, Any]:
    """(a fake, its symbol or None)."""
    value = hyper.get()
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device=value.device), None
    value = value if isinstance(value, int) else float(value)  # one of numpy is a float, too
    source = constant_source(hyper.name)
    symbol = shapes.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    make = shapes.create_symintnode if isinstance(value, int) else shapes.create_symfloatnode
    return make(symbol, hint=value, source=source), symbol
