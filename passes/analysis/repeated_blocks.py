"""Find the repeated blocks of a model, by the names and shapes of its parameters alone.

A repeated block is one of several numbered siblings (``model.blocks.0``, ``model.blocks.1``) that have parameters of
equal names and shapes, in more than one leaf module each: the layers of a transformer, not the Linears of a Sequential.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

Shape = tuple[int, ...]
Signature = tuple[tuple[str, Shape], ...]


def blocks_of(shapes: Mapping[str, Shape]) -> dict[str, tuple[str, ...]]:
    """For each parameter, the repeated blocks that it lies in, outermost first. ``shapes``: by a parameter's name."""
    members: dict[str, list[tuple[str, Shape]]] = defaultdict(list)
    for name, shape in shapes.items():
        for module in _numbered(name):
            members[module].append((name[len(module) + 1 :], shape))
    signatures = {module: tuple(inside) for module, inside in members.items() if _leaves(inside) > 1}
    siblings = Counter((_parent(module), signature) for module, signature in signatures.items())
    repeated = {module for module, signature in signatures.items() if siblings[_parent(module), signature] > 1}
    return {name: tuple(module for module in _numbered(name) if module in repeated) for name in shapes}


def _numbered(name: str) -> Iterator[str]:
    """The modules that ``name`` lies in and whose own names are numbers, outermost first."""
    parts = name.split(".")
    for k in range(1, len(parts)):
        if parts[k - 1].isdigit():
            yield ".".join(parts[:k])


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def _leaves(inside: list[tuple[str, Shape]]) -> int:
    """The number of modules that hold these parameters themselves."""
    return len({_parent(name) for name, _ in inside})
