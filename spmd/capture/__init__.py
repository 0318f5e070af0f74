"""Capture: from the user's function and its arguments to one functional graph on global shapes.

``make_program.py`` tells the story. ``trace.py`` runs the step once on fakes (``fake_mode.py``), in which
``optimizers.py``, ``batch_norm.py``, ``symbolic_minmax.py``, ``set_data.py``, ``tensor_attributes.py`` and
``state_branches.py`` put what a graph can hold in the place of what it cannot; ``provenance.py`` and ``recompute.py``
note where each op comes from, ``python_reads.py``, ``namespaces.py`` and ``hyper_conditions.py`` what the trace takes
for granted, ``side_effects.py`` and ``unsupported.py`` what it must not change or cannot do. Then the graph is made
functional and taken apart (``decompositions.py``, ``random_decompositions.py``, ``embedding_bag.py``,
``fused_optimizers.py``).
"""

from .make_program import Captured, FromOutput, capture

__all__ = ["Captured", "FromOutput", "capture"]
