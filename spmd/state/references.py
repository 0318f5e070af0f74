"""References: put objects in the place of others, wherever Python's objects refer to these.

The collector knows who refers to an object: lists, dicts (values and keys), sets and deques, attributes and slots of
objects, cells of closures, classes, default values. A tuple or a frozenset is made anew, and takes the place of the one
that there was. What a running function has in a variable, and what only C code holds, stays as it is.
"""

from __future__ import annotations

import gc
import types
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

_FROZEN = (tuple, frozenset)

Renewed = Mapping[int, Any]
"""What takes the place of an object, by the id of that."""


def replace_everywhere(old: Sequence[Any], new: Sequence[Any]) -> None:
    """Let everything that refers to one of the ``old`` objects refer to the one of ``new`` in its place."""
    while old:
        renewed = {id(before): after for before, after in zip(old, new, strict=True)}
        found = [each for each in gc.get_referrers(*old) if each is not old]
        for holder in found:
            _put(holder, renewed)
        frozen = [each for each in found if issubclass(type(each), _FROZEN)]
        new = [_made_anew(each, renewed) for each in frozen]
        old = frozen
        del found  # it refers to them, too


def _put(holder: Any, renewed: Renewed) -> None:
    """Put what is new in a holder that can change; ``holder`` may be of any class, which is not asked."""
    kind = type(holder)
    if issubclass(kind, dict):
        _put_in_dict(holder, renewed)
    elif issubclass(kind, list):
        _put_in_list(list, holder, renewed)
    elif issubclass(kind, deque):
        _put_in_list(deque, holder, renewed)
    elif issubclass(kind, set):
        _put_in_set(holder, renewed)
    elif kind is types.CellType:
        holder.cell_contents = renewed[id(holder.cell_contents)]
    elif kind is types.FunctionType:
        holder.__defaults__ = renewed.get(id(holder.__defaults__), holder.__defaults__)
    elif kind is partial:
        args = renewed.get(id(holder.args), holder.args)
        holder.__setstate__((holder.func, args, holder.keywords, vars(holder)))
    elif not issubclass(kind, (types.FrameType, type, *_FROZEN)):
        _put_in_fields(holder, renewed)


def _put_in_dict(holder: dict[Any, Any], renewed: Renewed) -> None:
    values = [(key, renewed[id(value)]) for key, value in dict.items(holder) if id(value) in renewed]
    owner = _class_with(holder) if "__module__" in holder else None
    for key, value in values:
        dict.__setitem__(holder, key, value) if owner is None else type.__setattr__(owner, key, value)
    if any(id(key) in renewed for key in dict.keys(holder)):
        items = [(renewed.get(id(key), key), value) for key, value in dict.items(holder)]
        kind: Any = OrderedDict if issubclass(type(holder), OrderedDict) else dict
        kind.clear(holder)
        for key, value in items:
            kind.__setitem__(holder, key, value)


def _class_with(namespace: dict[str, Any]) -> type | None:
    """The class that has these entries: what it has looked up before it forgets where they are set on itself alone."""
    return next((each for each in gc.get_referrers(namespace) if issubclass(type(each), type)), None)


def _put_in_list(kind: Any, holder: Any, renewed: Renewed) -> None:
    for index, each in enumerate([*kind.__iter__(holder)]):
        if id(each) in renewed:
            kind.__setitem__(holder, index, renewed[id(each)])


def _put_in_set(holder: set[Any], renewed: Renewed) -> None:
    for each in [each for each in set.__iter__(holder) if id(each) in renewed]:
        set.remove(holder, each)
        set.add(holder, renewed[id(each)])


def _put_in_fields(holder: Any, renewed: Renewed) -> None:
    """Attributes of an object that has them itself, without a dict, and its slots."""
    with suppress(AttributeError):
        fields = object.__getattribute__(holder, "__dict__")
        if type(fields) is dict:
            _put_in_dict(fields, renewed)
    for slot in (each for cls in type(holder).__mro__ for each in vars(cls).values()):
        if isinstance(slot, types.MemberDescriptorType):
            with suppress(AttributeError, TypeError):  # it is empty, or one of C code that cannot be written
                before = slot.__get__(holder)
                if id(before) in renewed:
                    slot.__set__(holder, renewed[id(before)])


def _made_anew(holder: Any, renewed: Renewed) -> Any:
    """A tuple or frozenset of the same class with what is new."""
    kind: Any = tuple if issubclass(type(holder), tuple) else frozenset
    made = kind.__new__(type(holder), [renewed.get(id(each), each) for each in kind.__iter__(holder)])
    with suppress(AttributeError):  # most have no attributes
        made.__dict__.update(object.__getattribute__(holder, "__dict__"))
    return made
