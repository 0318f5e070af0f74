"""Python state of a step: what it reads, which guards compare, and what it writes, which each call repeats.

- ``reads/``: each read of an attribute, global, closure variable or container during the trace, by site
- ``effects/``: each write, undone after the trace; carried as input and output of the program, or repeated by its calls
- ``lines.py``, ``traced.py``: the user's line that names a value; whether an object holds a value of the trace
"""
