"""Update state last, so that a call that fails before leaves it whole."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from ..analysis.reachability import ancestors, descendants
from ..analysis.topological import arrange, positions
from ..base import Pass
from ..communication.wait_late import WaitLate
from ..ir.collectives import is_wait
from ..ir.ops import Trait, has
from ..ir.program import OutputKind, Program
from ..ir.roles import Phase


@dataclass(frozen=True)
class UpdateLast(Pass):
    """The nodes that compute new state move behind all waits that do not need them.

    So every gradient has come from every rank before anything is written. A new value that the step itself reads again,
    such as a gathered parameter, moves along with its readers. Without collectives there is nothing to wait for, and
    only what forward and backward write, such as running statistics, moves behind what they compute: no state is
    written before the update. Accumulators, which are empty when a call begins, grow where they do. Memory: gradients
    live until the last one has come. The new order depends on the graph alone.
    """

    after: ClassVar[tuple[type[Pass], ...]] = (WaitLate,)

    def rewrite(self, program: Program) -> int:
        """Put the late nodes behind the others; returns how many moved."""
        late = late_nodes(program) or _written_early(program)
        before = positions(program.graph, late)
        nodes = list(program.graph.nodes)
        arrange(program.graph, [*(n for n in nodes if n not in late), *(n for n in nodes if n in late)])
        after = positions(program.graph, late)
        return sum(before[node] != after[node] for node in late)


def late_nodes(program: Program) -> set[fx.Node]:
    """The nodes that compute new state, all that read them, and the end of the graph; none without collectives."""
    if not any(program.collectives()):
        return set()
    fixed = ("placeholder", "get_attr")
    update = {node for node in program.graph.nodes if node.meta.get("phase") is Phase.UPDATE and node.op not in fixed}
    return _with_readers(program, _updating(program), update)


def _written_early(program: Program) -> set[fx.Node]:
    """The nodes that compute new state and are no part of the update, and all that read them."""
    return _with_readers(program, {n for n in _updating(program) if n.meta.get("phase") is not Phase.UPDATE}, set())


def _with_readers(program: Program, updating: set[fx.Node], update: set[fx.Node]) -> set[fx.Node]:
    """``updating`` and ``update`` with all that depends on them, but for what a result or a wait needs."""
    nodes = list(program.graph.nodes)
    written = descendants(nodes, updating)
    results = [value for value, kind in _outputs(program) if kind is not OutputKind.UPDATE]
    first = [node for node in nodes if is_wait(node)] + [value for value in results if isinstance(value, fx.Node)]
    needed = ancestors(node for node in first if node not in written)
    return descendants(nodes, (written | update) - needed)


def _updating(program: Program) -> set[fx.Node]:
    """The nodes that compute a new value of state: those of the update, and others that the step does not read again.

    With them the nodes before, down to the old value: all of them may write to its memory.
    """
    outputs = zip(program.output_values(), program.outputs, strict=True)
    written = [value for value, o in outputs if o.kind is OutputKind.UPDATE and not o.role.is_carried]
    values = [value for value in written if isinstance(value, fx.Node)]
    found = set[fx.Node]()
    for value in values:
        while value.target is operator.getitem or has(value.target, Trait.UNPACKS):
            value = value.all_input_nodes[0]
        if is_wait(value) or value.op == "placeholder":
            continue
        if value.meta.get("phase") is Phase.UPDATE:
            found.add(value)
        elif list(value.users) == [program.output_node]:
            found.update(_from_old_value(value))
    return found


def _from_old_value(new: fx.Node) -> list[fx.Node]:
    """``new`` and the nodes by which it is computed from the old value, if nothing else reads them."""
    chain, source = [new], new.args[0] if new.args else None
    while isinstance(source, fx.Node) and source.op == "call_function" and len(source.users) == 1:
        chain.append(source)
        source = source.args[0] if source.args else None
    return chain if isinstance(source, fx.Node) and source.op == "placeholder" else [new]


def _outputs(program: Program) -> Iterable[tuple[Any, OutputKind]]:
    return [(value, output.kind) for value, output in zip(program.output_values(), program.outputs, strict=True)]
