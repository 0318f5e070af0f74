"""A step of ours beside the same step without communication, under DDP and under FSDP2.

In the order in which a run goes through them: ``models`` (what is trained), ``systems`` (who trains it), ``network``
(what joins the ranks), ``team`` (the processes of one system), ``rank`` (what each of them does), ``memory``, ``wire``
and ``spent`` (what it measures beside time), ``race`` (rounds in turn), ``table``. The command is ``python -m
benchmarks.peers``.
"""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # read when torch is loaded: else its profiler writes into the table
