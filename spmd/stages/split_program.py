"""Divide a share whose nodes are placed into the programs of a bundle, by stage and purpose.

A value that another stage reads is sent there, to each stage once. What backward reads of forward on one stage waits in
a channel of that rank, a value for each micro-batch in flight. Views are taken again where they are read.
"""

from __future__ import annotations

from collections.abc import Sequence

from passes import PartitionError, PassError, Program
from passes.ir.bundle import Bundle
from passes.ir.check_bundle import check_bundle

from .bodies import Body, Levels, MicroBody, UpdateBody
from .place_nodes import Part, Placed
from .schedules import Order, ended_role, role_of, started_role, with_ends, with_starts
from .write_stage_programs import receives_early, write_body, write_ending, write_start

_PARTS = (Part.WEIGHTS, Part.BACKWARD, Part.FORWARD)  # those that hand on or send come behind those that take


def split_program(program: Program, placed: Placed, axis: int, found: Sequence[Order]) -> Bundle:
    """The bundle of all stages over the mesh axis number ``axis``. ``found``: for each rank its programs, in order."""
    levels = Levels.of(program, placed)
    bodies: dict[tuple[int, str], Body] = {}
    names = [levels.name(k) for k in range(levels.depth, -1, -1)]
    for stage in range(placed.count):
        micro = [MicroBody(program, placed, stage, bodies, part) for part in _PARTS]
        bodies |= {(stage, each.name): each for each in micro}
    for rank in range(placed.ranks):
        once = [UpdateBody(program, placed, rank, bodies, levels, k) for k in range(levels.depth + 1)]
        bodies |= {(rank, each.name): each for each in once}
    for name in (*names, *_PARTS):
        for (_, each), body in bodies.items():
            if each == name:
                body.collect()
    programs, receivers, senders = dict[str, Program](), dict[str, list[str]](), dict[str, list[str]]()
    early = list[str]()
    for body in bodies.values():
        if body.is_empty:
            continue
        programs[body.role] = write_body(body, axis)
        if isinstance(body, MicroBody) and body.sent:
            programs[ended_role(body.role)] = write_ending(body, axis)
            receivers[body.role] = [role_of(body.name, k) for k in sorted({other for _, other in body.sent})]
        if receives_early(body, axis):
            programs[started_role(body.role)] = write_start(body, axis)
            early.append(body.role)
        senders[body.role] = [role_of(body.name, other) for other in sorted(set(body.received.values()))]
    micro_batches = program.micro_batches
    assert micro_batches is not None, "a pipeline runs micro-batches"
    whole = with_ends([[each for each in order if each[0] in programs] for order in found], receivers, senders)
    whole = [with_starts(order, early) for order in whole]
    ends = [[role_of(name, rank) for name in reversed(names)] for rank in range(placed.ranks)]
    calls = [[*order, *(role for role in end if role in programs)] for order, end in zip(whole, ends, strict=True)]
    over = program.mesh.axes[axis].name
    bundle = Bundle.of(program.name, programs, {"step": calls}, over, micro_batches=micro_batches)
    try:
        check_bundle(bundle)
    except PassError as error:
        if placed.count == placed.ranks:
            raise
        raise PartitionError(
            f"{placed.count} stages on {placed.ranks} ranks cannot run this step: {error}. "
            'Take another schedule, such as "1f1b"'
        ) from None
    return bundle
