"""``spmd.generate``: transformers' ``generate`` on parameters that stay split, by a compiled forward.

The loop is transformers' own, and runs on all rows on each rank: so text, scores, random draws and the end are those of
one device. What it calls runs on this rank's rows (``rows.py``), with key-value caches that each rank has its part of
(``caches.py``).
"""
