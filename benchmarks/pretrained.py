"""Time and memory of ``spmd.from_pretrained``, beside reading the same bytes of the same files.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.pretrained [--width 256] [--layers 4] [--dtype float32]

A Llama of random weights, of 1.57 B parameters with ``--width 2048 --layers 28``, is written to files of ``--file`` MB.
Before each reading, the files' pages are dropped from the page cache. Reading: each rank reads its part of each file in
order, by blocks. Seconds are the median over rounds, on the slowest rank; memory is the peak of what a process holds
(VmHWM), above what it held before, on the largest rank, beside its parts and the largest tensor.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from rich.table import Table

import spmd
from spmd.checkpoints.built import parameters_on_meta
from spmd.checkpoints.direct import save_file
from spmd.checkpoints.storage import file_numbers

BLOCK = 8_000_000


def held(key: str) -> int:
    """Bytes of memory, by the name that /proc gives."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def write(folder: Path, width: int, layers: int, dtype: torch.dtype, most: int) -> None:
    """Write a model of random weights, tensor by tensor."""
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=layers, num_attention_heads=8,
        vocab_size=32000 * width // 2048, num_key_value_heads=8, dtype=dtype, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    with parameters_on_meta():
        model = transformers.LlamaForCausalLM(config)
    tensors = {name: each.to(dtype) for name, each in model.state_dict().items()}
    numbers = file_numbers({name: each.nbytes for name, each in tensors.items()}, most)
    for number in set(numbers.values()):
        own = {name: tensors[name] for name in tensors if numbers[name] == number}
        save_file(own, folder / f"{number}.safetensors", {}, lambda name: torch.randn(tensors[name].shape).to(dtype))
    index = {name: f"{number}.safetensors" for name, number in numbers.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config.save_pretrained(folder)


def drop(folder: Path) -> None:
    """Drop the files' pages from the page cache."""
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_bytes(folder: Path) -> None:
    """Read this rank's part of the bytes of each file."""
    buffer = memoryview(bytearray(BLOCK))
    for path in sorted(folder.glob("*.safetensors")):
        part = path.stat().st_size // dist.get_world_size()
        with path.open("rb", buffering=0) as file:
            file.seek(dist.get_rank() * part)
            while part > 0:
                part -= file.readinto(buffer[: min(part, BLOCK)])


def measure(call: Callable[[], Any], folder: Path) -> tuple[float, float]:
    """Seconds of a call, and the bytes that it added at most, over all ranks."""
    dist.barrier()
    if dist.get_rank() == 0:
        drop(folder)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before, start = held("VmRSS"), time.perf_counter()
    call()
    worst = torch.tensor([time.perf_counter() - start, held("VmHWM") - before])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst[0]), float(worst[1])


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print a table on the first rank."""
    parser = argparse.ArgumentParser(description="Reading a folder of safetensors files.")
    for name, default in (("--width", 256), ("--layers", 4), ("--rounds", 3), ("--file", 1000)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    rank = spmd.world().get_rank()
    folders = [tempfile.mkdtemp(prefix="pretrained-", dir=".")]
    dist.broadcast_object_list(folders)
    folder, small = Path(folders[0], "model"), Path(folders[0], "small")
    if rank == 0:
        for path, width, layers in ((small, 64, 1), (folder, options.width, options.layers)):
            path.mkdir()
            write(path, width, layers, getattr(torch, options.dtype), options.file * 1_000_000)
    dist.barrier()
    spmd.from_pretrained(small, "fully_shard")  # imports what it needs
    found: dict[str, list[tuple[float, float]]] = {"reading the bytes": [], "spmd.from_pretrained": []}
    parts = largest = 0
    for _ in range(options.rounds):
        found["reading the bytes"].append(measure(lambda: read_bytes(folder), folder))
        models: list[torch.nn.Module] = []
        call: Callable[[], None] = lambda models=models: models.append(spmd.from_pretrained(folder, "fully_shard"))  # type: ignore[misc]  # noqa: E731
        found["spmd.from_pretrained"].append(measure(call, folder))
        parts = sum(parameter.to_local().nbytes for parameter in models[0].parameters())  # type: ignore[operator]
        largest = max(parameter.nbytes for parameter in models[0].parameters())
        models.clear()
    if rank == 0:
        title = f"{parts / 1e6:.0f} MB on each rank, largest tensor {largest / 1e6:.0f} MB"
        table = Table("call", "seconds", "of reading", "memory added, MB", "of parts and largest tensor", title=title)
        base = statistics.median(seconds for seconds, _ in found["reading the bytes"])
        for name, each in found.items():
            seconds, peak = statistics.median(s for s, _ in each), max(m for _, m in each)
            share = f"{peak / (parts + largest):.3f}"
            table.add_row(name, f"{seconds:.2f}", f"{seconds / base:.2f}", f"{peak / 1e6:.0f}", share)
        Console(width=110).print(table)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folders[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
