"""Capture a step once for all sizes of some dims of its arguments.

``size_symbols.py`` stands symbols in the place of sizes while the step is traced, ``specialize.py`` makes the captured
program for given sizes, ``same_program.py`` compares it with one that was traced for them, and ``any_size.py`` puts
these together.
"""
