"""Test harness: worker processes with gloo ranks, the oracle for numbers, a fake world, the global state of torch."""
