"""Roles and phases of values: known at capture and carried along, never guessed from the graph.

A role is a value with properties, and it is these that are asked for. A feature makes the roles of its own in its own
module: nothing here, nor in what asks, needs to know them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from .names import Name


class InputSource(StrEnum):
    """The source of the value of an input."""

    STATE = "state"  # lives on between calls
    CALL = "call"  # arguments and numbers of the call, and what it draws
    CONSTANT = "constant"  # of the program, the same at each call
    CARRIED = "carried"  # of several runs in a call, each takes what the one before has left in the same memory
    RUN = "run"  # the number of the run
    CHANNEL = "channel"  # left by another program of a bundle


# Python 3.11 takes longer to look up a member of an enum than to compare it, and roles are asked for each value.
_STATE, _CARRIED, _CHANNEL = InputSource.STATE, InputSource.CARRIED, InputSource.CHANNEL
_OF_RUNS = (InputSource.CARRIED, InputSource.RUN)
_STAYING = (InputSource.STATE, InputSource.CONSTANT, InputSource.CARRIED)


class Holds(StrEnum):
    """The kind of value that memory holds."""

    PARAMETERS = "parameters"
    GATHERED = "gathered"  # parameters made whole, and the parts of them that are sent for it
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    OFFLOADED = "offloaded"  # in host memory: parameters, optimizer state, and gradients that were copied there
    ACTIVATIONS = "activations"  # what forward and backward compute
    OTHER = "other"  # buffers, arguments, constants, what an update computes


@dataclass(frozen=True, eq=False, repr=False)
class Role(Name):
    """The role of an input of a program, or of what a collective carries.

    ``source``: where an input of this role has its value from. ``is_sum``: the runs of a call add to it, from zero on.
    ``holds``: the kind of value that its memory is counted as; None if that depends on what computes it.
    """

    name: str
    source: InputSource = InputSource.CALL
    is_sum: bool = False
    holds: Holds | None = None

    PARAMETER: ClassVar[Role]
    BUFFER: ClassVar[Role]
    OPTIMIZER_STATE: ClassVar[Role]
    MASTER: ClassVar[Role]  # a rank's exact part of a parameter that all ranks hold rounded
    GRADIENT: ClassVar[Role]  # as an input: a ``.grad`` kept across calls
    SCALER: ClassVar[Role]  # of a GradScaler
    HYPER_PARAMETER: ClassVar[Role]
    BATCH: ClassVar[Role]
    ARGUMENT: ClassVar[Role]  # any other argument of the step
    KEPT: ClassVar[Role]  # a tensor of Python state that ranks split, such as a copy of a parameter, and no rows
    CONSTANT: ClassVar[Role]  # a tensor the step itself made from Python values
    SEED: ClassVar[Role]
    CHANNEL: ClassVar[Role]  # left by another program of a bundle, often a communication in flight
    RESULT: ClassVar[Role]
    ACTIVATION: ClassVar[Role]
    UNKNOWN: ClassVar[Role]

    @property
    def is_state(self) -> bool:
        """Whether a value of this role lives on between calls."""
        return self.source is _STATE

    @property
    def is_carried(self) -> bool:
        """Whether the runs of a call hand on a value of this role from one to the next."""
        return self.source is _CARRIED

    @property
    def is_given_by_runs(self) -> bool:
        """Whether the runs of a call give a value of this role, and nobody who calls the program."""
        return self.source in _OF_RUNS

    @property
    def is_of_channel(self) -> bool:
        """Whether another program of a bundle leaves a value of this role."""
        return self.source is _CHANNEL

    @property
    def stays(self) -> bool:
        """Whether an input of this role is the same tensor at each call."""
        return self.source in _STAYING

    @classmethod
    def from_data(cls, data: Any) -> Role:
        """The role of ``to_data``. Raises ``ValueError`` for a name that is not declared here."""
        if not isinstance(data, str):
            holds = None if data["holds"] is None else Holds(data["holds"])
            data = {**data, "source": InputSource(data["source"]), "holds": holds}
        return super().from_data(data)


Role.PARAMETER = Role("parameter", InputSource.STATE, holds=Holds.PARAMETERS)
Role.BUFFER = Role("buffer", InputSource.STATE)
Role.OPTIMIZER_STATE = Role("optimizer state", InputSource.STATE, holds=Holds.OPTIMIZER_STATE)
Role.MASTER = Role("master copy", InputSource.STATE, holds=Holds.OPTIMIZER_STATE)
Role.GRADIENT = Role("gradient", InputSource.STATE, holds=Holds.GRADIENTS)
Role.SCALER = Role("scaler state", InputSource.STATE)
Role.HYPER_PARAMETER = Role("hyper-parameter")
Role.BATCH = Role("batch")
Role.ARGUMENT = Role("argument")
Role.KEPT = Role("kept")
Role.CONSTANT = Role("constant", InputSource.CONSTANT)
Role.SEED = Role("seed")
Role.CHANNEL = Role("pending communication", InputSource.CHANNEL)
Role.RESULT = Role("result")
Role.ACTIVATION = Role("activation")
Role.UNKNOWN = Role("unknown")


@dataclass(frozen=True, eq=False, repr=False)
class AxisRole(Name):
    """A purpose of a mesh axis, which the parallel mode gives it. An axis may have several, or none.

    ``of_ranks``: its parts are ranks, which count and send. ``at_once``: they compute at the same time; else one after
    the other, so that a sum over them is known after the last one. ``sums_last``: each part reduces a sum over ranks to
    what a rank keeps of it, before it is added to those of other parts. ``rows_move``: parameters that are split over
    it stay so, and rows of activations go to them. ``by_values``: which rows of others a rank reads depends on values,
    as of a mask.
    """

    name: str
    of_ranks: bool = True
    at_once: bool = True
    sums_last: bool = False
    rows_move: bool = False
    by_values: bool = False

    BATCH: ClassVar[AxisRole]  # ranks have other rows of the batch; along any other axis, the same
    SHARD: ClassVar[AxisRole]  # styles split parameters, which are gathered to be read
    TENSOR: ClassVar[AxisRole]  # parameters are named as split, and stay so while ops read them
    SEQUENCE: ClassVar[AxisRole]  # the program splits the sequence of each argument


AxisRole.BATCH = AxisRole("batch")
AxisRole.SHARD = AxisRole("shard")
AxisRole.TENSOR = AxisRole("tensor")
AxisRole.SEQUENCE = AxisRole("sequence", by_values=True)


class Memory(StrEnum):
    """Where an input lives between calls."""

    DEVICE = "device"  # of the mesh, where forward and backward compute
    HOST = "host"
    PINNED = "pinned host"  # what a GPU copies from while the host goes on


class Phase(StrEnum):
    """Which part of the train step a node belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
