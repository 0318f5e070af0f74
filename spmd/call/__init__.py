"""One call of a step: its arguments, the live state in them, and its seed."""
