"""Passes that assign memory: state in flat storages, updates in place, all other values in one arena."""
