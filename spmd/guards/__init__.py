"""Guards: the conditions under which a call may run a program, checked at every call."""
