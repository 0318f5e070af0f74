"""Run a compiled program: what a call brings in, what ranks compare before it, and where its results go."""
