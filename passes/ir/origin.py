"""Where a node comes from, as known at the moment it was traced."""

from __future__ import annotations

from dataclasses import dataclass

from .roles import Phase


@dataclass
class Origin:
    """The provenance of one traced op; kept in ``node.meta["origin"]``."""

    number: int
    phase: Phase
    module: str = ""
    source: str = ""
    cotangent_of: tuple[int, int] | None = None  # (number, output) of the forward op whose gradient this is
    grad_of: str | None = None
    draw: int | None = None  # which draw of the step it is; equal numbers draw the same
    recompute_of: int | None = None  # the number of the op that computed the same before; see recompute.py
