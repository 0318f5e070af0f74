"""The source line and the placement of each node, stage by stage: a file of a dump beside its texts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..ir.program import Program

Details = tuple[str, str]  # a source line and a placement, each may be empty


@dataclass
class NodeDetails:
    """Collects the details of each stage's nodes; a stage keeps those that the stage before did not have."""

    stages: dict[str, dict[str, Details]] = field(default_factory=dict)
    _last: dict[str, Details] = field(default_factory=dict)

    def note(self, stage: str, program: Program) -> None:
        """The nodes of the program after a stage."""
        found = {node.name: _details(node.meta) for node in program.graph.nodes}
        self.stages[stage] = {name: each for name, each in found.items() if self._last.get(name) != each}
        self._last = found

    def to_text(self) -> str:
        """Convert to JSON. Lines and placements are written once: nodes have their numbers."""
        tables: tuple[dict[str, int], dict[str, int]] = {"": 0}, {"": 0}
        stages = {
            stage: {
                name: [table.setdefault(text, len(table)) for table, text in zip(tables, each, strict=True)]
                for name, each in details.items()
            }
            for stage, details in self.stages.items()
        }
        return json.dumps({"lines": list(tables[0]), "placements": list(tables[1]), "stages": stages})


def read_details(text: str, stages: list[str]) -> Iterator[Mapping[str, Details]]:
    """For each of these stages, the details by the name of the node; for text that is empty, none."""
    given = json.loads(text) if text else {"stages": {}}
    found: dict[str, Details] = {}
    for stage in stages:
        for name, (line, placement) in given["stages"].get(stage, {}).items():
            found[name] = given["lines"][line], given["placements"][placement]
        yield found


def _details(meta: Mapping[str, Any]) -> Details:
    return str(meta.get("source") or ""), ", ".join(map(repr, meta.get("placement") or ()))
