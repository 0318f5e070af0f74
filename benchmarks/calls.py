"""Call overhead of a compiled step: the time of its checks before the program runs, in microseconds.

    python benchmarks/calls.py [--parameters 300] [--json out.json]

One process, a model of linear layers, AdamW with state. For comparison: an empty loop over the same tensors (parameters
and their optimizer state), the whole call, and the plain step. Medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import spmd
from spmd.dispatch import Turn


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    """A step with as little computation as possible."""
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def median(function: Callable[[], Any], rounds: int) -> float:
    """The median time of a call of ``function``, in microseconds."""
    function()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return 1e6 * statistics.median(seconds)


def measure(parameters: int, rounds: int) -> dict[str, float]:
    """Measure all figures, in microseconds, by name."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(parameters // 2)])
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(2, 4)
    step = spmd.compile(train_step)
    for _ in range(3):
        step(model, optimizer, x)
    state = [tensor for values in optimizer.state.values() for tensor in values.values()]
    tensors = [*model.parameters(), *state]

    def empty_loop() -> None:
        for _ in tensors:
            pass

    def checks() -> None:
        turn = Turn()
        step._dispatch.fit(turn, step._dispatch.read((model, optimizer, x), {}))
        assert turn.compiled is not None

    return {
        f"an empty loop over the same {len(tensors)} tensors": median(empty_loop, rounds),
        "the checks of a call": median(checks, rounds),
        "a call": median(lambda: step(model, optimizer, x), max(rounds // 20, 3)),
        "the plain step": median(lambda: train_step(model, optimizer, x), max(rounds // 20, 3)),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=300, help="parameters of the model (%(default)s)")
    parser.add_argument("--rounds", type=int, default=500, help="repetitions (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    found = measure(options.parameters, options.rounds)
    table = Table("figure", "microseconds", title=f"{options.parameters} parameters, AdamW")
    for name, value in found.items():
        table.add_row(name, f"{value:,.0f}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
