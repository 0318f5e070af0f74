"""Partition: from the global program to one rank's share, with collectives.

``walk.py`` goes over the global graph once, ``choose.py`` says in which placements an op is cheapest, ``ahead.py`` what
a choice costs later, ``redistribute.py`` how a value comes from one placement to another, ``emit.py`` writes the nodes,
``values.py`` is what is known of a global value meanwhile, and ``alike.py`` knows calls that were there before.
"""

from .walk import partition

__all__ = ["partition"]
