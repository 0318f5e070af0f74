"""The bits of a built-in step with ``bits="same"``, for ``spmd doctor``: one hash for each kind of processor and torch.

A rank trains; the hash is the same on any number of them. Another one than the table has means that a run begun on such
a machine goes on here with other bits.
"""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from ..call.rng import random_state_kept, seed
from ..decorator import compile
from ..modes.data_parallel import DataParallel

KNOWN: dict[tuple[str, str], str] = {
    ("AuthenticAMD 25 17, AVX512", "2.11"): "4cb7257a73c425161c2add2e6a30dc1254055d89a5ef1ac5897db401333d8e0b",
    ("AuthenticAMD 25 17, AVX512", "2.13"): "c7d621876c91d09380c61c7bd9fc5d4924593c7f2884392efd489a91337f7146",
    ("AuthenticAMD 25 17, AVX512", "2.15"): "c7d621876c91d09380c61c7bd9fc5d4924593c7f2884392efd489a91337f7146",
}
"""By kind of processor and version of torch."""

_STEPS, _ROWS, _PARTS = 3, 8, 4


def this_kind() -> tuple[str, str]:
    """The kind of processor and the version of torch here."""
    cpu = f"{_model()}, {torch.backends.cpu.get_cpu_capability()}"
    return cpu, ".".join(torch.__version__.split(".")[:2])


def _model() -> str:
    """Maker, family and model, by which libraries choose kernels; the architecture where that is not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    named = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    found = [named.get(key, "") for key in ("vendor_id", "cpu family", "model")]
    return " ".join(found) if all(found) else platform.machine()


def trained_bits(rank: int, ranks: int) -> str:
    """The hash of parameters, optimizer state and losses after a few steps on one thread; all ranks call it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with random_state_kept():
            return _trained(rank, ranks)
    finally:
        torch.set_num_threads(threads)


def _trained(rank: int, ranks: int) -> str:
    torch.manual_seed(0)
    seed(0)
    model = nn.Sequential(nn.Linear(12, 37), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(37), nn.Linear(37, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = compile(_step, parallel_mode=DataParallel("fully_shard", bits="same", virtual=_PARTS))
    found = hashlib.sha256()
    for _ in range(_STEPS):
        x, labels = torch.randn(_ROWS, 12), torch.randint(0, 5, (_ROWS,))
        found.update(repr(step(model, optimizer, x.chunk(ranks)[rank], labels.chunk(ranks)[rank]).item()).encode())
    for each in [*model.parameters(), *(v for of in optimizer.state.values() for v in of.values())]:
        whole = each.full_tensor() if isinstance(each, DTensor) else each
        found.update(whole.detach().numpy().tobytes())
    return found.hexdigest()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(x), labels, ignore_index=0)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss
