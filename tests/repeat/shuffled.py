"""A plugin of pytest, ``-p tests.repeat.shuffled --shuffle SEED``: files in another order, and the tests of each."""

from __future__ import annotations

from random import Random

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare ``--shuffle``."""
    parser.addoption("--shuffle", type=int, default=0, help="the seed of the order of tests")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle, equally in all workers. A file's tests stay together: they share what the file has made for them."""
    random = Random(config.getoption("--shuffle"))
    rank = {path: random.random() for path in dict.fromkeys(item.path for item in items)}
    random.shuffle(items)
    items.sort(key=lambda item: rank[item.path])
