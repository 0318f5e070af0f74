"""Side effects of a step on Python state: found in its trace, undone, and repeated by every call of the program.

``attributes.py`` finds what changed in modules and optimizers, ``../reads`` what changed elsewhere. ``carried.py`` says
which of it is state that the program takes as inputs, ``writes.py`` what each call writes back, or why it is refused.
"""
