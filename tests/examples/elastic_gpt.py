"""``train_gpt.py``, with two moments: a rank that is alone waits for a host to join; one that is to fail is killed.

It evaluates nothing, which would compile another program at each start.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import train_gpt

DRAW, ASK = train_gpt.Batches.draw, train_gpt.Checkpoints.ask_to_end
BEFORE = 3  # batches of a process before its moment
drawn: list[train_gpt.Batches] = []
asked: list[object] = []


def draw(batches: train_gpt.Batches) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw, unless this is the moment of this process."""
    drawn.append(batches)
    joined, world = Path(os.environ["JOINED"]), os.environ["WORLD_SIZE"]
    if world == "1" and len(drawn) == BEFORE and not joined.exists():
        joined.touch()
        while not asked:
            time.sleep(0.02)
    if world == "2" and len(drawn) == BEFORE and "FAILS" in os.environ:
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return DRAW(batches)


def ask_to_end(checkpoints: train_gpt.Checkpoints, *signal_and_frame: object) -> None:
    """Note it here, too."""
    asked.append(checkpoints)
    ASK(checkpoints, *signal_and_frame)


train_gpt.held_out_bits = lambda *_: 0.0
train_gpt.Batches.draw = draw  # type: ignore[method-assign]
train_gpt.Checkpoints.ask_to_end = ask_to_end  # type: ignore[method-assign]
train_gpt.main()
