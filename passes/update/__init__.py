"""Passes that let one op update many parameters."""
