"""What a graph calls while it runs: collectives of our own, planned memory, random draws."""
