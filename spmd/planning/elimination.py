"""The least sum of costs over choices that are not independent: exact, by eliminating one choice after the other.

A choice is eliminated by adding up all costs that it takes part in and keeping the least for each combination of the
other choices in them (Bertelè and Brioschi 1972). Next comes the one whose sum has the fewest entries, so that chains
and ladders, as a model's blocks are, take little.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

Choice = TypeVar("Choice", bound=Hashable)

_MOST = 1 << 22  # entries of a table: more would take seconds


def least(alone: Mapping[Choice, Any], pairs: Mapping[tuple[Choice, Choice], Any]) -> dict[Choice, int] | None:
    """The position of each choice such that all costs together are least; None where a table would grow too large.

    ``alone``: for each choice the costs of its positions; ``pairs``: for two choices those of both, a row for each
    position of the first. Of equal sums it is the one with the earlier positions, in the order of elimination.
    """
    sizes = {name: len(costs) for name, costs in alone.items()}
    holds: dict[Choice, list[tuple[tuple[Choice, ...], Tensor]]] = {name: [] for name in alone}
    for names, costs in (*(((name,), costs) for name, costs in alone.items()), *pairs.items()):
        for each in names:
            holds[each].append((names, torch.as_tensor(costs, dtype=torch.float64)))
    near = {name: _names(own) for name, own in holds.items()}
    eliminated = []
    while holds:
        name = min(holds, key=lambda name: prod(sizes[each] for each in near[name]))
        own, others = holds.pop(name), tuple(each for each in near[name] if each != name)
        if prod(sizes[each] for each in near[name]) > _MOST:
            return None
        table = torch.stack(torch.broadcast_tensors(*(_spread(costs, of, (*others, name)) for of, costs in own))).sum(0)
        eliminated.append((name, others, table.argmin(-1)))
        left = others, table.amin(-1)
        for each in others:
            holds[each] = [*(held for held in holds[each] if name not in held[0]), left]
            near[each] = _names(holds[each])
    found: dict[Choice, int] = {}
    for name, others, best in reversed(eliminated):
        found[name] = int(best[tuple(found[each] for each in others)])
    return found


def _names(factors: Sequence[tuple[tuple[Choice, ...], Tensor]]) -> tuple[Choice, ...]:
    """All choices that some costs depend on."""
    return tuple(dict.fromkeys(each for names, _ in factors for each in names))


def _spread(costs: Tensor, of: tuple[Choice, ...], names: tuple[Choice, ...]) -> Tensor:
    """Costs with a dim for each of ``names``, of which those that they do not depend on have the size 1."""
    kept = [each for each in names if each in of]
    moved = costs.permute([of.index(each) for each in kept])
    sizes = iter(moved.shape)
    return moved.reshape([next(sizes) if each in of else 1 for each in names])
