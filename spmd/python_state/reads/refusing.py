"""Stand-ins for objects that no call can move on as the step did: iterators, files, queues that were there before it.

While the step is traced, a stand-in lies wherever the step reaches such an object. It passes everything on, but for
what would move the object: that raises at the user's line, before anything has changed.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from passes import CaptureError

from ...call.refusals import passes, refuse, taken
from ...interpreter.foreign_code import is_foreign_file, is_foreign_module, is_library_file
from ...interpreter.source_lines import user_lines

_TAKES = (
    "takes the next value of {name}, which each call of its program would get again: pass the value as an argument, "
    "or take it outside of the step and keep it in an attribute"
)
_READS = (
    "reads from {name}, and each call of its program would get the same again: read outside of the step, and pass what "
    "comes as an argument"
)
_WRITES = (
    "writes to {name}, which a compiled step would do only once, while it is traced: print or log what each call shall "
    "write, keep it in a list, or return it and write it outside of the step"
)
_BOUND = (types.MethodWrapperType, types.BuiltinMethodType, types.MethodType)
_FILE = {
    **dict.fromkeys(("write", "writelines", "truncate"), _WRITES),
    **dict.fromkeys(("read", "read1", "readline", "readlines", "readinto", "seek"), _READS),
}
_QUEUE = {
    **dict.fromkeys(("put", "put_nowait"), _WRITES),
    **dict.fromkeys(("get", "get_nowait"), _READS),
}
_ROWS = dict.fromkeys(("writerow", "writerows", "writeheader"), _WRITES)
_SUMMARY = ("scalar", "scalars", "histogram", "image", "images", "figure", "text", "tensor", "graph", "embedding")
_METHODS = {  # by class, with those derived from it that are no user's: what moves an object
    "_io._IOBase": _FILE,
    "tempfile._TemporaryFileWrapper": _FILE,
    "queue.Queue": _QUEUE,
    "_queue.SimpleQueue": _QUEUE,
    "multiprocessing.queues.Queue": _QUEUE,
    "multiprocessing.queues.SimpleQueue": _QUEUE,
    "asyncio.queues.Queue": _QUEUE,
    "_csv.writer": _ROWS,
    "csv.DictWriter": _ROWS,
    "torch.utils.tensorboard.writer.SummaryWriter": dict.fromkeys((f"add_{each}" for each in _SUMMARY), _WRITES),
}


Refuse = Callable[[str, Callable[[], Any]], Any]
"""Takes the reason that a method is refused, and a function that calls it; raises, or returns a stand-in."""


class Refusing:
    """Stands in the place of ``value``; ``methods`` are refused, each with its reason, to this thread."""

    def __init__(self, value: Any, methods: dict[str, str], refuse: Refuse) -> None:
        self._value, self._methods, self._refuse, self._thread = value, methods, refuse, threading.get_ident()

    def _is_refused(self, caller: types.FrameType) -> bool:
        return threading.get_ident() == self._thread

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # for isinstance
        return type(self._value)

    def __getattr__(self, key: str) -> Any:
        return self._refused(key) if key in self._methods else getattr(self._value, key)

    def __repr__(self) -> str:
        return repr(self._value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._value.__reduce_ex__(protocol)

    def _refused(self, key: str) -> Callable[..., Any]:
        def refused(*args: Any, **kwargs: Any) -> Any:
            def call() -> Any:
                return getattr(self._value, key)(*args, **kwargs)

            return self._refuse(self._methods[key], call) if self._is_refused(sys._getframe(1)) else call()

        return refused


class RefusingIterator(Refusing):
    """Stands in the place of an iterator."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._refused("__next__")()


class RefusingStream(RefusingIterator):
    """Stands in the place of ``sys.stdout``: libraries, debuggers and Python itself may write there."""

    def _is_refused(self, caller: types.FrameType) -> bool:
        file = caller.f_code.co_filename
        return super()._is_refused(caller) and not is_foreign_file(file) and not is_library_file(file)


class Refusals:
    """The stand-ins of one trace, by the id of the object, and what they raised."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Any, Refusing]] = {}
        self._raised: list[CaptureError] = []
        self.in_vain: list[str] = []  # names of what needs a stand-in and lies where none can be put

    def stand_in(self, value: Any, name: str) -> Any:
        """The stand-in for ``value``; None if it needs none."""
        if isinstance(value, _BOUND):  # ``it.__next__``
            owner = self.stand_in(value.__self__, name)
            return None if owner is None else getattr(owner, value.__name__)
        if id(value) in self._by_id:
            return self._by_id[id(value)][1]
        methods = _methods(value)
        if not methods:
            return None
        kind = RefusingIterator if "__next__" in methods else Refusing
        return self._add(value, kind(value, methods, self._refusing(name)))

    def _add(self, value: Any, made: Refusing) -> Refusing:
        self._by_id[id(value)] = value, made
        return made

    def _refusing(self, name: str) -> Refuse:
        return lambda reason, call: self.refuse(reason, name, call)

    @contextmanager
    def refused_streams(self) -> Iterator[None]:
        """Refuse what the user's own code writes to ``sys.stdout`` and ``sys.stderr``, for the length of the context.

        ``print`` is recorded (``journals.py``).
        """
        before = {name: stream for name in ("stdout", "stderr") if (stream := getattr(sys, name)) is not None}
        made = {name: RefusingStream(stream, _FILE, self._refusing(f"sys.{name}")) for name, stream in before.items()}
        vars(sys).update(made)
        try:
            yield
        finally:
            vars(sys).update({name: before[name] for name in made if getattr(sys, name) is made[name]})

    def refuse(self, reason: str, name: str, call: Callable[[], Any]) -> Any:
        """Raise ``CaptureError`` at the user's line; ``check`` raises it again if the step's code catches it.

        A check that goes on gets what ``call`` takes in its first trace; nothing is written, or read, for it.
        """
        frame = sys._getframe(2)
        while is_foreign_file(frame.f_code.co_filename) and frame.f_back is not None:
            frame = frame.f_back
        error = CaptureError(f"the step {reason.format(name=name)}\n    {user_lines(frame)}")
        if reason is not _READS and passes(error):
            return taken(error, call) if reason is _TAKES else None
        self._raised.append(error)
        raise error

    def check(self) -> None:
        """Raise what the step caught, and refuse what no stand-in could watch."""
        if self._raised:
            raise self._raised[0]
        if self.in_vain:
            refuse(
                CaptureError,
                f"the step reads {self.in_vain[0]}, an iterator, file or queue in a tuple or a set, which no call of "
                "its program would move on: keep it outside of the step, and pass its values as arguments",
            )


def passed_on(value: Any) -> Any:
    """The object itself, where ``value`` stands in its place."""
    return value._value if issubclass(type(value), Refusing) else value


def _methods(value: Any) -> dict[str, str]:
    """The methods of an object that move it, each with why it is refused; none if it is no such object."""
    if isinstance(value, type):
        return {}
    found: dict[str, str] = {}
    cls = type(value)
    for base in cls.__mro__ if is_foreign_module(cls.__module__) else ():
        found |= _METHODS.get(f"{base.__module__}.{base.__qualname__}", {})
    if _is_iterator(cls):
        found |= {"__next__": _READS if found else _TAKES}
    if isinstance(value, types.GeneratorType):
        found |= dict.fromkeys(("send", "throw", "close"), _TAKES)
    return found


def _is_iterator(cls: type) -> bool:
    """Whether something steps through its values that cannot be watched: not a ``__next__`` of the user's."""
    step = getattr(cls, "__next__", None)
    if isinstance(step, types.FunctionType):
        return is_foreign_file(step.__code__.co_filename)
    return step is not None
