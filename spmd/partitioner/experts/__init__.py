"""Rows of activations that go to the ranks of their experts."""

OWNS = (
    *("experts", "room", "rooms", "expert_room", "expert_axes", "expert_parameters"),
    *("expert_placements", "experts_on_one_axis", "divides_experts", "exchange_rows", "to_experts", "by_expert"),
    "EXPERTS_AXIS",
)
"""Identifiers of this feature. No further file outside of it may name one (``tests/test_structure.py``)."""
