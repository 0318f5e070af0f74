"""A registered group of three local ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from passes.runtime import local_peers, shared_memory_collectives
from passes.runtime.local_peers import LocalPeers, register_local_peers

from .local_group import FakeGroup, local_group


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LocalPeers]]:
    """Three ranks, whose groups functional collectives know as "0", "1" and "2"."""
    ranks = local_group(3)
    groups = {str(k): FakeGroup() for k in range(3)}
    monkeypatch.setattr(shared_memory_collectives, "group_named", groups.__getitem__)
    monkeypatch.setattr(local_peers, "_connected", {})
    for name, each in zip(groups, ranks, strict=True):
        register_local_peers(name, groups[name], each)
    yield ranks
    for each in ranks:
        each.close()
