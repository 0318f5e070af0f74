"""The least sum of costs over choices that are not independent: exact, by eliminating one choice after the other.

A choice is eliminated by adding up all costs that it takes part in and keeping the least for each combination of the
other choices in them (Bertelè and Brioschi 1972). Next comes the one whose sum has the fewest entries, so that chains
and ladders, as a model's blocks are, take little.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
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
    order = list(alone)
    factors: list[tuple[tuple[Choice, ...], Tensor]] = []
    for names, costs in (*(((name,), costs) for name, costs in alone.items()), *pairs.items()):
        factors.append((names, torch.as_tensor(costs, dtype=torch.float64)))
    eliminated = []
    while order:
        near = {name: _union([names for names, _ in factors if name in names]) for name in order}
        name = min(order, key=lambda name: (_size(near[name], alone), order.index(name)))
        if _size(near[name], alone) > _MOST:
            return None
        own = [each for each in factors if name in each[0]]
        names = (*(each for each in near[name] if each != name), name)
        table = torch.stack(torch.broadcast_tensors(*(_spread(costs, of, names) for of, costs in own))).sum(0)
        eliminated.append((name, names[:-1], table.argmin(-1)))
        factors = [each for each in factors if name not in each[0]] + [(names[:-1], table.amin(-1))]
        order.remove(name)
    found: dict[Choice, int] = {}
    for name, others, best in reversed(eliminated):
        found[name] = int(best[tuple(found[each] for each in others)])
    return found


def _union(names: Sequence[tuple[Choice, ...]]) -> tuple[Choice, ...]:
    return tuple(dict.fromkeys(each for of in names for each in of))


def _size(names: tuple[Choice, ...], alone: Mapping[Choice, Any]) -> int:
    size = 1
    for each in names:
        size *= len(alone[each])
    return size


def _spread(costs: Tensor, of: tuple[Choice, ...], names: tuple[Choice, ...]) -> Tensor:
    """Costs with a dim for each of ``names``, of which those that they do not depend on have the size 1."""
    kept = [each for each in names if each in of]
    moved = costs.permute([of.index(each) for each in kept])
    sizes = iter(moved.shape)
    return moved.reshape([next(sizes) if each in of else 1 for each in names])
