"""What a call leaves to the next one: updates, with what finishes a pending one, and gathers that it has started."""
