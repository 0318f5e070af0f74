"""Find ops that have a rule by name: ``aten.mm``, ``mm``, ``torch.ops.aten.mm.default`` and ``*norm*`` all do."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache

import torch

from passes.ir.ops import Trait, has

from ..._torch import OpOverload, OpOverloadPacket
from ..base import Rule
from ..registry import NAMED, RULES, TAGGED, rule_of


def name_of(op: OpOverload) -> str:
    """``aten.mm`` or ``aten.mm.dtype``: as programs print an op, without the overload called default."""
    return str(op.name()).replace("::", ".")


def op_called(name: str) -> OpOverload:
    """The op of a name. Raises ``ValueError``, with the overloads there are, for none."""
    namespace, packet, overload = _parts(name)
    found = getattr(getattr(torch.ops, namespace), packet, None)
    if not isinstance(found, OpOverloadPacket):
        raise ValueError(f"there is no op {name!r}: expected the name of one of torch.ops, such as aten.mm")
    op = getattr(found, overload or "default", None)
    if not isinstance(op, OpOverload):
        there = ", ".join(f"{namespace}.{packet}.{each}" for each in found.overloads())
        raise ValueError(f"there is no op {name!r}, but {there}")
    return op


def is_there(name: str) -> bool:
    """Whether an op of this name exists now: torch's of other versions and those of libraries may not."""
    try:
        op_called(name)
    except ValueError:
        return False
    return True


def ops_like(pattern: str) -> dict[str, Rule]:
    """The ops whose name matches, by name, with ``*`` for any letters; without an overload, all overloads."""
    namespace, packet, overload = _parts(pattern)
    packets = f"{namespace}.{packet}"
    wanted = {"": (packets, f"{packets}.*"), "default": (packets,)}.get(overload, (f"{packets}.{overload}",))
    return {name: rule for name, rule in ruled_ops().items() if any(fnmatchcase(name, each) for each in wanted)}


def _parts(name: str) -> tuple[str, str, str]:
    """Namespace, name and overload, as far as they are given: ``mm`` and ``sum.dim_IntList`` are aten's."""
    parts = name.strip().removeprefix("torch.ops.").replace("::", ".").split(".")
    if len(parts) == 1 and "*" in name:
        parts = ["*", *parts]
    elif len(parts) == 1 or hasattr(torch.ops.aten, parts[0]):
        parts = ["aten", *parts]
    namespace, packet, *overload = parts
    return namespace, packet, ".".join(overload)


def ruled_ops() -> dict[str, Rule]:
    """Every op that has a rule, by name: of the table, in its order, of a tag, and of libraries that may be absent."""
    names = {name_of(op): rule for op, rule in RULES.items()}
    for op in _tagged():
        rule = rule_of(op)
        assert rule is not None, "an op with such a tag has its rule"
        names.setdefault(name_of(op), rule)
    return names | {name.replace("::", "."): rule for name, rule in NAMED.items()}


@cache
def _tagged() -> list[OpOverload]:
    """Every functional aten op with a tag that has a rule."""
    return [op for op in _aten() if TAGGED.keys() & {*op.tags} and not has(op, Trait.MUTABLE)]


def _aten() -> Iterator[OpOverload]:
    packets = (getattr(torch.ops.aten, name, None) for name in dir(torch.ops.aten))
    for packet in packets:
        if isinstance(packet, OpOverloadPacket):
            yield from (getattr(packet, name) for name in packet.overloads())
