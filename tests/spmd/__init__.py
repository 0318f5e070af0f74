"""Tests of the whole path, against the public names."""
