"""Runtime: the functions that graphs call while they run: collectives, planned memory, random draws."""
