"""Micro-batches: a mesh axis whose parts run one after the other instead of on ranks of their own.

The partitioner splits the batch over it with the rules that it has, and leaves sums along it pending; these become
accumulators. So a loss is scaled by global counts, and an update sees whole gradients, by construction.
"""
