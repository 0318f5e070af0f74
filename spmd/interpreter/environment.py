"""Switches in the environment."""

from __future__ import annotations

import os


def is_set(name: str) -> bool:
    """Whether a variable of the environment is there, and is neither empty nor 0."""
    return os.environ.get(name, "0") not in ("", "0")
