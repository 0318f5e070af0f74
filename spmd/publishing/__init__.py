"""Weights that other processes of the host read while a model trains: ``spmd.publish`` and ``spmd.subscribe``.

    policy/owner                      the process that publishes holds a lock on it for as long as it lives
    policy/layout-<token>.json        the tensors, and which rank's segments have which part of each
    policy/<token>-<rank>-<number>    a segment: one rank's parts of one version
    policy/newest.json                the newest version and its segments; written last, in one move

A version never changes. Each rank writes its parts to a segment that nobody reads, and rank 0 names the segments of all
ranks once these are written: a version is there as a whole or not at all. A reader holds a shared lock on the segments
that it reads, so that the next version goes to others; the lock goes with the reader. Neither side ever waits for the
other. ``folders.py`` has the folder and its owner, ``layout.py`` who writes what, ``segments.py`` the files in memory,
``publish.py`` and ``subscribe.py`` the two sides, ``engine_layout.py`` the names and parts that a reader wants.
"""
