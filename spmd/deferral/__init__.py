"""Deferred updates: what a call leaves to the next one, and what finishes it before anybody else looks at state."""
