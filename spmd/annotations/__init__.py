"""Annotations of modules: applied by ``spmd.replicate`` and ``spmd.fully_shard``, resolved when a step is compiled.

``no_sync.py`` is the switch that leaves gradients of modules pending.
"""
