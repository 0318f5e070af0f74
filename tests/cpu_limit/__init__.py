"""A limit for the processor time of new tests, and the list of those that took longer before there was one."""
