"""Ranks: the mesh of all, consensus between them, and connections between those of one host."""
