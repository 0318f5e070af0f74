"""Steps that branch on values are kept: a later process traces no way that an earlier one has taken."""

from __future__ import annotations

from pathlib import Path

import pytest

import spmd
from spmd.cache import call_key

from .trainer import STEP, Trainer, batch
from .trainer import trainer as trainer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]
_ASKS = """
    if loss > 2.0:
        loss = loss / 2
    if loss.isnan():
        return loss
    loss.backward()
"""
BRANCHING = STEP.replace("\n    loss.backward()\n", _ASKS).replace("Slow(model", "torch.optim.SGD(model")


def losses(trainer: Trainer, cache: Path, scales: list[float]) -> list[float]:
    """What a process that starts now returns, with targets of these scales."""
    trainer.write(cached_step=BRANCHING)
    module = trainer.start()
    step, (model, optimizer) = spmd.compile(module.step, cache=cache), module.build()
    batches = [batch(k) for k in range(len(scales))]
    return [step(model, optimizer, x, y * scale).item() for (x, y), scale in zip(batches, scales, strict=True)]


def test_each_way_that_was_taken_is_found(trainer: Trainer, tmp_path: Path) -> None:
    traces, cache = trainer.count_traces(), tmp_path / "cache"
    expected = losses(trainer, cache, [0.2, 9, 0.2, 9])
    assert len(traces) == 2 and expected[1] > expected[0]
    traces.clear()
    assert losses(trainer, cache, [0.2, 9, 0.2, 9]) == expected
    assert not traces
    large_first = losses(trainer, cache, [9, 0.2])
    assert losses(trainer, tmp_path / "another", [9, 0.2]) == large_first


def test_an_entry_of_another_way_would_be_noticed(trainer: Trainer, tmp_path: Path) -> None:
    losses(trainer, tmp_path / "cache", [0.2, 9])
    trainer.monkeypatch.setattr(call_key, "values_of", lambda _: ())
    with pytest.raises(AssertionError, match="a program is of the answers of its call"):
        losses(trainer, tmp_path / "cache", [0.2, 9])


def test_other_sizes_of_each_way_are_kept(trainer: Trainer, tmp_path: Path) -> None:
    def train() -> tuple[list[float], list[str]]:
        trainer.write(cached_step=BRANCHING)
        module = trainer.start()
        step, (model, optimizer) = spmd.compile(module.step, cache=tmp_path / "cache"), module.build()
        calls = [(6, 0.2), (5, 0.2), (4, 0.2), (3, 9), (4, 9)]
        batches = [[each[:rows] for each in batch(k)] for k, (rows, _) in enumerate(calls)]
        found = [step(model, optimizer, x, y * scale).item() for (x, y), (_, scale) in zip(batches, calls, strict=True)]
        return found, [note for note in step.report().notes if "not kept" in note]

    traces = trainer.count_traces()
    expected, not_kept = train()
    assert not not_kept
    traces.clear()
    assert train()[0] == expected and not traces
