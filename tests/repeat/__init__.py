"""Tests again and again, in other orders and on a busy machine: which of them are not steady."""
