"""Attributes that the user has attached to a tensor (``weight.lr_scale = 0.1``), for its fake."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..call.state import attached_to
from .unsupported import Refused

Pairs = Sequence[tuple[str, torch.Tensor, torch.Tensor]]
"""(name, live tensor, its fake)."""


@contextmanager
def attached_attributes(pairs: Pairs) -> Iterator[None]:
    """Let fakes have the attributes of their tensors. Raises ``Refused`` if the step writes one: no call would."""
    torchs = [set(vars(fake)) for _, _, fake in pairs]
    for _, live, fake in pairs:
        vars(fake).update(attached_to(live))
    yield
    for (name, live, fake), own in zip(pairs, torchs, strict=True):
        before = attached_to(live)
        for key in sorted((vars(fake).keys() - own) | before.keys()):
            if vars(fake).get(key, _GONE) is not before.get(key, _GONE):
                raise Refused(
                    f"it writes {name}.{key}, and a call does not write attributes of tensors. Keep it in an attribute "
                    "of a module, or in a dict, by the name of the parameter."
                )


def attached_objects(pairs: Pairs) -> list[tuple[str, Any]]:
    """All that is attached, each with its name: what it holds is read by its attributes and entries."""
    return [(f"{name}.{key}", value) for name, live, _ in pairs for key, value in attached_to(live).items()]


_GONE = object()
