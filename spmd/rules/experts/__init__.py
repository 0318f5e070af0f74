"""Rows that ranks exchange to bring them to their experts."""
