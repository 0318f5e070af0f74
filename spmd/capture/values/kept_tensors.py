"""Tensors that the user keeps of split state, in lists, dicts, attributes and closures: DTensors, placed as that is.

``p.detach().clone()`` of a split parameter, say. The first op of a step that reads one stops the trace: the next one
takes all that lie at the sites that were read for inputs (``../../python_state/effects/carried.py``), which each call
reads anew.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch.distributed.tensor import DTensor

from ..._torch import tree_flatten
from ...python_state.effects.carried import is_kept_split
from ...python_state.reads import Reads, ReadSite
from ..unsupported import FROM_OUTSIDE, Refused

_PUT = ("item", "attribute", "cell", "entry")  # kinds of sites where a fake can be put


def carry_kept(reads: Reads, operands: Any) -> NoReturn:
    """Let DTensors at the sites that the step has read be inputs in another trace.

    Raises ``Refused`` where none can be: ``operands`` are those of the op that reads one.
    """
    sites = [site for site in reads.sites.values() if site.kind in _PUT and _holds_kept(site)]
    if sites:
        reads.journals.carry(sites)  # raises
    found = next(each for each in tree_flatten(operands)[0] if isinstance(each, DTensor))
    name = reads.name_of(found)
    if not name:
        raise Refused(FROM_OUTSIDE)
    if id(found) in reads.stand_ins:
        raise Refused(
            f"it reads a parameter or other state through {name}, from a tuple or a set, in which nothing can stand "
            "for it. Keep it in a list or dict, or take it from its module."
        )
    raise Refused(
        f"it computes with a tensor of shape {list(found.shape)} in {name} that is split over the ranks, and has a "
        "graph or is a parameter that no module has. Keep tensor.detach().clone() there."
    )


def _holds_kept(site: ReadSite) -> bool:
    return any(map(is_kept_split, tree_flatten(site.get())[0]))
