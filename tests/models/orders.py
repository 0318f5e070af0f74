"""Compile models as one of two ranks whose Python hashes strings differently; a program for ``test_orders.py``.

    PYTHONHASHSEED=1 python -m tests.models.orders --shallow GPT2 ModernBert

No data moves: both are rank 0 of a fake process group, so that their programs should be equal to the letter. The texts
that real ranks would exchange through the store go through stdin and stdout, a JSON line each. The last line holds the
text of each model's program, captured and final.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch

import passes
import spmd
from spmd.dispatch import Turn
from spmd.ranks.consensus import Agreement
from tests.harness.fake import fake_world
from tests.harness.memory import spare_the_collector

from .catalog import ENTRIES
from .examine import Training

WORLD = 2
DEEP = ("ModernBert", "Gemma2", "GPTNeo")  # whose layers are unlike


def exchange(agreement: Agreement, text: str) -> list[str]:
    """Stands for ``Agreement.all_gather_text``."""
    print(json.dumps({"text": text}), flush=True)
    found: list[str] = json.loads(sys.stdin.readline())
    return found


def texts_of(name: str, shallow: bool) -> list[str]:
    """The program of one model: as captured, and as it runs."""
    spare_the_collector()
    (entry,) = (entry for entry in ENTRIES if entry.name == name)
    if shallow and name not in DEEP and "num_hidden_layers" in entry.config:
        entry = replace(entry, config={**entry.config, "num_hidden_layers": 1})
    case, step = Training(entry, momentum=0.0), spmd.compile(Training.step)
    torch.manual_seed(0)
    turn = Turn()
    step._dispatch.fit(turn, step._dispatch.read((*case.build(), *case.part(0, 0)), {}))
    compiled = step._compiler.compile(turn, turn.call, 1)
    return [passes.print_program(compiled.captured.program), passes.print_program(compiled.program)]


def main(names: list[str], shallow: bool) -> None:
    """Compile all models and print their texts; ``shallow``: most have one layer."""
    change: Any = setattr
    change(Agreement, "all_gather_text", exchange)
    with fake_world(WORLD):
        print(json.dumps({"texts": {name: texts_of(name, shallow) for name in names}}), flush=True)


if __name__ == "__main__":
    main([name for name in sys.argv[1:] if name != "--shallow"], "--shallow" in sys.argv)
