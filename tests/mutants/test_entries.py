"""Each comparison of an entry is needed: without it a process that has changed starts with a stale program."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spmd.cache.trainer import Trainer
from tests.spmd.cache.trainer import trainer as trainer

from .manifest import COMPARISONS

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.slow]


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_change_is_missed_without_its_comparison(
    name: str, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = COMPARISONS[name]
    case.store(trainer, tmp_path / "right")
    assert not case.starts_warm(trainer, tmp_path / "right")
    monkeypatch.setattr(case.owner, case.name, case.wrong(getattr(case.owner, case.name)))
    case.store(trainer, tmp_path / "wrong")
    assert case.starts_warm(trainer, tmp_path / "wrong"), "another comparison sees that change, too"
