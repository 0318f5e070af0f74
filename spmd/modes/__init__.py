"""Parallel modes: where each input of a program lives."""
