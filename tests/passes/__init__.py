"""Tests of the lower layer: none needs a second process."""
