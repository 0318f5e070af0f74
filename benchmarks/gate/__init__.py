"""A gate for speed: compare two arms, a commit and this checkout or two options of it, on a machine with other work.

The files in the order in which a run uses them: ``arms`` (the two things compared, and a commit's checkout), ``rank``
(one process of an arm), ``preload`` (what both arms import of others), ``pairs`` (fresh processes of both, in turn),
``figures`` (a number of each arm and pair), ``verdicts`` (intervals and answers), ``table``; ``disturb`` is for trying
the gate itself. The command is ``python -m benchmarks.gate``.

Nothing here may import spmd before a process knows which arm it is of: that import is measured, and is the arm's own.
"""
