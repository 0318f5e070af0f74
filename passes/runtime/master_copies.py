"""Master copies: a rank's own part of a parameter, exact, where what all ranks hold of the parameter was rounded.

What all hold is what was sent. A write to the parameter between calls reaches that alone, so an update begins
with ``current``: of each element the master copy, where the whole parameter has what was sent of it, and else what the
parameter has. The bits decide, since torch does not count all writes (``parameter.data.copy_``).
"""

from __future__ import annotations

import torch
from torch import Tensor

NAMESPACE = "spmd_masters"
_library = torch.library.Library(NAMESPACE, "DEF")
_library.define("current(Tensor master, Tensor held, ScalarType wire) -> Tensor")
_library.define("current_(Tensor(a!) master, Tensor held, ScalarType wire) -> Tensor(a!)")


def sent(exact: Tensor, wire: torch.dtype) -> Tensor:
    """The values that all ranks hold of ``exact`` once it was sent in the dtype ``wire``."""
    return exact.to(wire).to(exact.dtype)


def _current(master: Tensor, held: Tensor, wire: torch.dtype) -> Tensor:
    """The values that an update of this part begins with; contiguous, as ``master`` is."""
    return torch.where(held == sent(master, wire), master, held).contiguous()


def _current_in_place(master: Tensor, held: Tensor, wire: torch.dtype) -> Tensor:
    """The same, written to ``master``."""
    return torch.where(held == sent(master, wire), master, held, out=master)


def _like_master(master: Tensor, held: Tensor, wire: torch.dtype) -> Tensor:
    return torch.empty_like(master, memory_format=torch.contiguous_format)


_library.impl("current", _current, "CompositeExplicitAutograd")
_library.impl("current_", _current_in_place, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::current", _like_master, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::current_", lambda master, held, wire: master, lib=_library)
current = getattr(torch.ops, NAMESPACE).current.default
current_ = getattr(torch.ops, NAMESPACE).current_.default
