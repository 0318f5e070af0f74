"""The errors users see. Each message is a sentence: what was expected, what came, what to do."""


class SpmdError(Exception):
    """Base of every error this project raises on purpose, but for wrong arguments (``TypeError``, ``ValueError``)."""


class CaptureError(SpmdError):
    """The train step cannot be traced into one graph."""


class PlacementError(SpmdError):
    """A tensor cannot be placed on the mesh as asked."""


class PartitionError(SpmdError):
    """The global graph could not be expanded into one rank's share."""


class PassError(SpmdError):
    """A pass, a transform or a backend broke the program."""


class MemoryBudgetError(SpmdError):
    """The step needs more memory than it may have; says how much it needs."""


class RankMismatchError(SpmdError):
    """Ranks came with different programs, shapes or arguments."""


class RankFailedError(RankMismatchError):
    """A call failed on another rank; says on which, why, and whether state is whole."""
