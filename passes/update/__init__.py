"""Passes that let one op update many parameters.

A fused kernel of an optimizer is a row of ``optimizer_kernels.py``: its op, and the formula that it computes, of which
matching, capture and certificates are made; an operator that formulas lack also goes to ``formula_terms.py``.
"""
