"""Analyses: facts of a program, found without changing it."""
