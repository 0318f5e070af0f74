"""``spmd fuzz``: write random small steps as files, verify each, and shrink the first that fails of each kind."""
