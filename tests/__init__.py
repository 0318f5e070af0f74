"""The tests; a package, so that worker processes import test modules by their full names."""
