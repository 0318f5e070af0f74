"""Whether values of a row do something: a value that changes nothing tests nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx

import passes
import spmd
from passes import fit_memory
from passes.schedule import recompute_levels
from spmd import capture_call, options
from spmd.cache import compile_cache

from .dimensions import is_kept


@contextmanager
def counted_traces() -> Iterator[list[str]]:
    """A list that grows by one with each trace of this rank."""
    traces, original = list[str](), capture_call.capture
    with mock.patch.object(capture_call, "capture", lambda *given: (traces.append(""), original(*given))[1]):
        yield traces


@contextmanager
def each_rank_traces() -> Iterator[None]:
    """No rank traces for the others."""
    with mock.patch.object(compile_cache, "_LEAST_TIMEOUT", math.inf):
        yield


@contextmanager
def tight_budgets() -> Iterator[list[bool]]:
    """Each program has a budget that is less than it takes, or the least that it asks for.

    Yields, for each, whether that is what it takes: nothing that is computed again would take less.

    Budgets are of what programs compute: the graphs of a tiny model take 200 times as much. Each level of recomputation
    drops a sixth of the peak, and the three budgets of a program have one search, so that passes run on few candidates.
    """
    fit, search, nothing_helps = options.fit, fit_memory._Search, list[bool]()

    def fit_tightly(program: Any, pipeline: Any, budget: int, *given: Any) -> Any:
        with mock.patch.object(fit_memory, "_Search", _once(search)):
            plain = fit(program, pipeline, budget, *given)
            try:
                found = fit(program, pipeline, int(0.9 * plain.peak), *given)
            except passes.MemoryBudgetError as error:
                size, unit = re.findall(r"([\d.]+) (KB|MB)", str(error))[0]
                found = fit(program, pipeline, round(float(size) * {"KB": 1e3, "MB": 1e6}[unit]), *given)
        nothing_helps.append(found.peak >= plain.peak)
        return found

    with (
        mock.patch.multiple(fit_memory, _NODE_BYTES=0, _COMPILING=0),
        mock.patch.object(recompute_levels, "_PARTS", 6),
        mock.patch.object(options, "fit", fit_tightly),
    ):
        yield nothing_helps


def _once(make: Callable[..., Any]) -> Callable[..., Any]:
    """The same result for each call, made by the first one."""
    made = list[Any]()

    def once(*given: Any) -> Any:
        if not made:
            made.append(make(*given))
        return made[0]

    return once


def missing(
    values: Mapping[str, str], step: spmd.CompiledStep[..., Any], traces: int, is_warm: bool, nothing_helps: list[bool]
) -> list[str]:
    """A line for each value that did nothing on this rank; ``nothing_helps``: as ``tight_budgets`` yields it."""
    notes = [note for program in step.programs for note in program.notes]
    has = {
        "an override ran": values["override"] == "none" or step.options.overrides[0].count > 0,  # type: ignore[attr-defined]
        "a rank traced": values["cache"] != "each rank" or traces > 0,
        "a budget had values computed again": values["memory"] != "tight"
        or any("without)" in each for each in notes)
        or (bool(nothing_helps) and all(nothing_helps)),
        "numbers were rounded": values["wire"] == "own" or _rounds(step, notes),
        "nothing was traced": not is_warm or not is_kept(values) or traces == 0,
    }
    return [f"expected that {what}, and it is not so: {notes}" for what, holds in has.items() if not holds]


def _rounds(step: spmd.CompiledStep[..., Any], notes: list[str]) -> bool:
    """Whether programs cast to fp32, or a note says so of what is sent: parts of a program may be elsewhere."""
    nodes = (node for program in step.programs for node in program.graph.nodes)
    return any("before they are sent" in note for note in notes) or any(map(_is_narrow, nodes))


def _is_narrow(node: fx.Node) -> bool:
    return getattr(node.meta.get("val"), "dtype", None) is torch.float32
