"""Compile models as one of two ranks whose Python hashes strings differently; a program for ``test_orders.py``.

    PYTHONHASHSEED=1 python -m tests.models.orders GPT2 ModernBert

No data moves: both are rank 0 of a fake process group, so that their programs should be equal to the letter. The texts
that real ranks would exchange through the store go through stdin and stdout, a JSON line each. The last line holds the
text of each model's program, captured and final.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import passes
import spmd
from spmd.dispatch import Turn
from spmd.ranks.consensus import Agreement
from tests.harness.fake import fake_world

from .catalog import ENTRIES
from .examine import Training

WORLD = 2


def exchange(agreement: Agreement, text: str) -> list[str]:
    """Stands for ``Agreement.all_gather_text``."""
    print(json.dumps({"text": text}), flush=True)
    found: list[str] = json.loads(sys.stdin.readline())
    return found


def texts_of(name: str) -> list[str]:
    """The program of one model: as captured, and as it runs."""
    (entry,) = (entry for entry in ENTRIES if entry.name == name)
    case, step = Training(entry, momentum=0.0), spmd.compile(Training.step)
    torch.manual_seed(0)
    turn = Turn()
    step._dispatch.fit(turn, (*case.build(), *case.part(0, 0)), {})
    compiled = step._compile_on_all_ranks(turn, turn.call)
    return [passes.print_program(compiled.captured.program), passes.print_program(compiled.program)]


def main(names: list[str]) -> None:
    """Compile all models and print their texts."""
    change: Any = setattr
    change(Agreement, "all_gather_text", exchange)
    with fake_world(WORLD):
        print(json.dumps({"texts": {name: texts_of(name) for name in names}}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
