"""Live state: initialized, split over ranks, stored flat, lent to readers, committed, and repaired after a failure.

- ``initialize.py``, ``distribute.py``, ``equal_on_ranks.py``: first values, each rank's parts, and equality of replicas
- ``replace_parameters.py``, ``eager_calls.py``: split parameters in the objects of a call
- ``stale_references.py``, ``references.py``, ``replaced_parameter.py``: and in all others that refer to them
- ``flat_storage.py``, ``storage_facts.py``, ``bound_programs.py``: where state lies, and who holds views of it
- ``background_reads.py``, ``commit.py``, ``recover.py``: readers of live state, the first write of a call, repair
"""
