"""The sharding rules as one table, for people: which ops have a rule, its letters, and what it claims of a call.

Rules are functions of a call, so the letters of one are read while it runs on an example (``examples.py``). What is
shown is what the partitioner gets, and nothing is written down twice.
"""
