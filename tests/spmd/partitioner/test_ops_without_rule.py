"""Ops without a rule are decomposed by torch's table, or run whole and are reported; a user's op stays one node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from spmd.capture.decompositions import second_trace_table
from spmd.rules import rule_of
from tests.harness.structure import compile_on_fake_ranks, computes, nodes_of

aten = torch.ops.aten


@torch.library.custom_op("without_rule::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    """Half of ``x``, by ops that all have rules."""
    return x.neg().mul(-0.5)


halved.register_fake(torch.empty_like)


def _compiled(forward: Callable[[Tensor], Tensor]) -> tuple[list[tuple[Any, Any]], list[str]]:
    """(op, arguments) of what rank 0 of 2 runs where ``forward`` has 6 of 12 rows of 4 doubles; the notes."""

    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = (model(x) * forward(x)).sum()
        loss.backward()
        return loss

    model = nn.Linear(4, 4).double()
    compiled = compile_on_fake_ranks(2, step, (model,), torch.randn(6, 4, dtype=torch.float64))
    assert compiled.program is not None
    called = [(computes(node), node.args) for node in compiled.program.graph.nodes]
    return called, [note for note in compiled.report().notes if "no rule" in note]


def test_an_op_is_decomposed_by_torchs_table() -> None:
    op = aten.channel_shuffle.default
    assert rule_of(op) is None and op in second_trace_table()
    called, notes = _compiled(lambda x: torch.channel_shuffle(x[..., None], 2)[..., 0])
    assert notes == []
    assert all(target is not op for target, _ in called)


def test_an_op_without_decomposition_runs_whole_and_the_report_has_line_and_bytes() -> None:
    op = aten.put.default
    assert rule_of(op) is None and op not in second_trace_table()
    called, (note,) = _compiled(lambda x: x.put(torch.tensor([3]), torch.ones(1, dtype=x.dtype)))
    (whole,) = (args[0].meta["val"].shape for target, args in called if target is op)
    assert whole == (12, 4)
    assert "aten.put.default" in note and "test_ops_without_rule.py" in note and "x.put(" in note
    assert f"{12 * 4 * 8} bytes are gathered" in note and "spmd.register_rule" in note


def test_a_users_op_stays_one_node() -> None:
    called, (note,) = _compiled(lambda x: halved(x))
    assert [target for target, _ in called].count(torch.ops.without_rule.halved.default) == 1
    assert all(target is not aten.neg.default for target, _ in called)
    assert "without_rule.halved.default" in note and f"{12 * 4 * 8} bytes" in note


def test_experts_in_one_op_are_shared_out_over_the_ranks() -> None:
    """Tokens are sorted by expert over the whole batch; then each rank has half of every product."""

    def step(weights: nn.ParameterList, x: Tensor) -> Tensor:
        expert = (x[:, 0] > 0).long()
        order = expert.argsort()
        ends = torch.stack([(expert == k).sum() for k in range(2)]).cumsum(0).int()
        rows = x[order].bfloat16()
        loss = torch._grouped_mm(rows, weights[0].bfloat16(), offs=ends).float().square().sum()
        loss.backward()
        return loss

    weights = nn.ParameterList([torch.randn(2, 16, 32)])
    compiled = compile_on_fake_ranks(2, step, (weights,), torch.randn(8, 16))
    nodes = nodes_of(compiled, aten._grouped_mm.default)
    assert [node.args[0].meta["val"].numel() for node in nodes] == [16 * 16 // 2] * 2
    assert not [note for note in compiled.report().notes if "no rule" in note]
