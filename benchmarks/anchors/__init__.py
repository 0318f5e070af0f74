"""Estimated and published steps, side by side."""
