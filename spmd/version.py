"""The version, for ``spmd --version`` and ``pyproject.toml``, which import nothing else."""

__version__ = "0.1.0"
