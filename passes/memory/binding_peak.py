"""The peak by which a step does not fit into a budget, for errors: where it is, what lives then, what to set next."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.roles import Holds
from .peak_memory import PlannedMemory

_LEAST = 0.1  # of the peak: less is not named
_STATE = (Holds.PARAMETERS, Holds.GRADIENTS, Holds.OPTIMIZER_STATE)


@dataclass(frozen=True)
class Settings:
    """Settings by which a step runs: ``parts`` of its rows in turn, with ``rows`` each (0 if they are not known).

    ``is_split``: ranks have parts of parameters; ``adds_whole``: parts add up whole gradients. ``ranks``: along all
    axes.
    """

    parts: int
    rows: int
    is_split: bool
    adds_whole: bool
    ranks: int


def describe_peak(planned: PlannedMemory, settings: Settings) -> str:
    """``"its peak is in backward, at mm (train.py:12: ...), where it holds ...: set micro_batches=8 instead of 4"``."""
    held = sorted(planned.roles.items(), key=lambda each: -each[1])
    named = [f"{count / 1e6:.2f} MB of {kind}" for kind, count in held if count > _LEAST * planned.peak]
    what = " and ".join(filter(None, (", ".join(named[:-1]), *named[-1:])))
    phase = f"in {planned.phase}, at " if planned.phase else "at "
    line = f" ({planned.line})" if planned.line else ""
    return (
        f"its peak is {phase}{planned.at}{line}, where it holds {what}: "
        f"{_next_setting(held[0][0] if held else '', settings)}"
    )


def _next_setting(kind: str, settings: Settings) -> str:
    """Advice that makes the kind of value smaller that is largest at the peak."""
    if kind == Holds.ACTIVATIONS:
        return _fewer_rows(settings)
    if kind in _STATE and not settings.is_split and settings.ranks > 1:
        return 'set parallel_style="fully_shard", so that each rank has a part of it'
    if kind == Holds.GRADIENTS and settings.adds_whole and settings.ranks > 1:
        return 'set reduce_gradients="each", so that each rank adds up its part'
    if kind in _STATE:
        return "split it over more ranks"
    if kind == Holds.GATHERED:
        return "name smaller units (units=), of which fewer parameters are whole at once"
    return "pass a smaller batch, or take more ranks"


def _fewer_rows(settings: Settings) -> str:
    if settings.rows == 1:
        return (
            "a micro-batch has one row already, so pass shorter rows, split them over ranks "
            '(axes={"sequence": ...}), or take a smaller model'
        )
    if settings.rows == 0:
        return "pass a smaller batch, or take more ranks"
    before = f" instead of {settings.parts}" if settings.parts > 1 else ""
    return (
        f"set micro_batches={min(2 * settings.parts, settings.parts * settings.rows)}{before}, or pass a smaller batch"
    )
