"""The tests; a package, so that worker processes import test modules by their full names."""

import os

os.environ["SPMD_CACHE"] = "off"  # what a test compiles is what the code makes now; tests of the cache ask for a folder
