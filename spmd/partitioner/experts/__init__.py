"""Rows of activations that go to the ranks of their experts."""
