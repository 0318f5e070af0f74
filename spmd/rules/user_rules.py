"""Rules of users: ``spmd.register_rule``, in the convention of DTensor's ``register_sharding``.

In comes a function of the op's own arguments that returns pairs of placements; out goes a rule in the table. The pairs
are checked when the rule is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from passes.errors import PlacementError
from passes.ir.ops import Trait, has

from .._torch import OpOverload, OpOverloadPacket
from ..interpreter.source_lines import named_at
from ..unexpected_errors import errors_of
from .base import Info, OpCall, Option, R
from .einsum_labels import infos
from .registry import RULES

Pairs = Sequence[tuple[Sequence[Any], Sequence[Any]]]
Placements = Callable[..., Pairs]

registered: list[OpOverload] = []  # the ops that got rules of users


def register_rule(op: OpOverload | OpOverloadPacket) -> Callable[[Placements], Placements]:
    """Register how ``op`` can run on parts of tensors; of an ``OpOverloadPacket``, all overloads.

    The function is called with the op's arguments, each tensor replaced by an object with ``shape``, ``ndim`` and
    ``dtype`` (global ones), and returns a sequence of ``(outputs, inputs)`` for one mesh axis: ``outputs`` has one
    placement per output, ``inputs`` one entry per argument of the call, positional then keyword, None where there is
    no tensor; an argument that is a list of tensors has a list of placements, or one for all. Each pair claims: run the
    op on every rank's local inputs, and the local outputs are the global ones under these placements. "All replicated"
    always holds and need not be given. Splits that are not even along the axis are left out. The rule replaces any
    that the op had::

        @spmd.register_rule(torch.ops.mylib.scale_rows.default)
        def scale_rows(x, scale):
            return [([Shard(0)], [Shard(0), Shard(0)]), ([Shard(1)], [Shard(1), Replicate()])]

    Raises ``TypeError`` if ``op`` is no op or is given a rule that is no function, ``ValueError`` if it writes to its
    inputs; ``PlacementError`` when the rule is used, if what it returns does not fit the call, and from what it raises.
    """
    ops = _overloads(op)

    def register(function: Placements) -> Placements:
        if not callable(function):
            raise TypeError(f"expected a function of the arguments of {op}, got {function!r}")
        for one in ops:
            RULES[one] = _rule(function)
            registered.append(one)
        return function

    return register


def _overloads(op: Any) -> list[OpOverload]:
    if isinstance(op, OpOverload):
        ops = [op]
    elif isinstance(op, OpOverloadPacket):
        ops = [getattr(op, name) for name in op.overloads()]
    else:
        raise TypeError(
            f"expected an op (torch.ops.mylib.f, or one overload of it, torch.ops.mylib.f.default), got {op!r}; "
            "register_rule takes the op and returns a decorator: @register_rule(op)"
        )
    functional = [one for one in ops if not has(one, Trait.MUTABLE)]
    if not functional:
        raise ValueError(
            f"{op} writes to its inputs: register a rule for its functional form, which graphs have instead"
        )
    return functional


def _rule(function: Placements) -> Callable[[OpCall], list[Option]]:
    """A rule that calls ``function``, and has its name and docstring."""

    @wraps(function)
    def rule(call: OpCall) -> list[Option]:
        with errors_of(PlacementError, f"{_title(call)}, {named_at(function)},"):
            pairs = function(*call.args, **call.kwargs)
            if not isinstance(pairs, list | tuple):
                raise PlacementError(f"{_title(call)}: expected a sequence of (outputs, inputs), got {pairs!r}")
            found = [_option(call, pair) for pair in pairs]
        return [option for option in found if _splits(option) and _even(call, option)]

    return rule


def _option(call: OpCall, pair: Any) -> Option:
    if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(p, list | tuple) for p in pair):
        raise PlacementError(f"{_title(call)}: expected a pair of lists (outputs, inputs), got {pair!r}")
    outputs, inputs = pair
    arguments = [*call.args, *call.kwargs.values()]
    if len(outputs) != len(call.results):
        raise PlacementError(
            f"{_title(call)}: expected {len(call.results)} output placements, one per output, got {len(outputs)}: "
            f"{outputs!r}"
        )
    if len(inputs) != len(arguments):
        raise PlacementError(
            f"{_title(call)}: expected {len(arguments)} input placements, one per argument (positional, then keyword; "
            f"None where there is no tensor), got {len(inputs)}: {inputs!r}"
        )
    operands = tuple(p for value, entry in zip(arguments, inputs, strict=True) for p in _of(call, value, entry))
    results = tuple(
        None if info is None else _checked(call, info, entry) for info, entry in zip(call.results, outputs, strict=True)
    )
    return Option(operands, results)


def _of(call: OpCall, value: Any, entry: Any) -> Iterator[Placement]:
    """The placements of the tensors in one argument."""
    if not isinstance(entry, list | tuple):
        yield from (_checked(call, info, entry) for info in infos(value))
        return
    if not isinstance(value, list | tuple) or len(entry) != len(value):
        raise PlacementError(f"{_title(call)}: expected one placement per tensor of {value!r}, got {entry!r}")
    for item, one in zip(value, entry, strict=True):
        yield from _of(call, item, one)


def _checked(call: OpCall, info: Info, entry: Any) -> Placement:
    """``entry`` if it is a placement that ``info`` can have, with its dim counted from the front."""
    if not isinstance(entry, Shard | Replicate | Partial):
        raise PlacementError(f"{_title(call)}: expected Shard, Replicate or Partial for {info}, got {entry!r}")
    if not isinstance(entry, Shard):
        return entry
    if not -info.ndim <= entry.dim < info.ndim:
        raise PlacementError(f"{_title(call)}: {info} has {info.ndim} dims, so it cannot be split along {entry.dim}")
    return Shard(entry.dim % info.ndim)


def _splits(option: Option) -> bool:
    """Whether the option is any other than "all replicated"."""
    return any(p not in (R, None) for p in (*option.operands, *option.results))


def _even(call: OpCall, option: Option) -> bool:
    """Whether every split is even: in this convention no rank has a short or empty part."""
    pairs = [*zip(call.operands, option.operands, strict=True), *zip(call.results, option.results, strict=True)]
    return all(call.even(info.shape[p.dim]) for info, p in pairs if isinstance(p, Shard) and info is not None)


def _title(call: OpCall) -> str:
    return f"the rule registered for {call.target}"
