"""Warm starts: what compiling a call found, as data in a folder that a later process binds to its own objects.

``compile_cache.py`` has the order: ``folder.py`` holds the entries, ``call_key.py`` has the facts of a call by which
they are found, ``surroundings.py`` those of the process (versions, processor, flags, torch's functions), and
``read_data.py`` what the trace read, which must be the same now. ``described.py`` and ``code_digests.py`` compare
values and code across processes, ``paths.py`` finds live objects again. ``program_data.py``, ``captured_data.py`` and
``conditions.py`` are programs and captures as JSON, ``kernel_data.py`` kernels that were compiled for programs.
``impure_reads.py`` has the names that make a step one that is not cached.
"""
