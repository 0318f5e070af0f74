"""Capture: from the user's function and its arguments to one functional graph on global shapes.

``program.py`` tells the story. ``trace.py`` runs the step once on fakes (``shapes_only.py``), in which
``optimizers.py``, ``norms.py``, ``selects.py``, ``set_data.py``, ``attributes.py`` and ``branches.py`` put what a graph
can hold in the place of what it cannot; ``provenance.py`` and ``recompute.py`` note where each op comes from,
``reads.py``, ``namespaces.py`` and ``conditions.py`` what the trace takes for granted, ``kept.py`` and ``refused.py``
what it must not change or cannot do.
Then the graph is made functional and taken apart (``decompositions.py``, ``random_decompositions.py``, ``bags.py``,
``fused.py``).
"""

from .program import Captured, FromOutput, capture

__all__ = ["Captured", "FromOutput", "capture"]
