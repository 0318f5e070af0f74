"""Backends: what runs the ops of a program, by the name or the callable that ``spmd.compile(backend=)`` takes.

With ``"aten"`` ops run one by one; ``"inductor"`` makes kernels of islands between them (``islands.py``); a callable
compiles regions (``compiled_regions.py``). To launch all of a step as CUDA graphs is an option beside the backend
(``cuda_graphs.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from passes.errors import did_you_mean

from .codegen import Compiles
from .compiled_regions import CompiledRegions, takes_examples
from .islands import CompiledIslands

Backend = Literal["aten", "inductor"] | Callable[..., Any]


def check_backend(given: Any) -> Backend:
    """Raise ``TypeError`` unless ``given`` is a backend; returns it."""
    if given == "aten" or given == "inductor":
        return given  # type: ignore[no-any-return]
    if not callable(given):
        hint = did_you_mean(given, ("aten", "inductor"))
        raise TypeError(f'expected backend to be "aten", "inductor" or a callable, got {given!r}{hint}')
    takes_examples(given)
    return given  # type: ignore[no-any-return]


def compiler_of(backend: Backend) -> Compiles | None:
    """An object that compiles the regions of programs for a backend; None where ops run one by one."""
    if isinstance(backend, str):
        return CompiledIslands() if backend == "inductor" else None
    return CompiledRegions(backend)
