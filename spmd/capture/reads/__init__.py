"""Plain Python state that a step reads while it is traced, for guards to compare at later calls.

``python_reads.py`` records the reads; attributes, globals and entries of classes and modules each have a file for how
they are observed. ``read_sites.py`` and ``snapshots.py`` define what is recorded.
"""

from .python_reads import Reads
from .read_sites import MISSING, READERS, ReadSite, is_plain
from .snapshots import content_of

__all__ = ["MISSING", "READERS", "ReadSite", "Reads", "content_of", "is_plain"]
