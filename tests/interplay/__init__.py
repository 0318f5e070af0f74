"""Features beside other features: a covering array of small steps, each beside the plain step on the whole batch.

``dimensions.py`` is the one table of what can be combined, and of what excludes what. ``array.py`` makes rows of it, so
that each pair of values is in one. ``training.py`` is the model, the step and the loop of a row, ``comparing.py`` runs
it, plain and compiled, ``checking.py`` verifies and certifies it. ``planted.py`` has faults that were real once, which
rows find. ``python -m tests.interplay`` runs all rows (``make interplay``); the tests run a few.
"""
