"""Bands of masks: which keys each row may see is derived from comparisons of positions, and is true of the mask."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
from functorch import make_fx  # type: ignore[import-untyped]
from torch import Tensor, fx

from spmd.rules import Info, OpCall, iota_dim_of, positions_of
from spmd.rules.sequences.bands import Band

ROWS, KEYS = 7, 9
Mask = Callable[[Tensor, Tensor, Tensor], Tensor]


def derived(mask: Mask) -> tuple[Any, Tensor]:
    """What is derived of a mask by the ops that make it, and the mask."""
    documents = torch.arange(KEYS) // 4

    def make(documents: Tensor) -> Tensor:
        i, j = torch.arange(ROWS)[:, None], torch.arange(KEYS)[None]
        return mask(i, j, documents)

    graph = make_fx(make)(documents).graph
    facts: dict[fx.Node, Any] = {}
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node], facts[node] = documents, Info(tuple(documents.shape), documents.dtype)
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), facts.__getitem__)
            result = Info(tuple(values[node].shape), values[node].dtype)
            operands = tuple(facts[each] for each in node.all_input_nodes)
            call = OpCall(node.target, args, kwargs, operands, (result,), 1)
            facts[node] = Info(result.shape, result.dtype, iota_dim_of(call), positions=positions_of(call))
    (last,) = graph.output_node().args
    return facts[last].positions, values[last]


def window(i: Tensor, j: Tensor, _: Tensor) -> Tensor:
    return (j <= i) & (j > i - 3)


MASKS: dict[str, tuple[Mask, float, float, Any]] = {
    "causal": (lambda i, j, d: i >= j, -inf, 0, False),
    "later": (lambda i, j, d: i < j, 1, inf, False),
    "window": (window, -2, 0, False),
    "both sides": (lambda i, j, d: (i - j).abs() <= 2, -2, 2, False),
    "documents": (lambda i, j, d: (d[:ROWS, None] == d) & window(i, j, d), -2, 0, False),
    "or": (lambda i, j, d: (i == j) | (j == i + 2), 0, 2, False),
    "bias": (lambda i, j, d: torch.zeros(ROWS, KEYS).masked_fill(~window(i, j, d), -inf), -2, 0, -inf),
    "batch": (lambda i, j, d: window(i, j, d)[None, None].expand(2, 1, -1, -1), -2, 0, False),
    "offset": (lambda i, j, d: j - 1 <= i + 2, -inf, 3, False),
}


@pytest.mark.parametrize("name", MASKS)
def test_what_is_derived_is_true(name: str) -> None:
    mask, low, high, outside = MASKS[name]
    found, value = derived(mask)
    assert found == Band(-2, -1, low, high, outside)
    distance = torch.arange(KEYS) - torch.arange(ROWS)[:, None]
    assert (value[..., (distance < low) | (distance > high)] == outside).all()


@pytest.mark.parametrize("mask", [
    lambda i, j, d: i + j < 4,
    lambda i, j, d: d[:ROWS, None] >= d,
    lambda i, j, d: (i >= j) | (d == 1),
    lambda i, j, d: 2 * i >= j,
    lambda i, j, d: j - i > -2.5,
    lambda i, j, d: (j - i).abs() < 2.5,
    lambda i, j, d: window(i, j, d)[:, 1:],
    lambda i, j, d: (i >= j).mT,
    lambda i, j, d: torch.zeros(ROWS, KEYS).masked_fill(i >= j, -inf),
    lambda i, j, d: (i.int() - j >= 0) ^ True,
    lambda i, j, d: i.bool() >= j,
    lambda i, j, d: torch.where(window(i, j, d), True, torch.full((ROWS, KEYS), -inf).bool()),
])  # fmt: skip
def test_what_cannot_be_derived_is_unknown(mask: Mask) -> None:
    found, _ = derived(mask)
    assert not isinstance(found, Band)
