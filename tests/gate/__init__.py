"""The gate for speed: what is slower is found, and the same is not called slower."""
