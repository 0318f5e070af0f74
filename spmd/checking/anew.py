"""Find what compiles another program of a step: sizes that it depends on, values that its trace read, and branches."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import Any

from passes import Input, Program, Role

from ..call.dynamic_dims import Dim, DynamicSize, argument_shapes
from ..capture.sizes.size_symbols import TracedSizes
from ..guards.leaves import can_be_live
from ..interpreter.foreign_code import is_library_file
from ..python_state.lines import line_naming
from ..python_state.reads import ReadSite, is_plain
from ..step_compiler import Rehearsal
from .rehearsals import Rehearsals


def compiled_anew(made: Rehearsal, rehearsals: Rehearsals) -> tuple[str, ...]:
    """A sentence for each; ``rehearsals`` make the program once more, for other sizes of the arguments."""
    return tuple(dict.fromkeys([*_sizes(made, rehearsals), *_branches(made), *_values(made)]))


def _sizes(made: Rehearsal, rehearsals: Rehearsals) -> Iterator[str]:
    """Sizes that have a program each, but for those that no call can have otherwise, as a model's width."""
    program = made.made.captured.program
    shapes = argument_shapes(program)
    fixed = rehearsals.with_open_sizes(_names_of_sizes(program)).fixed
    together: dict[tuple[int, int, str], list[Dim]] = {}
    for (argument, dim), line in fixed.items():
        together.setdefault((dim, shapes[argument][dim], line), []).append((argument, dim))
    for (_, size, line), dims in together.items():
        same = DynamicSize("a size", tuple(dims))
        if any(rehearsals.traces(TracedSizes((same,), (n,), are_symbolic=False)) for n in (2 * size, size + 1)):
            listed = ", ".join(f"dim {dim} of {argument}" for argument, dim in dims)
            why = f"it depends on the size at {line}" if line else "it cannot be traced for a size that is not known"
            yield f"each size of {listed}: {why}"


def _names_of_sizes(program: Program) -> dict[str, dict[int, str]]:
    """A name for each size that batches of a loop may have otherwise: rows, and the lengths of sequences.

    Equal ones of one dim have one name. Sizes of images are not among them, with which a trace may take minutes.
    """
    arguments = [each for each in program.inputs if each.role in (Role.BATCH, Role.ARGUMENT)]
    return {
        each.name: {k: f"{n} in dim {k}" for k, n in enumerate(each.shape[: 1 + _is_sequence(each)]) if n > 1}
        for each in arguments
    }


def _is_sequence(declared: Input) -> bool:
    """Whether dim 1 may be that of a sequence: of numbers of tokens, or of rows of features."""
    is_integer = declared.dtype is not None and not declared.dtype.is_floating_point
    return len(declared.shape) == 3 or (len(declared.shape) == 2 and is_integer)


def _branches(made: Rehearsal) -> Iterator[str]:
    """Conditions on values, on numbers of groups and on state, of which the trace took one branch."""
    captured = made.made.captured
    for name, value in captured.fixed.items():
        yield f"each value of {name}, now {value}: the step branches on it"
    for line in dict.fromkeys(each.where for each in captured.answers):
        yield f"each answer at {line}"
    for branch in captured.guards.branches:
        names = ", ".join(branch.reads) or "a tensor that is no argument"
        yield f"another branch on the value of {names}"


def _values(made: Rehearsal) -> Iterator[str]:
    """Plain values that the step read, each with the line of the user's that names it; those of libraries counted."""
    reads, code = made.guards.reads, getattr(made.made.reads, "code", ())
    own, of_libraries = [each for each in code if not is_library_file(each.co_filename)], 0
    for site, value in zip(reads.sites, reads.values, strict=True):
        if not is_plain(value) or value is None or _is_torchs_note(site):
            continue
        if line := _line(own, site):
            is_input = can_be_live(value, value) and site.address not in reads.fixed
            yield f"{'once, for another' if is_input else 'each'} value of {site.name}, now {value!r}, read at {line}"
        else:
            of_libraries += 1
    for tensor, _ in reads.taken:
        yield f"other values of {reads.names.get(id(tensor), 'a tensor')}, which the step takes into Python"
    if of_libraries:
        yield f"another value of one of {of_libraries} that code of libraries reads, such as the config of a model"


def _line(code: list[CodeType], site: ReadSite) -> str:
    key: Any = site.key
    return line_naming(code, key) if isinstance(key, str) else ""


def _is_torchs_note(site: ReadSite) -> bool:
    """Whether it is an attribute by which torch notes something for itself."""
    return site.owned and str(site.key).startswith("_")
