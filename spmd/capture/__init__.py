"""Capture: from the user's function and its arguments to one functional graph on global shapes.

``make_program.py`` has the order of stages. ``trace.py`` runs the step once on fakes (``fakes.py``, ``fake_mode.py``),
which ``swap_state.py`` puts in the place of live state; ``final_state.py`` reads what the step left behind. While it
runs, ``optimizers.py``, ``batch_norm.py``, ``symbolic_math.py``, ``set_data.py``, ``tensor_attributes.py`` and
``state_branches.py``, ``flex_attention.py``, ``scalar_indices.py``, ``known_masks.py``, ``tensor_checks.py`` and
``value_checks.py`` replace what no graph can hold, and ``causal_masks.py`` what none needs;
``provenance.py`` and ``recompute.py`` record where each op comes from; ``hyper_conditions.py`` and ``../python_state/``
record what guards must check and what the step does to Python state; ``unsupported.py`` refuses what a graph cannot do,
and ``explain_errors.py`` explains why.

``functional/`` makes the graph functional and decomposes ops (``decompositions.py``, ``random_decompositions.py``,
``embedding_bag.py``, ``fused_optimizers.py``, with ``known_values.py``). ``bind_outputs.py`` declares its outputs.
``sizes/`` traces a step once for all sizes of some dims, and makes the program for those of a call.
``rank_zero_order.py`` brings what the ranks captured into one order.
"""

from .captured import Captured, FromOutput
from .make_program import capture, retraced
from .rank_zero_order import in_rank_zero_order

__all__ = ["Captured", "FromOutput", "capture", "in_rank_zero_order", "retraced"]
