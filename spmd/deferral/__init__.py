"""Updates that a call leaves to the next one: the programs that take turns, and what finishes a pending update."""
