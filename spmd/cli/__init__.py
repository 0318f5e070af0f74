"""``python -m spmd``: its commands."""
