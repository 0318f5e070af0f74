"""``certify``: what the final programs of all ranks compute is derived, and compared with the captured program."""

from __future__ import annotations

from typing import Any

import torch

from ..call.rng import random_state_kept
from ..step import calling
from .certificate import Certificate, certify_programs
from .copies import Subject
from .peer import Peer
from .rank import SimulatedRank
from .stages import kept
from .verifier import MOST, PlainStep
from .world import AnyMesh, check_mesh, simulated_world


def certify(step: Any, *args: Any, world: int = 4, mesh: AnyMesh = None, **kwargs: Any) -> Certificate:
    """Derive what each value of the final programs is, and whether each output is the global one under its placement.

    ``step``, ``world``, ``mesh`` and the arguments are those of ``verify``. No numbers are compared and nothing is
    rounded: what is derived holds for any values. What cannot be shown is distinguished from what is wrong, and settled
    by ``verify``. How the plain step was captured is not a part of it.

    Raises ``TypeError`` or ``ValueError`` for what cannot be certified, and what compiling the step raises.
    """
    check_mesh(mesh, world)
    if world > MOST:
        raise ValueError(f"expected world to be {MOST} ranks or fewer, got {world}: fewer ranks run the same passes")
    with calling, random_state_kept(), torch.no_grad():
        subject = Subject.of(step, args, kwargs)
        with torch.enable_grad():
            plain = PlainStep.of(subject)
            with simulated_world(world, mesh, subject.device_type) as device_mesh, plain.dtypes():
                wholes = kept(plain.state())
                first = SimulatedRank(subject, subject.copied(plain.in_double), 0, device_mesh)
                ranks: list[SimulatedRank | Peer] = [
                    first,
                    *(Peer(first, number, wholes) for number in range(1, world)),
                ]
                for rank in ranks:
                    rank.prepare()
                programs = [rank.programs for rank in ranks]
        captured = first.compiled.captured.program
        return certify_programs(captured, [each.partitioned for each in programs], [each.final for each in programs])
