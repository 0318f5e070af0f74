"""Roles and phases of values: known at capture and carried along, never guessed from the graph."""

from enum import StrEnum


class Role(StrEnum):
    """The role of an input of a program, or of what a collective carries."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    OPTIMIZER_STATE = "optimizer state"
    MASTER = "master copy"  # a rank's exact part of a parameter that all ranks hold rounded
    GRADIENT = "gradient"  # as an input: a ``.grad`` kept across calls
    SCALER = "scaler state"  # of a GradScaler
    HYPER_PARAMETER = "hyper-parameter"
    BATCH = "batch"
    ARGUMENT = "argument"  # any other argument of the step
    KEPT = "kept"  # a tensor of Python state that ranks split, such as a copy of a parameter, and no rows of the batch
    CONSTANT = "constant"  # a tensor the step itself made from Python values
    SEED = "seed"
    ACCUMULATOR = "accumulator"  # a sum over the micro-batches of a call
    GATHERED = "gathered parameter"  # whole, from the first micro-batch of a call on
    REDUCED = "reduced value"  # of the whole batch, from the first micro-batch of a call on
    RUN = "micro-batch"  # the number of the run of a call
    PENDING = "pending communication"
    RESULT = "result"
    ACTIVATION = "activation"
    UNKNOWN = "unknown"

    @property
    def is_state(self) -> bool:
        """Whether a value of this role lives on between calls."""
        return self in _STATE

    @property
    def is_of_runs(self) -> bool:
        """Whether runs of a call hand on a value of this role from one to the next."""
        return self in (Role.ACCUMULATOR, Role.GATHERED, Role.REDUCED)


_STATE = {Role.PARAMETER, Role.BUFFER, Role.OPTIMIZER_STATE, Role.MASTER, Role.GRADIENT, Role.SCALER}


class AxisRole(StrEnum):
    """A purpose of a mesh axis, which the parallel mode gives it. An axis may have several, or none."""

    BATCH = "batch"  # ranks have other rows of the batch; along any other axis, the same
    SHARD = "shard"  # styles split parameters, which are gathered to be read
    TENSOR = "tensor"  # parameters are named as split, and stay so while ops read them
    SEQUENCE = "sequence"  # the program splits the sequence of each argument
    EXPERTS = "experts"  # ranks have other experts, whose weights stay; rows of activations go to them
    STAGES = "stages"
    MICRO_BATCHES = "micro_batches"  # its parts run one after the other; no ranks


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
