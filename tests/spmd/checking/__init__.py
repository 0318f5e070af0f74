"""``spmd check``: what it finds in steps, and in scripts as people write them."""
