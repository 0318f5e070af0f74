"""The role of the axis of experts, by what it makes of parameters and rows."""

from __future__ import annotations

from passes import AxisRole

EXPERTS_AXIS = AxisRole("experts", rows_move=True, by_values=True)
"""Ranks have other experts, whose weights stay; rows of activations go to them."""
