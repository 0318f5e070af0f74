"""Regions of compute that a backend takes: which ops they hold, and how numbers of a call come into them."""
