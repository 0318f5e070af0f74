"""Lower a program to a Python function over live storages, and distribute these storages over the mesh."""
