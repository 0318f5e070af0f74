"""Local stand-ins for collectives: a program that does all that it did, but sends and waits for nothing.

What a step takes longer with its collectives is exposed communication: time in which no compute hides it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from passes.ir.collectives import is_collective, is_wait, operands
from passes.ir.edit import insert_before
from passes.ir.meta import Relation

_library = torch.library.Library("spmd_benchmark", "DEF")


def with_stand_ins(module: fx.GraphModule) -> fx.GraphModule:
    """``module``, the final graph of a program, with each collective replaced by a copy of its operand."""
    for node in [node for node in module.graph.nodes if is_collective(node)]:
        (operand,), val = operands(node), node.meta["val"]
        given = {"out": node.kwargs["out"]} if "out" in node.kwargs else {"size": list(val.shape)}
        copy = copy_of_own if "out" in given else new_copy_of_own
        local = insert_before(node, copy, operand, like=node, relation=Relation.HELPER, kwargs=given, val=val)
        for wait in [user for user in node.users if is_wait(user)]:
            wait.replace_all_uses_with(local)
            module.graph.erase_node(wait)
        node.replace_all_uses_with(local)
        module.graph.erase_node(node)
    return module


def _copy_of_own(x: Tensor, *, out: Tensor) -> Tensor:
    """Fill ``out`` with what this rank has: its operand, a part of it, or as many copies as there are ranks."""
    given, filled = x.reshape(-1), out.view(-1)
    for part in filled.split(given.numel()) if given.data_ptr() != filled.data_ptr() else ():
        part.copy_(given[: part.numel()])
    return out


def _new_copy_of_own(x: Tensor, *, size: list[int]) -> Tensor:
    return _copy_of_own(x, out=x.new_empty(size))


_library.define("copy_of_own(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
_library.define("new_copy_of_own(Tensor x, *, int[] size) -> Tensor")
for _name, _function in (("copy_of_own", _copy_of_own), ("new_copy_of_own", _new_copy_of_own)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
copy_of_own: Any = torch.ops.spmd_benchmark.copy_of_own.default
new_copy_of_own: Any = torch.ops.spmd_benchmark.new_copy_of_own.default
