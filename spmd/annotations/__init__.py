"""Annotations of modules: applied by ``spmd.replicate`` and ``spmd.fully_shard``, resolved when a step is compiled."""
