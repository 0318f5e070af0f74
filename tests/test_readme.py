"""The README's code runs, its commands are targets of the Makefile, and its dumps are what is dumped.

``pytest tests/test_readme.py --renew`` writes today's dumps into it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.harness.fake import fake_world

TORCH = "2.13."  # other versions take mse_loss apart into other ops
README = Path(__file__).parents[1] / "README.md"
DUMPED = re.compile(r"(<!-- dump: (\S+) -->\n```python\n)(.*?)(```)", re.DOTALL)


def blocks(language: str) -> list[str]:
    """The code of a language, in order, without what a dump wrote."""
    text = DUMPED.sub("", README.read_text())
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the README's code has run, on rank 0 of 2."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks("python")))
    with fake_world(2):
        exec(compile(script.read_text(), str(script), "exec"), {"__name__": "readme"})
    return tmp_path


def test_its_code_runs_and_its_dumps_are_what_is_dumped(ran: Path, request: pytest.FixtureRequest) -> None:
    folder = ran / "runs" / "readme" / "train_step" / "program-0"

    def renewed(found: re.Match[str]) -> str:
        return found[1] + body(folder / found[2]) + found[4]

    if request.config.getoption("--renew"):
        README.write_text(DUMPED.sub(renewed, README.read_text()))
    shown = DUMPED.findall(README.read_text())
    assert len(shown) == 2
    for _, name, text, _ in shown:
        compile(text, name, "exec")
        if torch.__version__.startswith(TORCH):
            assert text == body(folder / name)


def body(dump: Path) -> str:
    """A dump from its function on."""
    text = dump.read_text()
    return text[text.index("def program(") :]


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_its_commands_are_there() -> None:
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert "make train" in commands and "make test" in commands
    for command in commands:
        done = subprocess.run([*command.split(), "-n"], cwd=README.parent, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
