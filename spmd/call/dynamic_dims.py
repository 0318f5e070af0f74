"""Dims of tensor arguments whose size may change from call to call: those that ``dynamic`` names, or calls have shown.

A step is captured once with symbols for such sizes (``capture/sizes/``); each size then costs no other trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from passes import CaptureError, Input, Program, Role

from .inputs import BatchInput
from .refusals import refuse

Dim = tuple[str, int]  # of a tensor argument, by its name


@dataclass(frozen=True)
class DynamicSize:
    """A size that all of ``dims`` have in every call; ``name`` is the user's, or that of the first of them."""

    name: str
    dims: tuple[Dim, ...]


Shapes = Mapping[str, Sequence[int]]  # the global shapes of tensor arguments, by name


def shapes_of(inputs: Iterable[BatchInput]) -> dict[str, tuple[int, ...]]:
    """The global shapes of tensor arguments, by name."""
    return {each.name: each.shape for each in inputs}


def argument_shapes(program: Program) -> dict[str, tuple[int, ...]]:
    """The global shapes of the tensor arguments that a captured program was made for, by name."""
    return {each.name: each.shape for each in program.inputs if each.role in (Role.BATCH, Role.ARGUMENT)}


def named_sizes(dynamic: Mapping[str, Mapping[int, str]], inputs: Sequence[BatchInput]) -> list[DynamicSize]:
    """The sizes that ``spmd.compile(dynamic=...)`` names, each with the dims of the arguments that have it.

    Raises ``CaptureError`` for an argument or a dim that is not there, and for two sizes under one name.
    """
    shapes = shapes_of(inputs)
    found: dict[str, list[Dim]] = {}
    for argument, names in dynamic.items():
        if argument not in shapes:
            named = f"dynamic names {argument!r}, but the tensor arguments of the step are {list(shapes)}"
            refuse(CaptureError, named)
            continue
        for dim, name in names.items():
            shape = shapes[argument]
            if not -len(shape) <= dim < len(shape):
                refuse(CaptureError, f"dynamic names dim {dim} of {argument}, whose shape is {list(shape)}")
                continue
            found.setdefault(name, []).append((argument, dim % len(shape)))
    for name, dims in [*found.items()]:
        sizes = {f"dim {dim} of {argument}": shapes[argument][dim] for argument, dim in dims}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{each} has {size}" for each, size in sizes.items())
            refuse(CaptureError, f"dynamic gives one name, {name!r}, to sizes that differ: {listed}")
            del found[name]
    return [DynamicSize(name, tuple(dims)) for name, dims in found.items()]


def has_dim(shapes: Shapes, dim: Dim) -> bool:
    """Whether there is such an argument with such a dim."""
    return dim[1] < len(shapes.get(dim[0], ()))


def have_same_dims(one: Shapes, other: Shapes) -> bool:
    """Whether two calls have the same tensor arguments, with as many dims each."""
    return one.keys() == other.keys() and all(len(shape) == len(other[name]) for name, shape in one.items())


def changed_dims(before: Shapes, now: Shapes) -> list[Dim]:
    """The dims whose sizes differ between two calls whose arguments have the same dims."""
    return [(name, k) for name, shape in now.items() for k, size in enumerate(shape) if size != before[name][k]]


def equal_sizes(dims: Iterable[Dim], shapes: Sequence[Shapes]) -> list[DynamicSize]:
    """Each of ``dims`` with all others that had the same size in every call; ``shapes``: of the arguments of each."""
    together: dict[tuple[Any, ...], list[Dim]] = {}
    for argument, dim in dims:
        together.setdefault(tuple(each[argument][dim] for each in shapes), []).append((argument, dim))
    return [DynamicSize(f"dim {same[0][1]} of {same[0][0]}", tuple(same)) for same in together.values()]


def sizes_in(shapes: Shapes, sizes: Iterable[DynamicSize]) -> tuple[int, ...]:
    """The value of each size where the arguments have these shapes; nothing where they are others, or sizes differ."""
    found: list[int] = []
    for size in sizes:
        values = {shapes[dim[0]][dim[1]] if has_dim(shapes, dim) else None for dim in size.dims}
        if len(values) != 1 or None in values:
            return ()
        found += [value for value in values if value is not None]
    return tuple(found)


def with_sizes(inputs: Sequence[Input], sizes: Sequence[DynamicSize], values: Sequence[int]) -> list[Input]:
    """The same inputs where the dims of ``sizes`` have these values."""
    found = {dim: value for size, value in zip(sizes, values, strict=True) for dim in size.dims}
    return [
        replace(each, shape=tuple(found.get((each.name, k), size) for k, size in enumerate(each.shape)))
        for each in inputs
    ]
