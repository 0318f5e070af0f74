"""A plan: where every input of a program lives, and how state gets to where it is computed with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from passes.program import Placements


@dataclass(frozen=True)
class Plan:
    """What a mode decides and the partitioner carries out.

    ``placements``: by input name, one placement per mesh axis; inputs left out are replicated. ``units``: groups of
    parameter names that are communicated together. ``options``: ``"gather_parameters"`` (True: a split parameter is
    gathered once before forward and backward read it, so that activations stay split along the batch; False: each op
    takes what costs least); ``"reduce_gradients"`` ("once": the gradients of several backward passes are added up
    before they are reduced to where a split parameter lives; "each": each is reduced, and shards are added up).
    """

    mesh: DeviceMesh | None
    placements: Mapping[str, Placements]
    units: tuple[tuple[str, ...], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
