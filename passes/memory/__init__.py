"""Passes that decide where values lie: state in flat storages, updates in place, all else in one arena."""
