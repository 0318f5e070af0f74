"""Plain Python state that a step reads while it is traced, for guards to compare at later calls.

``python_reads.py`` records the reads; attributes, globals and entries of classes and modules each have a file for how
they are observed. ``replacement_reads.py`` records those of overrides. ``read_sites.py``, ``snapshots.py`` and
``changes.py`` define what is recorded. What each call of a program repeats is recorded in ``journals.py`` and
``logging_calls.py``; what none could repeat is refused in ``refusing.py``, ``compared_objects.py`` and ``clocks.py``.
"""

from .changes import Change
from .global_reads import global_chains, names_in
from .journals import Journals, Lines
from .python_reads import Reads
from .read_sites import MISSING, READERS, ReadSite, Reference, is_plain
from .refusing import passed_on
from .replacement_reads import ReplacementReads
from .snapshots import CONTAINERS, ContainerSnapshot, containers_in, content_of

__all__ = [
    "CONTAINERS",
    "MISSING",
    "READERS",
    "Change",
    "ContainerSnapshot",
    "Journals",
    "Lines",
    "ReadSite",
    "Reads",
    "Reference",
    "ReplacementReads",
    "containers_in",
    "content_of",
    "global_chains",
    "is_plain",
    "names_in",
    "passed_on",
]
