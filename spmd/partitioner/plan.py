"""A plan: the placement of every input of a program, and how state gets to where it is computed with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from passes import Input, Memory, Output, Role
from passes.ir.program import Placements

from .assignment import Assignment
from .solvers.solver import Solver


@dataclass(frozen=True)
class Plan:
    """The decisions of a mode, which the partitioner carries out.

    ``placements``: by input name, one placement per mesh axis; inputs left out are replicated. ``updates``: the
    placements in which parameters are updated, where these are not their own (each rank updates a part of a replicated
    parameter): gradients are reduced to them, optimizer state is created in them, and the updated parameter is brought
    back. ``cuts``: the placements in which arguments are read, where these split them over more axes than ranks do:
    each rank goes on with a part of what it was passed. ``units``: groups of parameter names that are communicated
    together; of the others, passes form more.

    ``options``:

    - ``"gather_parameters"``: True gathers a split parameter once before forward and backward read it, so that
      activations stay split along the batch; False lets each op take the placement that costs least.
    - ``"reduce_gradients"``: "once" adds up the gradients of several backward passes, or micro-batches, before they are
      reduced to the placement of a split parameter's update; "each" reduces each of them, and adds up shards.
    - ``"reduce_dtype"``, ``"gather_dtype"``: a dtype or None; gradients are reduced, and parameters gathered, in this
      dtype where their own is wider.
    - ``"attention"``: the form of attention over split sequences, "gather", "ring" or "heads"; None: the cheapest.

    ``experts``: the parameters that stay split over the axes of the role "experts" while forward and backward read
    them; rows of activations go to the ranks that have their expert.

    ``reduce_dtypes``: for single parameters, by name, another dtype than that option; None is their own.

    ``reshard``: the parameters that are gathered again for backward, instead of kept whole; ``kept_by``: of these,
    by name, the size of the groups of consecutive ranks that keep one together until then. ``prefetch``: how many units
    ahead of their readers these gathers may start, in forward and in backward. ``limit_gathers``: how many units may be
    gathered at once, with the one that is read next; also of those that are kept whole then.

    ``memory``: of parameters that are not on the device, by name; their gradients and optimizer state go with them.

    ``assignment``: how nodes are computed, all of them or some. ``solver`` decides the others, and the greedy solver
    those that are left.
    """

    mesh: DeviceMesh | None
    placements: Mapping[str, Placements]
    units: tuple[tuple[str, ...], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    updates: Mapping[str, Placements] = field(default_factory=dict)
    cuts: Mapping[str, Placements] = field(default_factory=dict)
    experts: frozenset[str] = frozenset()
    reduce_dtypes: Mapping[str, torch.dtype | None] = field(default_factory=dict)
    reshard: frozenset[str] = frozenset()
    kept_by: Mapping[str, int] = field(default_factory=dict)
    prefetch: tuple[int, int] = (1, 1)
    limit_gathers: int | None = None
    memory: Mapping[str, Memory] = field(default_factory=dict)
    assignment: Assignment | None = None
    solver: Solver | None = None

    def memory_of(self, declared: Input | Output) -> Memory:
        """The memory of an input, or of the state that an output updates or makes. Only parameters are pinned."""
        if declared.role is Role.PARAMETER:
            return self.memory.get(declared.name, Memory.DEVICE)
        follows = declared.role in (Role.OPTIMIZER_STATE, Role.MASTER, Role.GRADIENT) and declared.of in self.memory
        return Memory.HOST if follows else Memory.DEVICE
