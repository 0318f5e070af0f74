"""What the tests share: worker processes with gloo ranks, the oracle for numbers, a fake world, a look at torch."""
