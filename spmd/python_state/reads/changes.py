"""``Change``: what a step did at one site of Python state while it was traced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .read_sites import ReadSite


@dataclass(frozen=True, eq=False)
class Change:
    """The value at a site before the step and after it, ``MISSING`` where there is none.

    ``was_read``: whether the step may have read the value that was there before. ``owner``: the module or optimizer
    that has the site as an attribute. ``held``: the leaves of ``before`` as they were, which the step may have changed
    in place; ``grew``: whether it appended to a list there.
    """

    site: ReadSite
    before: Any
    after: Any
    was_read: bool
    held: list[Any]
    owner: Any = None
    grew: bool = False
