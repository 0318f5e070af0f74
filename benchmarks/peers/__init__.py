"""Race a compiled step against the same step without communication, under DDP and under FSDP2.

The files in the order in which a run uses them: ``models`` (workloads), ``systems`` (DDP, FSDP2, spmd, with their
options), ``network`` (loopback or two hosts), ``team`` (the processes of one system), ``rank`` (one of them),
``memory``, ``wire`` and ``spent`` (measurements besides time), ``race`` (rounds in turn), ``table``. The command is
``python -m benchmarks.peers``.
"""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # read when torch is loaded: else its profiler writes into the table
os.environ.setdefault("SPMD_CACHE", "off")  # else only the first run of a benchmark would compile
