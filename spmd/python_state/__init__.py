"""Python state of a step: what it reads, which guards compare, and what it writes, which each call repeats.

The model, in ten sentences. A trace takes every Python value for a constant, so a program is right only as long as the
values that the step read are what they were. While the user's function runs, each read is noted as a ``ReadSite``: a
holder, a key, and a name for messages. What the sites hold once the program is ready is what the guards of later calls
must find there, compared in bulk. What the step wrote is found by snapshots that are taken when a thing is first
reached, and is undone when the trace ends, also if it raised. Each call of the program then repeats the writes, with
the values of that call. A number or tensor that is read before it is written is carried: it becomes an input of a
second trace, and an output. What the step writes to and does not read is a log, which a stand-in records. What could
not be repeated is refused at the user's line. Whatever the step made itself is no state. Reads of other threads, of
torch and of Python's own code do not count.

======================================  =====================================================  ======================
state                                   how it is watched                                      file
======================================  =====================================================  ======================
attributes of objects and modules       ``__getattribute__`` of their class, while tracing     ``attribute_reads.py``
globals, closures, names in code        a trace function, when a function starts               ``global_reads.py``
classes, modules, functions             by the names in code that ran                          ``namespaces.py``
lists, dicts, sets, fields of objects   snapshots at the first read, compared at the end       ``snapshots.py``
lists, dicts, deques that are logs      stand-ins that record                                  ``journals.py``
prints, ``logging``                     stand-ins that record                                  ``logging_calls.py``
iterators, files, queues, streams       stand-ins that refuse                                  ``refusing.py``
clocks                                  stand-ins that refuse, in the module ``time``          ``clocks.py``
the number of ranks                     a stand-in in ``torch.distributed`` that returns 1     ``world_size.py``
random generators, arrays, variables    their state, compared at the end                       ``compared_objects.py``
arrays, caches, context, environment    as a whole, for guards                                 ``contents.py``
parameter groups, gradients             entries, compared at the end                           ``effects/groups.py``
======================================  =====================================================  ======================

There is one way to undo: each watch is a context, of the trace (``capture/trace.py``) or of the ``ExitStack`` of
``Reads.watch``; they end in reverse, and then ``Reads`` gives every site and container that has changed its value back.

- ``reads/``: each read of an attribute, global, closure variable or container during the trace, by site
- ``effects/``: each write, undone after the trace; carried as input and output of the program, or repeated by its calls
- ``lines.py``, ``traced.py``: the user's line that names a value; whether an object holds a value of the trace
- ``retries.py``: the end of a trace that would be repeated for ever
"""
