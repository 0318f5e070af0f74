"""What tracing took for granted, compared at every call."""
