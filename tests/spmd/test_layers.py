"""Where private torch names may be used, and which names are public."""

from __future__ import annotations

from pathlib import Path

import spmd
from tests.harness.private_names import private_torch_names


def test_private_torch_names_are_in_one_file() -> None:
    """Private names go behind accessors in ``spmd/_torch.py``, each with why and the torch versions it was seen in."""
    assert private_torch_names(Path(spmd.__file__).parent) == []


def test_public_names_are_there() -> None:
    assert sorted(spmd.__all__) == sorted(set(spmd.__all__))
    assert all(hasattr(spmd, name) for name in spmd.__all__)
