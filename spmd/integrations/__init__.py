"""Train in the loops of other libraries: a subclass each, over public names of ``spmd`` alone.

Import the one that you use (``from spmd.integrations.transformers import Trainer``): each needs its library, which
``pip install "spmd[transformers]"`` or ``"spmd[accelerate]"`` installs.
"""
