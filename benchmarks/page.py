"""Seconds until the page of a large program is seen, and until it answers: in headless Chromium, on this machine.

    python -m benchmarks.page [--dump runs/train_step] [--layers 58] [--rounds 3] [--picture docs/report.png]

Compiles a GPT of so many layers on eight fake ranks (58 have 20,000 nodes, in minutes), or reads a dump; writes its
page, opens it, and times, from an event to the frame after it: search, folds, stages, selecting, zooming, scrolling.
With ``--picture`` it takes a picture of the page instead.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import Page, sync_playwright
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.optim import AdamW

import spmd
from benchmarks.peers.spellings import train_step
from examples.gpt import GPT, Config
from passes.page.render import render
from spmd.cli.dump_folder import files_in, program_folder

PLACEMENTS: dict[str, Any] = {
    "*.qkv.weight": {"tp": Shard(0)},
    "*.out.weight": {"tp": Shard(1)},
    "*.up.weight": {"tp": Shard(0)},
    "*.down.weight": {"tp": Shard(1)},
}
# Each returns when the frame that shows its effect has been painted.
ACTIONS = {
    "search": "input('search', 'blocks.7.mlp')",
    "search of all": "input('search', 'm')",
    "end of search": "input('search', '')",
    "unfold": "document.getElementById('unfold').click()",
    "scroll": "document.getElementById('rows').scrollTop = 200000",
    "fold": "document.getElementById('fold').click()",
    "first visit of a stage": "input('stage', 9)",
    "next stage": "document.getElementById('next').click()",
    "only changes": "document.getElementById('only-changes').click()",
    "last stage": "input('stage', 99)",
    "all values": "document.getElementById('only-changes').click()",
    "unfold a collective": "document.querySelector('tbody.group').dispatchEvent(new Event('click'))",
    "select a collective": "document.querySelector('tr.one').click()",
    "select it again": "document.querySelector('tr.one').click()",
    "zoom": "document.querySelector('[data-zoom=in]').click()",
    "whole step": "document.querySelector('[data-zoom=all]').click()",
    "search parameters": "input('search-state', 'blocks.3')",
}
TIMED = """async () => {
  const input = (id, value) => {
    const field = document.getElementById(id);
    field.value = value;
    field.dispatchEvent(new Event('input'));
  };
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  const start = performance.now();
  ACTION;
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - start;
}"""


def compile_gpt(layers: int, folder: Path) -> None:
    """Dump the step of a GPT on a mesh of 4 x 2 ranks that share nothing: rank 0's program."""
    from tests.harness.fake import fake_world

    config = Config(width=64, layers=layers)
    with fake_world(8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        model = GPT(config)
        mode = spmd.DataParallel("fully_shard", mesh=mesh, params=PLACEMENTS)
        step = spmd.compile(parallel_mode=mode, dump=folder)(train_step)
        x = torch.randint(256, (4, 64))
        step(model, AdamW(model.parameters()), x, x)


def measure(page: Page, path: Path, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each round: until the page is seen and ready, and of each action."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        page.goto("about:blank")
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-ready]")
        page.wait_for_timeout(200)  # until the paint is noted
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        found.setdefault("first paint", []).append(paint)
        found.setdefault("ready", []).append(page.evaluate("performance.getEntriesByName('ready')[0].startTime"))
        for name, action in ACTIONS.items():
            found.setdefault(name, []).append(page.evaluate(TIMED.replace("ACTION", action)))
    return found


def take_picture(page: Page, path: Path, picture: Path) -> None:
    """The summary and the timeline, as a PNG file."""
    page.goto(path.as_uri())
    page.wait_for_selector("body[data-ready]")
    page.wait_for_timeout(200)
    page.screenshot(path=picture)


def parse() -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dump", type=Path, help="a dump to show, instead of compiling a GPT")
    parser.add_argument("--layers", type=int, default=58)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--picture", type=Path, help="a PNG file to write, instead of timing")
    return parser.parse_args()


def main() -> None:
    """Print a line of JSON for the program, and one for each action."""
    options = parse()
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as driver:
        if options.dump is None:
            compile_gpt(options.layers, Path(scratch) / "dump")
        start = time.perf_counter()
        files = files_in(program_folder(options.dump or Path(scratch) / "dump"))
        path = Path(scratch) / "page.html"
        path.write_text(render(files), encoding="utf-8")
        print(json.dumps({"seconds to write": round(time.perf_counter() - start, 1), "bytes": path.stat().st_size}))
        arguments = ["--no-sandbox"] if os.getuid() == 0 else []
        browser: Any = driver.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        page = browser.new_page(viewport={"width": 1280, "height": 765})
        if options.picture is not None:
            take_picture(page, path, options.picture)
            return
        for name, times in measure(page, path, options.rounds).items():
            print(json.dumps({"action": name, "ms": round(statistics.median(times), 1), "most": round(max(times), 1)}))
        browser.close()


if __name__ == "__main__":
    main()
