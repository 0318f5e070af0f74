"""Live state: initialized, split over ranks, stored flat, lent to readers, committed, and repaired after a failure.

- ``initialize.py``, ``distribute.py``, ``equal_on_ranks.py``: first values, each rank's parts, and equality of replicas
- ``replace_parameters.py``, ``stale_references.py``, ``eager_calls.py``: split parameters in the user's objects
- ``flat_storage.py``, ``storage_facts.py``, ``bound_programs.py``: where state lies, and who holds views of it
- ``background_reads.py``, ``commit.py``, ``recover.py``: readers of live state, the first write of a call, repair
"""
