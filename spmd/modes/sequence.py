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

SEQUENCE_DIM = 1  # of batches of sequences, rows first


def check_sequence_dim(dim: Any, batch_dim: int, roles: Roles | None, micro_batches: int) -> int:
    """Raise ``TypeError`` or ``ValueError`` for a dim that sequences cannot have; returns it.

    ``batch_dim``: that of rows, which ranks or micro-batches divide, or do not.
    """
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"expected sequence_dim to be an int, got {dim!r}")
    if dim < 0:
        raise ValueError(
            f"expected sequence_dim to count from the front, as arguments may have other numbers of dims, got {dim}"
        )
    if not (roles and axes_having(AxisRole.SEQUENCE, roles)):
        if dim != SEQUENCE_DIM:
            raise ValueError(
                f"expected no sequence_dim={dim} without an axis that splits sequences: give one the role, as "
                'axes={"sequence": "cp"} does'
            )
    elif dim == batch_dim and (axes_having(AxisRole.BATCH, roles) or micro_batches > 1):
        raise ValueError(
            f"expected the dims of rows and of sequences to differ, got input_batch_dim={batch_dim} and "
            f"sequence_dim={dim}: tensors of rows x time have input_batch_dim=0 and sequence_dim=1, and of time x rows "
            "input_batch_dim=1 and sequence_dim=0"
        )
    return dim


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


def sequence_cuts(program: Program, named: Collection[str] | None, dim: int, balance: bool) -> dict[str, Placements]:
    """The placement with which the program goes on, by argument: split along the sequence, its ``dim``, too.

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
        if not is_named and len(each.shape) > dim and each.shape[dim] >= ranks:
            whole = each.placement or replicated(program.mesh)
            mirrors = balance and len(axes) == 1 and each.shape[dim] % (2 * ranks) == 0
            split = Mirrored(dim, 1) if mirrors else Shard(dim)
            found[each.name] = tuple(split if k in axes else p for k, p in enumerate(whole))
    return found
