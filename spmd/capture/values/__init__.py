"""Values that are known while tracing: numbers, masks, positions; and what needs a value that is not."""
