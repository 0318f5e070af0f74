"""A row's programs beside what they compute on ranks: verified and certified on simulated ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import passes
import spmd

from .comparing import annotate, compiled, joined, settings
from .meshes import MESHES, world
from .norms import NormsOfCalls
from .planted import planted
from .training import Training

CALL = 2  # whose batch has what a row says of rows


def checked(_rank: int, _count: int, values: Mapping[str, str], folder: Path, fault: str = "") -> list[str]:
    """A job of one rank: a line for what is wrong; those of what cannot be shown begin with "not "."""
    with planted(fault):
        return [*_verified(values, folder), *_certified(values, folder)]


def _verified(values: Mapping[str, str], folder: Path) -> list[str]:
    """A line, if ``spmd.verify`` finds a difference, or refuses the row."""
    with settings(values, 0):
        try:
            step, arguments = _prepared(values, folder)
            verdict = spmd.verify(step, *arguments, world=world(values), mesh=MESHES[values["mesh"]][0], steps=2)
        except (passes.SpmdError, ValueError, TypeError) as error:
            return [f"not verified: {type(error).__name__}: {_flat(error)}"]
    return [] if verdict else [f"verify: {_flat(verdict)}"]


def _certified(values: Mapping[str, str], folder: Path) -> list[str]:
    with settings(values, 0):
        try:
            step, arguments = _prepared(values, folder)
            found = spmd.certify(step, *arguments, world=world(values), mesh=MESHES[values["mesh"]][0])
        except (passes.SpmdError, ValueError, TypeError) as error:
            return [f"not certified: {type(error).__name__}: {_flat(error)}"]
    if found.outcome == "wrong":
        return [f"certify: {_flat(found)}"]
    return [] if found else [f"not certified: {_flat(found)}"]


def _prepared(values: Mapping[str, str], folder: Path) -> tuple[Any, tuple[Any, ...]]:
    """A compiled step of the row without ranks or cache, and the arguments of a call with the whole batch."""
    step = compiled(dict(values) | {"cache": "one rank for all"}, folder, is_simulated=True)
    torch.manual_seed(0)
    training = Training.of(values)
    annotate(values, training.model)
    NormsOfCalls(values, step)
    return step, (*training.arguments(), *joined(values, CALL))


def _flat(text: Any) -> str:
    return " ".join(str(text).split())
