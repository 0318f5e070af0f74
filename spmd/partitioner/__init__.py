"""Partition: from the global program to one rank's share, with collectives.

One walk over the global graph. Each global value has nodes of this rank's graph that hold it, by placement. For each op
the walk chooses the combination of placements that costs least, and materializes the operands in them. What keeps a
data-parallel step local is given, not searched for: the parameters to gather and when, hints for the placements of
results, the node that is a gradient's complete value. None of that can change a value, only its cost: rules and
redistributions alone decide what is right.

The files, in the order in which an op comes to them:

- ``plan.py``, ``context.py``: the decisions of the mode; all that program and plan say before the walk
- ``walk.py``: the order of everything: inputs, ops, outputs
- ``values.py``, ``parameters.py``: global values and the nodes that hold them; the nodes that are parameters
- ``hints.py``: the placement that a result should have, where that is known
- ``choose.py``, ``narrow.py``: the option that costs least, axis by axis; a call as the next axis sees it
- ``option_costs.py``, ``lookahead.py``: the cost of an option in the op itself, and in the ops that follow
- ``materialize.py``, ``local_op.py``: values in the placements that an op reads; the op on this rank's parts
- ``steps.py``, ``redistribute.py``, ``reasons.py``: the steps from one placement to another and their costs; the nodes
  of a step; its purpose, as reports and dumps state it
- ``emit.py``: this rank's graph, node by node
- ``operand_layouts.py``: operands that kernels read in one layout, and that are copied if they lie otherwise
- ``pending_sums.py``, ``recut_rows.py``: complete sums are reduced; rows cut from the batch are split again
- ``gather_updated.py``: a parameter is gathered after every rank has updated a part of it
- ``offload.py``: state in host memory, with copies between host and device
- ``diagnostics.py``: notes for users about all that
"""

from .walk import partition

__all__ = ["partition"]
