"""Statistics of named values, computed in the step: norms of gradients, say, of whole tensors in any mode.

``watch.py`` has what ``step.watch`` returns, ``statistics.py`` what there is to compute. ``traced.py`` computes it
while the step is traced, so that programs return it beside the step's own results. ``not_finite.py`` reads after each
call how many elements are NaN or Inf, by module (``check="nan"``).
"""
