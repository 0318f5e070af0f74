"""Partition: from the global program to one rank's share, with collectives.

One walk over the global graph. Each global value has ``forms``: the nodes of this rank's graph that hold it, by
placement. For each op the walk takes the combination of placements that moves the fewest bytes, and brings the operands
there. What keeps a data-parallel step local is known, not found out: which parameters are gathered and when, where
results are wanted, which node is the whole of a gradient. None of that can change a value, only what it costs: rules
and redistributions alone decide what is right.

The files, in the order in which an op comes to them:

- ``context.py``: what is known before the walk, from program and plan
- ``walk.py``: the order of everything: inputs, ops, outputs
- ``values.py``, ``parameters.py``: what is known of a global value meanwhile; which nodes are parameters
- ``hints.py``: where a result is wanted, if that is known
- ``choose.py``, ``lookahead.py``: which placements cost least, now and later
- ``materialize.py``, ``local_op.py``: values brought to where they are wanted, and ops computed on this rank's parts
- ``reasons.py``: the texts that say what each collective is for
- ``redistribute.py``: how a value comes from one placement to another, and what that costs
- ``emit.py``, ``memo.py``: the nodes, written; calls that were there before are known
- ``pending_sums.py``, ``recut_rows.py``: sums that are complete are added up; rows cut from the batch are shared out
  again
- ``gather_updated.py``: a parameter that every rank updates a part of is gathered
- ``diagnostics.py``: what the user is told of all that
"""

from .walk import partition

__all__ = ["partition"]
