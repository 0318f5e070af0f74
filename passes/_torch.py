"""Every private or experimental torch name that this package uses, with the reason. All were seen in 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# What the entries of ``torch.ops`` are: their schemas say what an op writes and which of its results are views.
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload

# Values without data: the ``val`` of a node, and what infers it for nodes that passes and users add.
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

# From the name that functional collectives have for a process group to the group.
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

# The base of Shard, Replicate and Partial; ``torch.distributed.tensor`` exports the three but not their base.
from torch.distributed.tensor.placement_types import Placement as Placement

# A GraphModule that writes its Python code when somebody asks for it. The public class does so whenever it is made:
# for six modules on the way of a step, of which two are ever asked, that was a twelfth of a compile.
from torch.fx._lazy_graph_module import _LazyGraphModule

LazyGraphModule = _LazyGraphModule

# The functional collectives: private by name, the only ones that make_fx and DTensor emit.
c10d = torch.ops._c10d_functional

# Functions on symbolic numbers, such as ``torch._sym_sqrt``: tracing puts them into graphs, no public list has them.
SYMBOLIC_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    function for name, function in vars(torch).items() if name.startswith(("sym_", "_sym_")) and callable(function)
)


def schema_of(op: OpOverload) -> Any:
    """The schema of ``op``: names and types of arguments and results, what is written, what shares memory."""
    return op._schema


def is_composite(op: OpOverload) -> bool:
    """Whether ``op`` is built from other ops, so that its schema need not say that it may return its argument.

    TorchScript's own ops (``prim::device``) are no ops of the dispatcher.
    """
    known: bool = torch._C._dispatch_has_kernel(op.name())
    return known and bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"))


def register_work(tensor: torch.Tensor, work: Any) -> None:
    """Let ``_c10d_functional.wait_tensor(tensor)`` wait for ``work`` too. Kept by storage, any number for each."""
    torch._C._distributed_c10d._register_work(tensor, work)


def group_named(name: str) -> Any:
    """The process group that functional collectives call by this name."""
    return _resolve_process_group(name)  # type: ignore[arg-type]  # since 2.13 a NewType of str


def has_kernel(op: OpOverload, device: torch.device) -> bool:
    """Whether ``op`` has a kernel of its own on ``device``; what torch generates for the others computes and copies.

    A torch without CUDA knows no kernels of CUDA. There those of the CPU stand for them, so that programs for a GPU are
    planned without one as they are on one, but for ops that have such a kernel on one of the two only.
    """
    key = "CPU" if device.type == "cuda" and not torch.backends.cuda.is_built() else device.type.upper()
    own = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)
    generated = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeExplicitAutograd")
    return bool(own) and not generated
