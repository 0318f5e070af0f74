"""The commands of ``python -m spmd``."""
