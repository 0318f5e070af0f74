"""A plan: where every input of a program lives, and how state gets to where it is computed with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from passes.ir.program import Placements


@dataclass(frozen=True)
class Plan:
    """What a mode decides and the partitioner carries out.

    ``placements``: by input name, one placement per mesh axis; inputs left out are replicated. ``updates``: for
    parameters that are updated elsewhere than they live (each rank a part of what all have whole), where that is:
    gradients are reduced to there, optimizer state is made there, and what an update gives is brought back. ``units``:
    groups of parameter names that are communicated together.

    ``options``: ``"gather_parameters"`` (True: a split parameter is gathered once before forward and backward read it,
    so that activations stay split along the batch; False: each op takes what costs least); ``"reduce_gradients"``
    ("once": the gradients of several backward passes are added up before they are reduced to where a split parameter
    is updated; "each": each is reduced, and shards are added up); ``"reduce_dtype"`` and ``"gather_dtype"`` (a dtype or
    None: in which gradients are reduced, and parameters gathered, where their own is wider).
    """

    mesh: DeviceMesh | None
    placements: Mapping[str, Placements]
    units: tuple[tuple[str, ...], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    updates: Mapping[str, Placements] = field(default_factory=dict)
