"""The other ranks: the mesh, agreement between them, and connections between those of one host."""
