"""Parallel modes: they decide the placement of each input of a program."""
