"""Plain Python state that a step reads while it is traced, for guards to compare at later calls.

``python_reads.py`` is a trace from its first read until its changes are undone. ``watching.py`` notes reads and follows
values to what may be read through them: attributes, globals and entries of classes and modules each have a file for how
they are observed. ``stand_ins.py`` puts fakes, and what records or refuses, in the place of values meanwhile.
``recorded_reads.py`` is what is left for guards; ``read_sites.py``, ``snapshots.py`` and ``changes.py`` define what
that holds. ``replacement_reads.py`` records the reads of overrides. What each call of a program repeats is recorded in
``journals.py`` and ``logging_calls.py``; what none could repeat is refused in ``refusing.py``, ``compared_objects.py``
and ``clocks.py``. ``contents.py`` has what arrays, caches of functions and the environment hold; ``world_size.py``
answers how many ranks there are.
"""

from .changes import Change
from .contents import Contents, is_array
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
    "Contents",
    "Journals",
    "Lines",
    "ReadSite",
    "Reads",
    "Reference",
    "ReplacementReads",
    "containers_in",
    "content_of",
    "global_chains",
    "is_array",
    "is_plain",
    "names_in",
    "passed_on",
]
