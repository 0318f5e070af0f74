"""Layouts: how the ranks of a step divide its work and its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..stages.schedules import Schedule

Style = Literal["replicate", "shard_optimizer", "fully_shard"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Layout:
    """One way to run a step on ``gpus`` ranks: ``stages`` outermost, then copies of the batch, ``tensor`` innermost.

    ``rows`` of each of ``micro_batches``, of which each of ``context`` ranks that split sequences has its part: a
    fraction, if need be. ``shard``: ranks that parameters are split over, by default all that have other tokens.
    ``chunks``: model chunks of a stage. ``experts``: ranks that split experts. ``splits_sequence``: norms and residuals
    are split along ``tensor``, too. ``recomputed``: the part of each kind of equal blocks that ``recompute`` speaks of;
    empty for all. ``bits``: of operands of products; ``keeps_gathered``: parameters are gathered once, and not again
    for backward.
    ``reduces_once``: gradients of split parameters are accumulated whole, and reduced after the last micro-batch.
    ``cut``: the blocks of each stage, of which a rank has ``chunks``, as the model runs them; empty where all have
    equal parts, as published runs are estimated. ``schedule``: of a cut.
    """

    gpus: int
    style: Style = "replicate"
    rows: float = 1
    micro_batches: int = 1
    tensor: int = 1
    stages: int = 1
    chunks: int = 1
    context: int = 1
    experts: int = 1
    shard: int | None = None
    splits_sequence: bool = False
    recompute: Recompute = "none"
    recomputed: tuple[float, ...] = ()
    bits: int = 16
    keeps_gathered: bool = False
    reduces_once: bool = False
    cut: tuple[int, ...] = ()
    schedule: Schedule = "1f1b"

    @property
    def data(self) -> int:
        """Ranks that hold the same part of the model."""
        return self.gpus // (self.tensor * self.stages)

    @property
    def shards(self) -> int:
        """Ranks that parameters, or what else the style splits, are split over."""
        return 1 if self.style == "replicate" else self.shard or self.data
