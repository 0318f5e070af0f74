"""Ops that are computed on symbols by formulas of their own: attention, updates of optimizers, rows of experts."""
