"""Facts of the process that decide what a trace records: versions, processor, flags, torch's own functions."""

from __future__ import annotations

import hashlib
import operator
import os
import platform
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

import passes

from ..interpreter.foreign_code import is_foreign_code, is_foreign_module
from .code_digests import code_digest
from .library_code import LIBRARIES

_VARIABLES = ("TORCH", "PYTORCH", "ATEN_", "SPMD_", "CUDA", "CUBLAS", "MKL", "OMP_", "KMP_", "DNNL", "ONEDNN", "NCCL")
_NOT_READ = (
    "SPMD_CACHE",
    "SPMD_DUMP",
    "SPMD_QUIET",
    "SPMD_RUN_FOLDER",
    "TORCHELASTIC_",
    "TORCHINDUCTOR_",
    "OMP_NUM_THREADS",
)  # the threads are counted
_PREFIXES = (
    "torch.nn.",
    "torch.optim.",
    "torch.autograd",
    "torch.amp",
    "torch.distributions.",
    "torch.utils.checkpoint",
)
_MODULES = (
    *("torch", "torch._tensor", "torch._C._nn", "torch.functional", "torch.special", "torch.linalg", "torch.fft"),
    *("torch.utils._foreach_utils", "torch.utils._contextlib", "torch.nn", "torch.optim", "torch.random"),
)
_OF_PYTHON = ("builtins", "math", "operator", "functools", "itertools", "random")
_REPLACED = "replaced: "
_LATE = "_disable_dynamo."  # a wrapper that torch puts around some of its functions when it imports Dynamo


def surroundings() -> dict[str, Any]:
    """All of them but functions, as JSON."""
    return {
        "python": [sys.version, platform.machine(), sys.byteorder, list(map(repr, sys.flags))],
        "torch": [torch.__version__, str(torch.version.git_version), str(torch.version.cuda)],
        "spmd": _source_digest(),
        "libraries": [(name, _version(name)) for name in ("numpy", "sympy", "mpmath", *LIBRARIES)],
        "processor": [
            torch.backends.cpu.get_cpu_capability(),
            torch.get_num_threads(),
            torch.get_num_interop_threads(),
        ],
        "devices": _devices(),
        "flags": flags(),
        "environment": [each for each in sorted(os.environ.items()) if is_read(each[0])],
    }


def _devices() -> list[Any]:
    """The accelerators that this process uses."""
    if not torch.cuda.is_initialized():
        return [torch.cuda.is_available()]
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [[each.name, each.major, each.minor, each.total_memory] for each in found]


def is_read(variable: str) -> bool:
    """Whether a variable of the environment may decide what a trace records, or how programs compute."""
    return variable.startswith(_VARIABLES) and not variable.startswith(_NOT_READ)


def _version(name: str) -> str:
    return str(getattr(sys.modules.get(name), "__version__", ""))


@cache
def _source_digest() -> str:
    """A hash of our own files."""
    found = hashlib.sha256()
    for package in (Path(passes.__file__).parent, Path(__file__).parents[1]):
        for path in sorted(package.rglob("*.py")):
            found.update(f"{path.relative_to(package.parent)}\n".encode() + path.read_bytes())
    return found.hexdigest()


def flags() -> list[Any]:
    """Switches of torch that decide which ops a trace records, or how these compute."""
    cuda, cpu, future = torch.backends.cuda, torch.backends, torch.__future__
    switches: dict[str, Callable[[], Any]] = {
        "deterministic": torch.are_deterministic_algorithms_enabled,
        "deterministic, warn only": torch.is_deterministic_algorithms_warn_only_enabled,
        "matmul": torch.get_float32_matmul_precision,
        "tf32": lambda: [cuda.matmul.allow_tf32, cpu.cudnn.allow_tf32],
        "attention": lambda: [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()],
        "attention by cudnn": cuda.cudnn_sdp_enabled,
        "fast path of attention": cpu.mha.get_fastpath_enabled,
        "mkldnn": lambda: cpu.mkldnn.enabled,
        "cudnn": lambda: [cpu.cudnn.enabled, cpu.cudnn.benchmark, cpu.cudnn.deterministic],
        "anomalies": lambda: [torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()],
        "conversions": future.get_overwrite_module_params_on_conversion,
        "swaps": future.get_swap_module_params_on_conversion,
    }
    return [[name, _value_of(read)] for name, read in switches.items()]


def _value_of(read: Callable[[], Any]) -> Any:
    """The value of a switch; torch raises for one of tf32 that was also set by its newer name."""
    try:
        return read()
    except RuntimeError as error:
        return str(error)


def functions() -> dict[str, list[Any]]:
    """Of each of torch's modules, and some of Python's: a hash of what can be called there, and whether it is theirs.

    Anybody may put other functions there. Torch imports modules when it needs them, so processes have different ones.
    """
    names = sorted(name for name in [*sys.modules] if name in _MODULES or name.startswith(_PREFIXES))
    modules = {name: sys.modules.get(name) for name in (*_OF_PYTHON, *names)}
    return {name: _digest(name, vars(each)) for name, each in modules.items() if isinstance(each, types.ModuleType)}


def same_functions(was: Mapping[str, Sequence[Any]], now: Mapping[str, Sequence[Any]]) -> str:
    """The module in which two processes have different functions, or nothing."""
    either = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    changed = [name for name in either if name in was and name in now]
    return next(iter([*changed, *(name for name in either if not (was.get(name) or now[name])[1])]), "")


def _digest(name: str, namespace: dict[str, Any]) -> list[Any]:
    """That of a module is made once, as long as all in it stays what it is: to make all takes 25 ms."""
    known = _known.get(name)
    if known is None or not known.holds(namespace):
        classes = [each for each in [*namespace.values()] if isinstance(each, type) and each.__module__ == name]
        known = _Looked([namespace, *map(vars, classes)], _made(name, namespace))
        if name != "builtins":  # it has the last value of an interactive session, which is not kept alive
            _known[name] = known
    return known.digest


class _Looked:
    """The sources of a digest: the entries of a module and of its classes, and the code of their functions."""

    def __init__(self, places: list[Mapping[str, Any]], digest: list[Any]) -> None:
        self.digest, self._places, self._keys, self._values = digest, places, *_entries(places)
        functions = [function for each in self._values for function in _functions_in(each)]
        self._functions, self._codes = functions, [each.__code__ for each in functions]

    def holds(self, namespace: Mapping[str, Any]) -> bool:
        """Whether these are the entries of that module, and the same objects still."""
        if namespace is not self._places[0]:  # another module has its name now
            return False
        keys, values = _entries(self._places)
        if keys != self._keys or not all(map(operator.is_, values, self._values)):
            return False
        return all(map(operator.is_, map(operator.attrgetter("__code__"), self._functions), self._codes))


_known: dict[str, _Looked] = {}


def _entries(places: list[Mapping[str, Any]]) -> tuple[list[list[str]], list[Any]]:
    """The names in each place, and what all of them stand for."""
    keys, values = list[list[str]](), list[Any]()
    for each in places:
        keys.append([*each])
        values += each.values()
    return keys, values


def _functions_in(value: Any) -> list[types.FunctionType]:
    parts: list[Any] = [value.fget, value.fset] if type(value) is property else [value]
    parts = [each.__func__ if type(each) in (staticmethod, classmethod) else each for each in parts]
    found = [each for each in parts if type(each) is types.FunctionType]
    return found + [inner for each in found if type(inner := vars(each).get("__wrapped__")) is types.FunctionType]


def _made(name: str, namespace: dict[str, Any]) -> list[Any]:
    lines: list[str] = []
    for key, value in [*namespace.items()]:
        lines += _entry(key, value)
        if isinstance(value, type) and value.__module__ == name:
            lines += [line for entry, held in vars(value).items() for line in _entry(f"{key}.{entry}", held)]
    is_theirs = not any(line.startswith(_REPLACED) for line in lines)
    return [hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32], is_theirs]


def _entry(key: str, value: Any) -> Iterator[str]:
    """A line for what can be called; of a function that is neither torch's nor Python's own, its code."""
    value = getattr(value, "__func__", value) if type(value) in (staticmethod, classmethod) else value
    if type(value) is types.FunctionType and value.__code__.co_qualname.startswith(_LATE):
        value = getattr(value, "__wrapped__", value)
    if type(value) is property:
        for part in (value.fget, value.fset):
            yield from _entry(f"{key}=", part)
    elif type(value) is types.FunctionType:
        code = value.__code__
        if is_foreign_code(code, value.__globals__):
            yield f"{key} {value.__module__} {code.co_qualname} {code.co_firstlineno}"
        else:
            yield f"{_REPLACED}{key} {code_digest(code)}"
    elif callable(value):
        kind = value if isinstance(value, type) else type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        yield f"{'' if is_foreign_module(kind.__module__) else _REPLACED}{key} {name} {getattr(value, '__name__', '')}"
