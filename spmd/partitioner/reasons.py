"""The texts of the report's "why" column and of the comments in dumps: ``gradient: sum over dp``.

In come nodes and values of the global program; out goes the ``Reason`` that a redistribution writes into its
collectives. Each text names the value, then how it is moved, then its use.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes import Output, Phase, Role
from passes.ir.schemas import name_of

from .._torch import OpOverload
from .context import Context
from .redistribute import Reason

aten = torch.ops.aten
AFTER_A_CUT = Reason(Role.BATCH, "after a cut")
_COPIES = (aten.detach.default, aten.alias.default, aten.view.default, aten.clone.default, aten._to_copy.default)


def for_operand(value: fx.Node, user: fx.Node, context: Context) -> Reason:
    """The reason to move ``value`` to where ``user`` needs it."""
    name = _known(value, context)
    use = "" if name else for_op(user)
    return Reason(value=name or _role(value, context), use=use, reader=user)


def for_op(node: fx.Node) -> str:
    """The use of what ``node`` reads: ``for mm at model.up``."""
    return f"for {op_name(node)}{_at(node)}"


def for_constraint(value: fx.Node, node: fx.Node, context: Context) -> Reason:
    """The reason to move ``value`` to where a ``spmd.constrain`` puts it."""
    return Reason(value=_role(value, context), use=f"for spmd.constrain{_at(node)}")


def for_branches(value: fx.Node, context: Context) -> Reason:
    """The reason to reduce a sum from which several values are computed."""
    return Reason(value=_role(value, context), use=f"for several uses{_at(value)}")


def for_output(value: fx.Node, output: Output, context: Context) -> Reason:
    """The reason to move ``value`` to where an output of the program lives."""
    unknown = output.name if output.role is Role.RESULT else str(output.role)
    return Reason(output.role, of=(output.name,), value=_known(value, context) or unknown)


def _role(node: fx.Node, context: Context) -> str:
    """The kind of value that a node holds."""
    if node in context.inputs:
        return str(context.inputs[node].role)
    return "update" if node.meta.get("phase") is Phase.UPDATE else str(Role.ACTIVATION)


def _known(node: fx.Node, context: Context) -> str:
    """The name that users know a value by, if it has one."""
    while node.target in _COPIES:
        node = node.all_input_nodes[0]
    if _is_label_count(node):
        return "label count"
    return "loss" if _is_loss(node, context) else ""


def _is_loss(node: fx.Node, context: Context) -> bool:
    """Whether backward starts at ``node``, or at something made of this one number."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.ndim or not val.is_floating_point():
        return False
    origin = node.meta.get("origin")
    starts_backward = any(user.target is aten.ones_like.default for user in node.users)
    return starts_backward or (origin is not None and origin.number in context.differentiated)


def _is_label_count(node: fx.Node) -> bool:
    """Whether ``node`` counts the labels other than a loss' ``ignore_index``."""
    if node.target is not aten.sum.default:
        return False
    (counted,) = node.all_input_nodes
    return counted.target is aten.ne.Scalar and not counted.all_input_nodes[0].meta["val"].is_floating_point()


def op_name(node: fx.Node) -> str:
    """``mm`` for ``aten.mm.default``, ``backward of gelu`` for its gradient; ops of others keep their namespace."""
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return getattr(target, "__name__", str(target))
    name = name_of(target) if target.namespace == "aten" else f"{target.namespace}.{name_of(target)}"
    return f"backward of {name.removesuffix('_backward')}" if name.endswith("_backward") else name


def _at(node: fx.Node) -> str:
    """The module that a node belongs to, nothing for those outside of all modules."""
    module = node.meta.get("module")
    return f" at {module}" if module else ""
