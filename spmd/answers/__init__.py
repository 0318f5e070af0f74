"""Branches on values: a step that asks whether a tensor is true is traced for an answer, and again for another one.

``../capture/values/questions.py`` answers while a step is traced, and puts the values into its program; ``guess.py``
gives the first answer to a question. A call runs the program of the call before. Where a value turns out to be another
one, which is known before state is written, the call runs the program of that answer (``../step_runner.py``).
"""
