"""Observe attribute reads: ``__getattribute__`` of watched classes reports each attribute on its first read."""

from __future__ import annotations

import types
from collections.abc import Callable, Container
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..._torch import BUFFERS, CHILDREN, MODULE_NOTES, PARAMETERS, RNN_NOTES
from .snapshots import CONTAINERS

# Attributes that other guards compare as a whole: state, the tree of modules, ``training`` of every module.
GUARDED_ELSEWHERE: dict[type, set[str]] = {
    nn.Module: {PARAMETERS, BUFFERS, CHILDREN, "training", *MODULE_NOTES, *RNN_NOTES},
    torch.optim.Optimizer: {"state", "param_groups", "defaults", "step"},  # schedulers wrap step to count it
}


# What ``copy`` and ``pickle`` ask an object for. Then C code reads all attributes, past ``__getattribute__``.
_COPYING = {"__getstate__", "__reduce__", "__reduce_ex__"}


class AttributeReads:
    """Watches classes for the length of the context.

    ``noted`` holds (id of an object's ``__dict__``, key) of the reads that need no report. ``on_read`` is called with
    (instance, its ``__dict__`` or None, key), also for each attribute when all are handed out, and then for
    ``__dict__``, and ``on_missing`` with the same for an attribute that is not there.
    """

    def __init__(
        self,
        noted: Container[tuple[int, str]],
        on_read: Callable[[Any, dict[str, Any] | None, str], None],
        on_missing: Callable[[Any, dict[str, Any], str], None],
    ) -> None:
        self._noted, self._on_read, self._on_missing = noted, on_read, on_missing
        self._watched: set[type] = set()
        self._reported: set[tuple[int, str]] = set()  # (id of an object, key) of the reads whose report has not ended
        self._stack = ExitStack()

    def __enter__(self) -> AttributeReads:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def watch(self, cls: type) -> bool:
        """Report reads from instances of ``cls``; False where Python does not allow it, as for classes made in C."""
        own = vars(cls).get("__getattribute__")
        if cls in self._watched or (own is None and any(base in self._watched for base in cls.__mro__)):
            return True
        try:
            cls.__getattribute__ = self._reporting(cls)  # type: ignore[assignment, method-assign]
        except TypeError:
            return False
        self._watched.add(cls)
        if own is None:
            self._stack.callback(delattr, cls, "__getattribute__")
        else:
            self._stack.callback(setattr, cls, "__getattribute__", own)
        return True

    def _reporting(self, cls: type) -> Callable[[Any, str], Any]:
        original: Any = cls.__getattribute__
        noted, on_read, reported = self._noted, self._on_read, self._reported
        elsewhere = next((names for base, names in GUARDED_ELSEWHERE.items() if issubclass(cls, base)), set())

        def __getattribute__(instance: Any, key: str) -> Any:
            try:
                value = original(instance, key)
            except AttributeError:
                self._note_missing(instance, key)
                raise
            if key in _COPYING or (key == "__dict__" and not elsewhere):
                fields = _fields_of(instance)
                for each in [*(fields or ()), *_slots_of(instance), "__dict__"]:
                    if each not in elsewhere:
                        on_read(instance, fields, each)
            elif key not in elsewhere and not (key.startswith("__") and key not in (_fields_of(instance) or ())):
                fields, read = _fields_of(instance), (id(instance), key)
                if (fields is None or (id(fields), key) not in noted) and read not in reported:
                    is_field = fields is not None and key in fields and fields[key] is value
                    reported.add(read)  # ``isinstance`` asks an object that stands for another for its class
                    try:
                        on_read(instance, fields, key)
                    finally:
                        reported.discard(read)
                    if is_field:
                        return fields[key]  # type: ignore[index]  # a fake may have taken the place of state
                    if isinstance(value, CONTAINERS) and _is_held(type(instance), key, value):
                        return original(instance, key)
            return value

        return __getattribute__

    def _note_missing(self, instance: Any, key: str) -> None:
        """Report an attribute that is not there; of a module, that it is no parameter, buffer or submodule either."""
        fields = _fields_of(instance)
        if fields is None or key.startswith("__") or (id(fields), key) in self._noted:
            return
        if not any(key in fields.get(state, ()) for state in (PARAMETERS, BUFFERS, CHILDREN)):
            self._on_missing(instance, fields, key)


def _is_held(cls: type, key: str, value: Any) -> bool:
    """Whether ``value`` is an entry of a class itself, or in one of its slots."""
    entry = next((vars(base)[key] for base in cls.__mro__ if key in vars(base)), None)
    return entry is value or isinstance(entry, types.MemberDescriptorType)


def _slots_of(instance: Any) -> list[str]:
    """The attributes of an instance that lie in slots."""
    entries = [vars(cls) for cls in type(instance).__mro__]
    return [key for each in entries for key, entry in each.items() if isinstance(entry, types.MemberDescriptorType)]


def _fields_of(instance: Any) -> dict[str, Any] | None:
    """The ``__dict__`` of an instance, read past all that watches it; None if it has none."""
    try:
        fields: dict[str, Any] = object.__getattribute__(instance, "__dict__")
    except AttributeError:
        return None
    return fields
