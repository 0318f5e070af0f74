"""Train on one simulated rank and on several, and compare results and state after each step, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from passes import OutputKind

from ..call.rng import random_state_kept, rng_state, set_rng_state
from ..ranks.differences import Difference, difference
from .compared_stages import kept
from .copies import Subject
from .lockstep import LockstepError
from .peer import Peer
from .rank import SimulatedRank
from .runs import run_programs
from .values import Values
from .verdict import Verdict
from .wholes import UnequalReplicasError, put_together
from .world import AnyMesh, simulated_world


def compare_bits(subject: Subject, wholes: Values, steps: int, world: int, mesh: AnyMesh) -> Verdict:
    """Compare all results and all state after each step. ``wholes``: state and batch as they are before, by name.

    Raises ``ValueError`` for a step that does not promise equal bits.
    """
    if subject.options.mode.bits is None:
        raise ValueError(
            'expected a step with spmd.DataParallel(bits="same") for bits=True: sums of any other one depend on the '
            "number of ranks"
        )
    names = mesh.mesh_dim_names if isinstance(mesh, DeviceMesh) else mesh
    with random_state_kept():
        drawn = rng_state()
    found: dict[str, Any] = {}
    pairs: list[tuple[int, str, Any, Any]] = []
    try:
        alone = _trained(subject, wholes, steps, drawn, 1, dict.fromkeys(names, 1) if names else None)
        together = _trained(subject, wholes, steps, drawn, world, mesh)
        after = enumerate(zip(alone, together, strict=True))
        pairs = [(k, name, one[name], many[name]) for k, (one, many) in after for name in one]
    except (UnequalReplicasError, LockstepError) as error:
        found = {"says": str(error)}
    for number, what, one, many in pairs:
        if not _same_bits(one, many):
            differs = difference(one, many, 0.0) or Difference(one, many, "a zero or a NaN has other bits")
            found = {"what": what, "after": number, "says": differs.says}
            found |= {"expected": differs.expected, "actual": differs.actual}
            break
    name, described = getattr(subject.function, "__name__", "step"), str(mesh) if names else f"dp={world}"
    return Verdict(name, described, steps, len(pairs), beside="one rank, to the last bit", **found)


def _trained(
    subject: Subject, wholes: Values, steps: int, drawn: dict[str, int | bool], world: int, mesh: AnyMesh
) -> list[Values]:
    """Results and state by name after each step, put together from the ranks. ``drawn``: the random state before."""
    found = []
    with random_state_kept(), simulated_world(world, mesh, subject.device_type) as device_mesh:
        set_rng_state(drawn)
        first = SimulatedRank(subject, subject.copied(in_double=False), 0, device_mesh)
        peers = [Peer(first, number, wholes) for number in range(1, world)]
        ranks: list[SimulatedRank | Peer] = [first, *peers]
        for _ in range(steps):
            inputs = [rank.prepare() for rank in ranks]
            outputs = run_programs([rank.program for rank in ranks], inputs)
            returned = [rank.finish(each) for rank, each in zip(ranks, outputs, strict=True)]
            found.append(kept(_together(first, peers, returned)))
    return found


def _together(first: SimulatedRank, peers: list[Peer], returned: list[list[Any]]) -> Values:
    """Results and state; raises ``UnequalReplicasError`` where ranks that have the same part differ in a bit."""
    meshes = [first.mesh, *(peer.mesh for peer in peers)]
    outputs = [output for output in first.program.outputs if output.kind is OutputKind.RESULT]
    results = [o.kind is OutputKind.RESULT for o in first.program.outputs if o.kind is not OutputKind.UPDATE]
    ends = ([value for value, is_result in zip(each, results, strict=True) if is_result] for each in returned)
    whole = {
        output.name: put_together(parts, output.shape, output.placement, meshes, 0.0)
        for output, parts in zip(outputs, zip(*ends, strict=True), strict=True)
    }
    firsts = first.state()
    held = [firsts, *(peer.state(firsts) for peer in peers)]
    for name, (_, shape, placement) in firsts.items():
        whole[name] = put_together([each[name][0] for each in held], shape, placement, meshes, 0.0)
    return whole


def _same_bits(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other)
    bits = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return one.dtype is other.dtype and one.shape == other.shape and torch.equal(*bits)
