"""Solvers: which option each node of a program takes along each mesh axis.

``solver.py`` is what a solver implements, ``problem.py`` what it gets, and ``greedy.py`` the one that decides whatever
no other solver has. One of your own is ``Plan.solver``, which the ``plan()`` of a mode sets.
"""
