"""Split sequences: arguments that ranks pass whole, and of which the program of each rank goes on with a part."""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import Any, get_args

from torch.distributed.tensor import Shard

from passes import AxisRole, Program, Role
from passes.errors import did_you_mean
from passes.ir.program import Placements, replicated

from ..placements import Mirrored
from ..ranks.axis_roles import Roles, axes_having
from ..rules.attention import Form, splits_causal_rows

SEQUENCE_DIM = 1


def check_attention(given: Any, roles: Roles | None) -> Form | None:
    """Raise ``ValueError`` for another form of attention, or where no axis splits sequences; returns it."""
    if given is not None and given not in get_args(Form):
        hint = did_you_mean(given, get_args(Form))
        raise ValueError(f'expected attention to be "gather", "ring", "heads" or None, got {given!r}{hint}')
    if given is not None and not (roles and axes_having(AxisRole.SEQUENCE, roles)):
        raise ValueError(
            f'expected no attention="{given}" without an axis that splits sequences: give one the role, as '
            'axes={"sequence": "cp"} does'
        )
    return given  # type: ignore[no-any-return]


def sequence_cuts(program: Program, named: Collection[str] | None, balance: bool) -> dict[str, Placements]:
    """The placement with which the program goes on, by argument: split along the sequence, too.

    Not of arguments that are ``named``, nor where the dim is shorter than there are ranks: those stay as they are
    passed, and every rank computes with them as a whole. ``balance``: each rank has an early and a late part, if some
    attention is causal and one axis cuts the dim into equal pieces.
    """
    axes = [k for k in program.mesh.axes_with(AxisRole.SEQUENCE) if program.mesh.axes[k].size > 1]
    ranks = prod(program.mesh.axes[k].size for k in axes)
    balance = balance and any(splits_causal_rows(n.target, n.args, n.kwargs) for n in program.graph.nodes)
    arguments = [i for i in program.inputs if i.role in (Role.BATCH, Role.ARGUMENT)] if axes else []
    found = {}
    for each in arguments:
        is_named = any(f"{each.name}.".startswith(f"{name}.") for name in named or ())
        if not is_named and len(each.shape) > SEQUENCE_DIM and each.shape[SEQUENCE_DIM] >= ranks:
            whole = each.placement or replicated(program.mesh)
            mirrors = balance and len(axes) == 1 and each.shape[SEQUENCE_DIM] % (2 * ranks) == 0
            split = Mirrored(SEQUENCE_DIM, 1) if mirrors else Shard(SEQUENCE_DIM)
            found[each.name] = tuple(split if k in axes else p for k, p in enumerate(whole))
    return found
