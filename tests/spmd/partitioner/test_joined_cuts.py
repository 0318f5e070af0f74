"""What is cut apart and joined again is a view: of the same rows, and of no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import spmd
from passes import Program
from spmd.partitioner.prepare.joined_cuts import view_joined_cuts
from spmd.partitioner.prepare.traced_ops import traced_ops

X = torch.arange(48.0).view(4, 6, 2)


def program_of(function: Callable[[Tensor], Tensor]) -> Program:
    seen = []

    class Recorded(spmd.DataParallel):
        def partition(self, program: Program) -> Program:
            seen.append(program)
            return super().partition(program)

    spmd.compile(function, parallel_mode=Recorded(), passes=())(X)
    return seen[0]


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a list": lambda x: torch.cat(list(x)),
    "unbound along a later dim": lambda x: torch.cat(x.unbind(1), 1),
    "stacked": lambda x: torch.stack(x.unbind(1), 1),
    "by numbers": lambda x: torch.stack([x[0], x[1], x[-2], x[3]]),
    "split": lambda x: torch.cat(x.split([1, 2, 3], 1), 1),
    "slices": lambda x: torch.stack([x[:, :3], x[:, 3:]], 1),
    "of a transposed": lambda x: torch.cat(list(x.transpose(0, 1))),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "in another order": lambda x: torch.cat([x[1], x[0], x[2], x[3]]),
    "not all": lambda x: torch.stack([x[0], x[1], x[2]]),
    "twice": lambda x: torch.cat([x[:2], x[:2]]),
    "along another dim": lambda x: torch.cat(list(x), 1),
    "of two": lambda x: torch.stack([x[0], x[1], (x + 1)[2], (x + 1)[3]]),
    "of unequal lengths": lambda x: torch.cat([x[:1], x[1:3], x[2:4]]),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("functions", "joins"), [(VIEWS, 0), (OTHERS, 1)], ids=["views", "others"])
def test_joins_of_all_in_order_are_views(functions: dict[str, Callable[[Tensor], Tensor]], joins: int) -> None:
    for name, function in functions.items():
        program = view_joined_cuts(program_of(function))
        names = [str(node.target) for node in program.graph.nodes]
        assert sum("cat" in each or "stack" in each for each in names) == joins, name
        program.graph_module.recompile()
        (result,) = program.graph_module(X)
        torch.testing.assert_close(result, function(X), rtol=0, atol=0, msg=name)


def test_nodes_that_share_a_fake_stay_two() -> None:
    """Else an op would read one operand for the other, on those ranks alone whose programs share fakes."""
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in ("one", "other")]
    with torch._subclasses.FakeTensorMode():
        shared = torch.empty(3)
    for node in nodes:
        node.meta["val"] = shared
    traced = traced_ops(lambda one, other: one - 2 * other, nodes)
    value = torch.fx.Interpreter(torch.fx.GraphModule({}, traced)).run(torch.ones(3), torch.zeros(3))
    torch.testing.assert_close(value, torch.ones(3))
