"""What goes wrong while a step runs: each fault ends with equal ranks, or with a sentence on all of them."""
