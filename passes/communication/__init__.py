"""Passes that merge collectives, choose the ops that implement them, and move their starts and waits."""
