"""The Python interpreter around a step: the user's lines, code of others, signals, and the garbage collector.

- ``source_lines.py``, ``foreign_code.py``: the user's line of a frame; code that is a library's, and no user's
- ``interrupts.py``: signals are held in our code, and answered in the user's
- ``collector_callbacks.py``, ``young_collections.py``: callbacks that run at any time; collections of new objects alone
- ``keywords.py``: keyword arguments that a function does not have
- ``environment.py``: switches among the variables of the environment
"""
