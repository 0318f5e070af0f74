"""Check a step before it is launched: every refusal of compiling it, by one process, without ranks.

A step is traced on fake tensors, as compiling does. Its first refusal is noted, and the step traced again with a
stand-in behind it (``spmd/call/refusals.py``), until a trace comes to its end or to a refusal that none goes past. A
condition is answered the other way in another trace, so that both branches are looked at.

- ``refusal.py``: one refusal, with its line, op, reason and alternative, from the error that compiling raises
- ``noted.py``: the refusals that were noted, which a trace goes past, and its answers for values
- ``rehearsals.py``: the programs of one step in one mode, which nothing runs
- ``tracing.py``: one step in one mode, traced until no refusal is new
- ``anew.py``: what compiles another program: sizes, values and branches
- ``whole.py``: what ranks gather whole, for want of a rule or for other reasons
- ``findings.py``, ``text.py``: what was found in each mode, as data, and as text for a terminal
- ``check.py``: a step in its own mode, or in several
"""

from .check import check
from .findings import Findings, InMode
from .refusal import Refusal
from .text import lines_of, text_of

__all__ = ["Findings", "InMode", "Refusal", "check", "lines_of", "text_of"]
