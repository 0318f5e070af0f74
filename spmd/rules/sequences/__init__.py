"""Attention on ranks that each have a part of the queries' rows.

A causal mask counts rows of the whole, but kernels count from the first row that they get. So a rank computes twice:
with the keys before its rows, all of which its queries see, and with those of its own rows, by a causal kernel. Both
results are merged by their log-sum-exps. Backward needs no merge: given the log-sum-exp of all keys, a kernel finds the
gradients that its keys contribute.

Where rows are mirrored, each rank has an early and a late run of queries, and all compute equally much.

All ranks run the same ops. Keys that a rank does not need are cut down to a few rows, whose weight is zero.
"""
