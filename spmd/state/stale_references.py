"""End stale references: what refers to parameters that a step has replaced by their parts refers to these from then on.

Splitting a model puts new Parameters in the place of the user's. Modules and optimizers of the call are rebound when
that happens. Here all else is that refers to the old ones, whether the step knows of it or not: other optimizers, lists
of parameters, attributes, closures, modules that share one. So a parameter stays one parameter, under all its names.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import torch
from torch import nn

from .._torch import PARAMETERS, renew_notes
from ..call.state import newest
from .eager_calls import refuse_eager_calls
from .references import replace_everywhere
from .replaced_parameter import let_successor_answer


def end_stale_references(replaced: Sequence[weakref.ref[torch.Tensor]]) -> None:
    """Let all that refers to replaced parameters refer to those in their place.

    A variable of a running function cannot be written: where one still has an old parameter, that passes on all that it
    is asked. A graph of autograd is used up soon, and keeps what it has.
    """
    if all(reference() is None for reference in replaced):
        return
    gc.unfreeze()  # the collector finds who refers to them, but not in what the user has frozen
    gc.collect()  # what traced the step refers to them in cycles
    old = [tensor for reference in replaced if (tensor := reference()) is not None]
    if not old:
        return
    new = [newest(each) for each in old]
    replace_everywhere(old, new)
    _note_in_modules(set(map(id, new)))
    for each in old:
        let_successor_answer(each)


def _note_in_modules(added: set[int]) -> None:
    """Let modules that the call has not know of the parameters that they have now."""
    for each in gc.get_objects():
        if issubclass(type(each), nn.Module) and _has_one(each, added):
            renew_notes(each)
            refuse_eager_calls(each)


def _has_one(module: nn.Module, parameters: set[int]) -> bool:
    return not parameters.isdisjoint(map(id, vars(module).get(PARAMETERS, {}).values()))
