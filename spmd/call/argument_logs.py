"""Lists and dicts among a step's arguments that it writes to and does not read: each is one leaf, whatever it holds."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from .._torch import tree_map

LogPath = tuple[Any, ...]  # keys from ``(args, kwargs)`` on


class Log:
    """Such a container; equal to every other one of its class."""

    __slots__ = ("container", "path")

    def __init__(self, container: Any, path: LogPath) -> None:
        self.container, self.path = container, path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Log) and type(other.container) is type(self.container)

    def __hash__(self) -> int:
        return hash(type(self.container))

    def __repr__(self) -> str:
        return f"a {type(self.container).__name__} that the step writes to"


class LogsFound(Exception):
    """The step must be traced again with other logs among its arguments: ``paths`` are some, or are none after all."""

    def __init__(self, paths: Collection[LogPath], are_logs: bool) -> None:
        super().__init__("logs among the arguments")
        self.paths, self.are_logs = set(paths), are_logs

    @property
    def kind(self) -> str:
        """The kind of the containers."""
        return "a log" if self.are_logs else "no log after all"


def with_logs(tree: Any, paths: Collection[LogPath]) -> Any:
    """``(args, kwargs)`` with a ``Log`` in the place of each list or dict at one of ``paths``."""
    found = {id(container): path for path in paths if type(container := _at(tree, path)) in (list, dict)}
    if not found:
        return tree

    def replace(value: Any) -> Any:
        return Log(value, found[id(value)]) if id(value) in found else value

    return tree_map(replace, tree, is_leaf=lambda value: id(value) in found)


def _at(tree: Any, path: LogPath) -> Any:
    try:
        for key in path:
            tree = tree[key]
    except (LookupError, TypeError):
        return None
    return tree
