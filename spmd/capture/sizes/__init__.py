"""Capture a step once for all sizes of some dims of its arguments.

``size_symbols.py`` stands symbols in the place of sizes while the step is traced. ``specialize.py`` makes the captured
program for given sizes, and ``known_outputs.py`` takes numbers out of what that returns. ``same_program.py`` compares
it with one that was traced for these sizes. ``any_size.py`` puts all of this together.
"""
