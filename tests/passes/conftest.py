"""Golden text: what programs look like before and after a pass. ``pytest tests/passes --renew`` writes it anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Compare a text with ``golden/<name of the test>.txt``."""
    path = GOLDEN / f"{request.node.name.removeprefix('test_')}.txt"

    def compare(text: str) -> None:
        if request.config.getoption("--renew", default=False):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is not there; pytest tests/passes --renew writes it"
        assert text == path.read_text()

    return compare
