"""Deferred updates: what a call leaves to the next one, and what finishes it before anybody else looks at state."""

OWNS = (
    *("defer_updates", "defers", "deferred", "deferral", "deferred_program", "deferred_update", "DeferredProgram"),
    *("pending", "has_pending", "is_pending", "run_pending", "finish_pending", "lose_pending", "check_pending"),
    *("run_and_defer", "defer"),
)
"""Identifiers of this feature. No further file outside of it may name one (``tests/test_structure.py``)."""
