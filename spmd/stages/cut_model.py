"""The stage of each module: from names, from where state is kept already, or balanced by estimated seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import fx

from passes import PartitionError, Phase, Program, Role
from passes.analysis.collective_algorithms import BUILT_IN
from passes.analysis.repeated_blocks import blocks_of
from passes.schedule.node_costs import NodeCosts, device_of
from passes.schedule.rates import rates_of

StageOf = Callable[[fx.Node], int]


def stages_by_name(program: Program, starts: Sequence[str]) -> StageOf:
    """The stage of a node of forward, by that of its module: the last one that had begun when that first ran.

    ``starts``: the module that begins each stage but the first. Raises ``PartitionError`` for modules that do not run,
    or not in this order.
    """
    found: dict[str, int] = {}
    for module in _in_order(program):
        stage = max(found.values(), default=0)
        found[module] = stage + (stage < len(starts) and _is_within(module, starts[stage]))
    reached = max(found.values(), default=0)
    if reached < len(starts):
        raise PartitionError(
            f"expected stages to name modules in the order in which they run, but {starts[reached]!r} does not run "
            f"behind those before it; what runs is {', '.join(filter(None, found))}"
        )
    return _of_module(found)


def stages_by_state(program: Program, kept: Mapping[str, frozenset[int]], count: int, ranks: int) -> StageOf:
    """The stage of a node of forward: the first one, from that of the module before on, whose rank keeps its state.

    ``kept``: the ranks along the axis that keep state, by name; stage s runs on rank ``s % ranks``.
    """
    homes, found, stage = _homes(kept), dict[str, int](), 0
    for module in _in_order(program):
        here = homes.get(module, frozenset())
        stage = next((each for each in range(stage, count) if each % ranks in here), stage)
        found[module] = stage
    return _of_module(found)


def fits_state(program: Program, stage_of: StageOf, kept: Mapping[str, frozenset[int]], ranks: int) -> bool:
    """Whether modules run where their state is kept already."""
    homes = _homes(kept)
    nodes = [node for node in program.graph.nodes if node.meta.get("phase") is Phase.FORWARD]
    own = [(node, homes[node.meta["module"]]) for node in nodes if node.meta.get("module") in homes]
    return all(stage_of(node) % ranks in here for node, here in own)


def _homes(kept: Mapping[str, frozenset[int]]) -> dict[str, frozenset[int]]:
    """The ranks that keep all of a module's own state."""
    found: dict[str, frozenset[int]] = {}
    for name, homes in kept.items():
        module = name.rpartition(".")[0]
        found[module] = found.get(module, homes) & homes
    return found


def balanced_starts(program: Program, count: int) -> list[str]:
    """The modules that begin stages 1 to ``count - 1``, so that the slowest stage takes the least estimated seconds.

    ``program``: the captured one, which is equal on all ranks. Stages begin at repeated blocks, or at modules outside
    of these. Raises ``PartitionError`` if there are fewer than stages.
    """
    seconds = _seconds(program)
    if len(seconds) < count:
        raise PartitionError(
            f"expected a model with at least {count} modules or repeated blocks, one for each stage of a pipeline, "
            f"found {', '.join(seconds) or 'none'}: take fewer stages"
        )
    ends = _cut(list(seconds.values()), count)
    return [list(seconds)[end] for end in ends[:-1]]


def _seconds(program: Program) -> dict[str, float]:
    """For each repeated block, or module outside of these, in the order in which they run, its forward and backward.

    What belongs to none of them counts for the one that has begun last.
    """
    blocks = blocks_of({each.name: each.shape for each in program.inputs if each.role is Role.PARAMETER})
    outermost = {inside[0] for inside in blocks.values() if inside}
    rates = rates_of(BUILT_IN, device_of(program), program.mesh)
    costs = NodeCosts(program, rates) if rates else None
    found, last = dict[str, float](), ""
    for node in program.graph.nodes:
        if node.meta.get("phase") not in (Phase.FORWARD, Phase.BACKWARD) or node.op != "call_function":
            continue
        module = node.meta.get("module") or ""
        unit = next((each for each in outermost if f"{module}.".startswith(f"{each}.")), module)
        if node.meta["phase"] is Phase.FORWARD and "." in unit:
            last = unit
            found.setdefault(unit, 0.0)
        cost = costs.of(node) if costs else None
        if last:
            found[unit if unit in found else last] += cost.launch + cost.compute if cost else 1.0
    return found


def _cut(seconds: Sequence[float], count: int) -> list[int]:
    """The ends of ``count`` runs of at least one each: the least maximum of their sums, then of the sums' squares."""
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}  # by the end of the runs so far
    for k in range(count):
        longer: dict[int, tuple[float, float, list[int]]] = {}
        for end in range(k + 1, len(seconds) + 1):
            options = []
            for start, (most, squares, ends) in best.items():
                if start < end:
                    run = sum(seconds[start:end])
                    options.append((max(most, run), squares + run * run, [*ends, end]))
            longer[end] = min(options)
        best = longer
    return best[len(seconds)][2]


def _in_order(program: Program) -> dict[str, None]:
    """The modules of forward in the order in which they first run."""
    nodes = (node for node in program.graph.nodes if node.meta.get("phase") is Phase.FORWARD)
    return dict.fromkeys(node.meta.get("module") or "" for node in nodes)


def _of_module(found: Mapping[str, int]) -> StageOf:
    return lambda node: found.get(node.meta.get("module") or "", 0)


def _is_within(module: str, start: str) -> bool:
    """Whether a module is ``start`` or lies in it; ``start`` may leave out the name of the argument."""
    behind = module.partition(".")[2]
    return any(f"{path}.".startswith(f"{start}.") for path in (module, behind))
