"""Message passing in plain torch, as in PyTorch Geometric: gather by an edge index, combine, scatter to the nodes.

How a user gives the graphs decides what is split:

- a batch of graphs, padded to the same numbers of nodes and edges, with the batch's dim in front (``edges``: (graph, 2,
  edge)): each rank has its own graphs, and nothing is communicated but gradients;
- one big graph: nodes and their features are the same on every rank (``inputs={"x": Replicate(), ...}``), its edges are
  split (``Shard(1)`` of (2, edge)): each rank sends the messages of its own edges, and their sums per node are reduced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

from tests.harness.cases import MLP
from tests.harness.oracle import assert_agrees, random_generator
from tests.harness.pool import Ranks

from .examine import Style, assert_trains_in_place
from .zoo import ROWS

NODES, EDGES, WIDTH = 6, 12, 4


class Convolution(nn.Module):
    """Messages by an MLP, summed, averaged and maximized at each node; a softmax over a node's edges weighs them."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.Tanh())
        self.score = nn.Linear(WIDTH, 1)
        self.update = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """``x``: (graph, node, WIDTH), ``edges``: (graph, 2, edge), from and to."""
        source, target = (edges[:, k, :, None].expand(-1, -1, WIDTH) for k in range(2))
        message = self.message(torch.cat([x.gather(1, source), x.gather(1, target)], dim=-1))
        message = message * self.attention(self.score(message), target[..., :1], x.shape[1])
        summed = torch.zeros_like(x).scatter_add(1, target, message)
        mean = torch.zeros_like(x).scatter_reduce(1, target, message, "mean", include_self=False)
        most = torch.zeros_like(x).scatter_reduce(1, target, message, "amax", include_self=False)
        return x + self.update(torch.cat([x, summed, mean, most], dim=-1)).tanh()

    def attention(self, score: Tensor, target: Tensor, nodes: int) -> Tensor:
        """A softmax over the edges that end in the same node."""
        empty = score.new_zeros(len(score), nodes, 1)
        highest = empty.scatter_reduce(1, target, score.detach(), "amax", include_self=False)
        weight = (score - highest.gather(1, target)).exp()
        return weight / empty.scatter_add(1, target, weight).gather(1, target)


class GraphClassifier(nn.Module):
    """Two layers, and a mean over the nodes that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Convolution(), Convolution()])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, edges: Tensor, present: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edges)
        return self.head((x * present[..., None]).sum(1) / present.sum(1, keepdim=True))


@dataclass(frozen=True)
class Graphs(MLP):
    """A batch of graphs, one class each."""

    rows: int = ROWS

    def build(self) -> tuple[Any, ...]:
        model = GraphClassifier().double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        random = random_generator(rank, step)
        x = torch.randn(self.rows, NODES, WIDTH, generator=random, dtype=torch.float64)
        edges = torch.randint(NODES, (self.rows, 2, EDGES), generator=random)
        sizes = torch.randint(2, NODES + 1, (self.rows, 1), generator=random)
        return x, edges, (torch.arange(NODES) < sizes).double(), torch.randint(3, (self.rows,), generator=random)

    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor, edges: Tensor, present: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(model(x, edges, present), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


class OneGraph(nn.Module):
    """A graph convolution with degrees, sums by ``index_add``, and an attention over edges."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, 3)
        self.edge = nn.Linear(16, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """``x``: (node, WIDTH), ``edges``: (2, edge)."""
        source, target = edges
        degree = x.new_zeros(len(x)).index_add(0, target, torch.ones(len(target), dtype=x.dtype))
        norm = degree.clamp(min=1).rsqrt()
        h = self.first(x)
        message = h[source] * (norm[source] * norm[target])[:, None]
        h = F.relu(torch.zeros_like(h).index_add(0, target, message))
        gate = self.edge(torch.cat([h[source], h[target]], dim=-1)).sigmoid()
        return self.second(torch.zeros_like(h).scatter_add(0, target[:, None].expand(-1, 8), gate * h[source]) + h)


@dataclass(frozen=True)
class BigGraph(MLP):
    """One graph, and a class for some of its nodes."""

    def build(self) -> tuple[Any, ...]:
        model = OneGraph().double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def part(self, rank: int, step: int) -> dict[str, Any]:
        shared, own = random_generator(99, step), random_generator(rank, step)
        return {
            "x": torch.randn(NODES, WIDTH, generator=shared, dtype=torch.float64),
            "edges": torch.randint(NODES, (2, EDGES), generator=own),
            "y": torch.randint(-1, 3, (NODES,), generator=shared),
        }

    def whole(self, parts: list[Any]) -> Any:
        """The nodes are the same everywhere; the edges of all ranks make the graph."""
        return {**parts[0], "edges": torch.cat([part["edges"] for part in parts], dim=1)}

    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor, edges: Tensor, y: Tensor) -> Any:
        logits = model(x, edges)
        loss = F.cross_entropy(logits, y, ignore_index=-1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, logits


BIG_GRAPH = {"x": Replicate(), "edges": Shard(1), "y": Replicate()}


@pytest.mark.parametrize("style", [pytest.param("replicate", marks=pytest.mark.exhaustive), "fully_shard"])
def test_a_batch_of_graphs(ranks: Ranks, style: Style) -> None:
    assert_trains_in_place(ranks, Graphs(), style)


@pytest.mark.parametrize("style", ["replicate", pytest.param("fully_shard", marks=pytest.mark.exhaustive)])
def test_one_big_graph(ranks: Ranks, style: Style) -> None:
    assert_agrees(ranks, 2, BigGraph(), {"parallel_style": style, "inputs": BIG_GRAPH}, steps=3)
