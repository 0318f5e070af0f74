"""The second trace: the graph of the first one becomes functional, and its ops are decomposed."""

from .functionalize import functionalize, take_write_backs

__all__ = ["functionalize", "take_write_backs"]
