"""Outline a group of nodes: one call of a region, which holds copies of them, takes their place."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from ..ir.edit import insert_before
from ..ir.meta import Relation
from ..ir.region import Island, Region, regions


class Names:
    """Names for regions: the phase that they begin in, and a number."""

    def __init__(self, graph: fx.Graph) -> None:
        self._count = len(regions(graph))

    def next(self, group: list[fx.Node]) -> str:
        """A name for the region of ``group``."""
        name = f"{_first(group, 'phase') or 'region'}_{self._count}"
        self._count += 1
        return name


class Outline:
    """One group of nodes, in the order of the graph, to be replaced by the call of a region.

    ``found``: the memory that the value of each node may lie in.
    """

    def __init__(self, group: list[fx.Node], found: Mapping[fx.Node, frozenset[fx.Node]]) -> None:
        self.group, self.found = group, found
        self.inside = set(group)
        self._outside = [node for node in group if any(user not in self.inside for user in node.users)]
        self._made = list(dict.fromkeys(base for node in self._outside for base in self._returned(node)))
        needed = set(self._made)
        for node in reversed(group):
            if node in needed:
                needed.update(node.all_input_nodes)
        self._needed = [node for node in group if node in needed]
        read = [each for node in self._needed for each in node.all_input_nodes]
        self.operands = [each for each in dict.fromkeys(read) if each not in self.inside]

    def region(self, name: str) -> Region:
        """The region, without what it does not return; its operands stand in the order of their first readers."""
        return Region(name, self._graph())

    def island(self, name: str) -> Island:
        """The same as an island."""
        return Island(name, self._graph())

    def _graph(self) -> fx.Graph:
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.operands:
            env[node] = graph.placeholder(node.name)
            env[node].meta = {"val": node.meta["val"]}
        for node in self._needed:
            env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(tuple(env[node] for node in self._made))
        return graph

    def replace(self, region: Region) -> fx.Node:
        """Let readers outside read results of the call, which is returned, and erase the group."""
        self.after = self.group[-1].next
        vals = tuple(node.meta["val"] for node in self._made)
        call = insert_before(self.after, region, *self.operands, like=None, name=f"{region.name}_out", val=vals)
        call.meta |= {key: found for key in ("phase", "source", "uneven") if (found := _first(self.group, key))}
        results = {node: self._result(call, k, node) for k, node in enumerate(self._made)}
        for node in self._outside:
            self._show(node, results)
        for node in reversed(self.group):
            node.graph.erase_node(node)
        for node, result in results.items():
            result.name = node.name
        return call

    def _returned(self, node: fx.Node) -> list[fx.Node]:
        """The values that the region returns so that ``node`` can be had outside: itself, or those it is a view of."""
        if self._is_own(node):
            return [node]
        return [base for each in node.all_input_nodes for base in self._returned(each)]

    def _is_own(self, node: fx.Node) -> bool:
        """Whether a value lies in no other's memory: what an op makes, or one of several that it makes."""
        if node.target is operator.getitem:
            made: Any = node.args[0]
            return self.found[made] == {made}
        return self.found[node] == {node}

    def _result(self, call: fx.Node, number: int, node: fx.Node) -> fx.Node:
        like: dict[str, Any] = {"like": node, "relation": Relation.REPLACEMENT, "val": node.meta["val"]}
        return insert_before(self.after, operator.getitem, call, number, **like)

    def _show(self, node: fx.Node, results: dict[fx.Node, fx.Node]) -> None:
        """Let readers outside read ``node`` there."""
        node.replace_all_uses_with(self._shown(node, results), delete_user_cb=lambda user: user not in self.inside)

    def _shown(self, node: fx.Node, results: dict[fx.Node, fx.Node]) -> fx.Node:
        """A value of the region outside: a result, or the same view of one."""
        if node not in results:
            sources = {each: self._shown(each, results) for each in node.all_input_nodes}
            with node.graph.inserting_before(self.after):
                results[node] = node.graph.node_copy(node, sources.__getitem__)
        return results[node]


def _first(group: list[fx.Node], key: str) -> Any:
    """The meta ``key`` of the first node in a group that has it; None if none has."""
    return next((node.meta[key] for node in group if node.meta.get(key)), None)
