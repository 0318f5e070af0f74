"""``NotCachedError``: the reason that a call cannot be compiled from the cache, or stored there."""

from __future__ import annotations


class NotCachedError(Exception):
    """Raised while a call is described or stored; its text is the reason, for the report."""
