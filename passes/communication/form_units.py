"""Group parameters into units that are communicated, stored and updated together."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..analysis.agreed_sizes import most_bytes
from ..analysis.repeated_blocks import blocks_of
from ..base import Pass
from ..ir.collectives import Kind
from ..ir.program import Input, OutputKind, Program, is_even
from ..ir.roles import Role
from .bucket_sizes import FIRST_BYTES, MAX_BYTES, limits, worth

_EXPOSED = 4  # units of ``first_bytes`` that are communicated while there is little else to do


@dataclass(frozen=True)
class FormUnits(Pass):
    """Adds to ``program.units`` the parameters that are in none: groups of them that become one bucket each.

    The pass visits parameters from the last registered to the first, in the order in which their gradients are
    computed: first those that the step trains, then the others that it communicates. A unit closes once its
    communication reaches ``max_bytes``, the first one at ``first_bytes``, so that it can start early; and where a
    repeated block begins or ends, once it has ``first_bytes``. Of a block that reaches ``max_bytes``, a rest of less
    than half as much joins the unit before it. The last ones visited, some four times ``first_bytes``, are in units of
    ``first_bytes``, too, where they are gathered or reduced by messages: forward begins with them and backward ends, so
    nothing hides them. Where parameters are gathered again (``program.reshard``), memory counts: the first unit is not
    small, and the last ones are only if ranks send messages; all others end at blocks and at ``max_bytes`` alone.
    Parameters of one unit agree in dtype, device, memory, module argument, in whether ranks have equal parts, in
    whether they are gathered again, then in whether they lie in a block, and in the kinds, axes and roles of their
    collectives; within it they are in the order of registration. Sizes are bytes, equal on all ranks.

    Both limits are at least what the rate of the axes makes worth while (``bucket_sizes.limits``).
    """

    max_bytes: int = MAX_BYTES
    first_bytes: int = FIRST_BYTES

    def rewrite(self, program: Program) -> int:
        """Visit the parameters once; the graph stays as it is. Returns the number of new units."""
        planned = {name for unit in program.units for name in unit}
        described = [each for each in _described(program) if each[0].name not in planned]
        parameters = [_Parameter.of(*each, program) for each in described]
        trained = _trained(program)
        groups = [[p for p in parameters if p.name in trained]]
        groups += [[p for p in parameters if p.name not in trained and p.served]]
        formed = [unit for group in groups for unit in self._units(group[::-1], not program.reshard)]
        program.units += tuple(formed)
        return len(formed)

    def _units(self, parameters: Sequence[_Parameter], early: bool) -> list[tuple[str, ...]]:
        """The units of these parameters, given in reverse order of registration; in the order in which they close.

        ``early``: the first one is small.
        """
        closed: list[tuple[str, ...]] = []
        unfinished: dict[Hashable, list[_Parameter]] = {}
        left = sum(parameter.size for parameter in parameters)
        left_in_block = Counter[Hashable]()
        for parameter in parameters:
            left_in_block[parameter.key, parameter.blocks] += parameter.size
        for parameter in parameters:
            unit = unfinished.setdefault(parameter.key, [])
            small = (early and not closed) or self._is_exposed(parameter, left)
            if unit and self._ends(unit, parameter, small, left_in_block[parameter.key, parameter.blocks]):
                closed.append(_names(unit))
                unit.clear()
            unit.append(parameter)
            left -= parameter.size
            left_in_block[parameter.key, parameter.blocks] -= parameter.size
        return closed + [_names(unit) for unit in unfinished.values()]

    def _is_exposed(self, parameter: _Parameter, left: int) -> bool:
        """Whether so little is ``left`` that nothing hides the next gathers, or reductions by messages."""
        first, _ = limits(self.first_bytes, self.max_bytes, parameter.worth)
        gathered = not parameter.reshard and any(kind is Kind.ALL_GATHER for kind, _, _ in parameter.served)
        return left <= _EXPOSED * first and (gathered or parameter.is_sent)

    def _ends(self, unit: list[_Parameter], following: _Parameter, small: bool, left_in_block: int) -> bool:
        """Whether ``unit`` closes before ``following``, in whose block ``left_in_block`` bytes are left."""
        size = sum(parameter.size for parameter in unit)
        first, most = limits(self.first_bytes, self.max_bytes, following.worth)
        if small or unit[-1].blocks != following.blocks:
            return size >= min(first, most)
        return size >= most and (not following.blocks or 2 * left_in_block >= most)


@dataclass(frozen=True)
class _Parameter:
    """A parameter as the pass sees it.

    ``served``: the kind, axis and role of each collective for it; ``worth``: the bytes that are sent in the latency of
    the slowest to begin, 0 where that was not measured. ``is_sent``: whether messages do that, past the thread that
    computes.
    """

    name: str
    size: int
    blocks: tuple[str, ...]
    served: frozenset[tuple[Kind, str, Role]]
    reshard: bool
    kept_by: int | None
    worth: int
    is_sent: bool
    kind: Hashable

    @classmethod
    def of(
        cls,
        declared: Input,
        val: torch.Tensor,
        collectives: Sequence[fx.Node],
        blocks: tuple[str, ...],
        program: Program,
    ) -> _Parameter:
        described = [node.meta["collective"] for node in collectives]
        whole = math.prod(declared.shape) * val.element_size()
        size = max(map(most_bytes, collectives), default=whole)
        served = frozenset((each.kind, each.axis, each.role) for each in described)
        even = is_even(declared.shape, declared.placement, program.mesh)
        return cls(
            declared.name,
            size,
            blocks,
            served,
            declared.name in program.reshard,
            program.kept_by.get(declared.name),
            max((worth(program.mesh, each.axis) for each in described), default=0),
            any(axis.name == each.axis and not axis.shared for each in described for axis in program.mesh.axes),
            (declared.dtype, val.device, declared.memory, declared.name.rpartition(".")[0].partition(".")[0], even),
        )

    @property
    def key(self) -> Hashable:
        """Parameters with equal keys can be in one unit."""
        return self.kind, self.served, self.reshard, self.kept_by, self.reshard and bool(self.blocks)


def _described(program: Program) -> Iterator[tuple[Input, torch.Tensor, list[fx.Node], tuple[str, ...]]]:
    """Each parameter with its local value, the collectives that serve it, and the repeated blocks that it lies in."""
    serving: dict[str, list[fx.Node]] = defaultdict(list)
    for node in program.collectives():
        for name in node.meta["collective"].of:
            serving[name].append(node)
    blocks = blocks_of({i.name: i.shape for i in program.inputs if i.role is Role.PARAMETER})
    for declared, node in zip(program.inputs, program.placeholders, strict=True):
        if declared.role is Role.PARAMETER:
            yield declared, node.meta["val"], serving[declared.name], blocks[declared.name]


def _trained(program: Program) -> set[str]:
    """The parameters that the step updates, or computes gradients of."""
    updated = {output.name for output in program.outputs if output.kind is OutputKind.UPDATE}
    described = [node.meta["collective"] for node in program.collectives()]
    return updated.union(*(each.of for each in described if each.role is Role.GRADIENT))


def _names(unit: list[_Parameter]) -> tuple[str, ...]:
    return tuple(parameter.name for parameter in reversed(unit))
