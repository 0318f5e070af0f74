"""Passes that remove dead and redundant nodes, so that later passes match smaller and more uniform graphs."""
