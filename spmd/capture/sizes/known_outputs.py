"""Outputs of a captured program that are numbers once sizes are known: no graph need return them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from passes import OutputKind

from ..._torch import tree_map
from ..captured import Captured, FromOutput


def without_known_outputs(captured: Captured) -> Captured:
    """The same step, with plain values in results and in Python state in the place of outputs that are numbers."""
    program = captured.program
    pairs = list(zip(program.outputs, program.output_values(), strict=True))
    if not any(_is_number(value) for _, value in pairs):
        return captured
    moved: list[Any] = []  # what stands for each output that is no update
    for declared, value in pairs:
        if declared.kind is not OutputKind.UPDATE:
            kept = sum(isinstance(each, FromOutput) for each in moved)
            moved.append(value if _is_number(value) else FromOutput(kept))
    kept_pairs = [(declared, value) for declared, value in pairs if not _is_number(value)]
    program.set_outputs([value for _, value in kept_pairs], [declared for declared, _ in kept_pairs])

    def now(leaf: Any) -> Any:
        return moved[leaf.index] if isinstance(leaf, FromOutput) else leaf

    return replace(
        captured,
        result_leaves=list(map(now, captured.result_leaves)),
        new_state=[replace(new, value=tree_map(now, new.value), unless=now(new.unless)) for new in captured.new_state],
        writes=[replace(write, leaves=list(map(now, write.leaves))) for write in captured.writes],
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))
