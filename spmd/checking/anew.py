"""What compiles another program of a step: sizes that it depends on, values that its trace read, and branches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..guards.leaves import can_be_live
from ..python_state.lines import line_naming
from ..python_state.reads import ReadSite, is_plain
from ..step_compiler import Rehearsal

_SIZES = "compiles a program for each size of"


def compiled_anew(made: Rehearsal, with_open_sizes: Callable[[], Rehearsal]) -> tuple[str, ...]:
    """A sentence for each; ``with_open_sizes`` makes the program once more, for any sizes of the arguments."""
    return tuple(dict.fromkeys([*_sizes(with_open_sizes), *_branches(made), *_values(made)]))


def _sizes(with_open_sizes: Callable[[], Rehearsal]) -> Iterator[str]:
    notes = with_open_sizes().made.captured.program.notes
    yield from (note[note.index(_SIZES) + len("compiles a program for ") :] for note in notes if _SIZES in note)


def _branches(made: Rehearsal) -> Iterator[str]:
    """Conditions on numbers of groups and on state, of which the trace took one branch."""
    captured = made.made.captured
    for name, value in captured.fixed.items():
        yield f"each value of {name}, now {value}: the step branches on it"
    for branch in captured.guards.branches:
        names = ", ".join(branch.reads) or "a tensor that is no argument"
        yield f"another branch on the value of {names}"


def _values(made: Rehearsal) -> Iterator[str]:
    """Plain values that the step read, each with the line that names it."""
    reads, code = made.guards.reads, getattr(made.made.reads, "code", ())
    for site, value in zip(reads.sites, reads.values, strict=True):
        if not is_plain(value) or value is None or _is_torchs_note(site):
            continue
        line = line_naming(code, str(site.key))
        at = f" at {line}" if line else ""
        if can_be_live(value, value) and site.address not in reads.fixed:
            yield f"another value of {site.name}, now {value!r}, which is an input from then on{at}"
        else:
            yield f"each value of {site.name}, now {value!r}{at}"
    for tensor, _ in reads.taken:
        yield f"other values of {reads.names.get(id(tensor), 'a tensor')}, which the step takes into Python"


def _is_torchs_note(site: ReadSite) -> bool:
    """Whether it is an attribute by which torch notes something for itself."""
    return site.owned and str(site.key).startswith("_")
