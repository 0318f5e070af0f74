"""``spmd.verify``: run a compiled step on simulated ranks, in one process, and compare it with the plain step."""
