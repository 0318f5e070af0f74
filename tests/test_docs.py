"""The documents: their code runs, their dumps and reports are today's, and what they name exists.

The Python blocks of a document run in order, on rank 0 of 2. ``pytest tests/test_docs.py --renew`` writes today's dumps
and reports into the documents. A comment in front of a block names what it shows: a file under the folder ``runs``, or
an excerpt of it, or the report of a step of the document's code::

    <!-- dump: train_step/program-0/99_lowered.py -->
    <!-- dump: train_step/program-0/*_wait_late.py, 15 lines from: # ---- backward -->
    <!-- report: train_step -->
"""

from __future__ import annotations

import io
import pkgutil
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import train_gpt
from rich.console import Console
from torch.distributed.run import get_args_parser as torchrun_parser

from benchmarks import auto, gpu_day, resident, roles
from spmd.cli import commands as spmd_command
from spmd.rules import RULES, user_rules
from tests.harness.api_page import page as api_page
from tests.harness.fake import fake_world

TORCH = "2.13."  # other versions decompose mse_loss into other ops
ROOT = Path(__file__).parents[1]
DOCUMENTS = {path.relative_to(ROOT).as_posix(): path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SHOWN = re.compile(r"(<!-- (dump|report|diff): (.+?) -->\n```\w+\n)(.*?)(^```)", re.DOTALL | re.MULTILINE)
EXCERPT = re.compile(r"(\S+), (\d+) lines from: (.+)")


def blocks(document: str, language: str) -> list[str]:
    """The code of a language, in order, without what dumps, reports and diffs wrote."""
    text = SHOWN.sub("", DOCUMENTS[document].read_text())
    return [body for kind, body in BLOCK.findall(text) if kind == language]


WITH_CODE = [each for each in DOCUMENTS if blocks(each, "python") and each != "docs/cookbook.md"]  # test_cookbook.py


@pytest.fixture
def rules_kept() -> Iterator[None]:
    """Forget the rules that a document registers."""
    before, registered = dict(RULES), [*user_rules.registered]
    yield
    RULES.clear()
    RULES.update(before)
    user_rules.registered[:] = registered  # a process whose user has rules keeps no compiled steps


@pytest.mark.slow
@pytest.mark.usefixtures("rules_kept")
@pytest.mark.parametrize("document", WITH_CODE)
def test_code_runs_and_dumps_are_todays(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    script = tmp_path / "train.py"
    script.write_text("\n".join(blocks(document, "python")))
    names: dict[str, Any] = {"__name__": "train"}
    with fake_world(2):
        exec(compile(script.read_text(), str(script), "exec"), names)

    text = DOCUMENTS[document].read_text()
    today = SHOWN.sub(lambda found: found[1] + shown(found[2], found[3], names) + found[5], text)
    if request.config.getoption("--renew"):
        DOCUMENTS[document].write_text(today)
    elif torch.__version__.startswith(TORCH):
        assert text == today


def shown(kind: str, what: str, names: dict[str, Any]) -> str:
    """The text of a dump, from its function on, of a diff, or of a report, without its seconds."""
    if kind == "diff":
        step, stage = what.split()
        return f"{names[step].diff(stage)}\n"
    if kind == "report":
        console = Console(file=io.StringIO(), width=100)
        console.print(replace(names[what].report(), seconds={}, passes=()))
        return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]
    excerpt = EXCERPT.fullmatch(what)
    (dump,) = Path("runs").glob(excerpt[1] if excerpt else what)
    text = dump.read_text()
    if not excerpt:
        return text[text.index("def program(") :]
    lines = text.splitlines(keepends=True)
    start = next(number for number, line in enumerate(lines) if excerpt[3] in line)
    return "".join(lines[start : start + int(excerpt[2])])


def spans(document: str) -> list[str]:
    """What stands between single backticks outside of code blocks."""
    text = BLOCK.sub("", DOCUMENTS[document].read_text())
    return re.findall(r"`([^`\n]+)`", text)


def commands(document: str) -> list[str]:
    """The lines of shell blocks, and the targets of make and commands of ours that the text names."""
    lines = [line for block in blocks(document, "sh") for line in block.replace("\\\n", "").splitlines()]
    return [*lines, *(span for span in spans(document) if re.match(r"make |pytest |python |spmd run ", span))]


COMMANDS = [(document, command) for document in DOCUMENTS for command in dict.fromkeys(commands(document))]


@pytest.mark.parametrize(("document", "command"), COMMANDS)
def test_commands_can_be_given(document: str, command: str) -> None:
    words = shlex.split(command, comments=True)
    match words:
        case ["make", target, *rest]:
            targets_exist(words)
            check_options(target, [word.removeprefix("ARGS=") for word in rest if word.startswith("ARGS=")])
        case ["torchrun", *options]:
            torchrun_parser().parse_args(["2" if "$" in word else word for word in options])
        case ["spmd", *options] | ["python", "-m", "spmd", *options]:
            spmd_command.parser(options).parse_args(options)
        case ["python", "-m", "benchmarks.resident", *options]:
            resident.parse(options)
        case ["python", "-m", "benchmarks.gpu_day", *options]:
            gpu_day.parse(options)
        case ["python", "-m", "benchmarks.auto", *options]:
            auto.parse(options)
        case ["python", "-m", "benchmarks.roles", *options]:
            roles.parse(options)
        case ["python", "-m", module, *_]:
            assert find_spec(module) is not None
        case ["python", script, *_]:
            assert (ROOT / script).exists()
        case ["pytest", *options]:
            assert all(
                word in ("--renew", "--exhaustive", "--backend", "inductor") or (ROOT / word).exists()
                for word in options
            )
        case _:
            raise AssertionError(f"nothing here checks {command!r}")


def targets_exist(words: list[str]) -> None:
    if shutil.which("make") is None:
        pytest.skip("no make")
    done = subprocess.run([*words, "-n"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def check_options(target: str, arguments: list[str]) -> None:
    """Parse what ``make train`` passes on."""
    for options in arguments:
        if target == "train":
            train_gpt.parse(shlex.split(options))


@cache
def paths() -> frozenset[str]:
    """Every file and folder of the repository, folders with a slash at the end."""
    tops = (".ci", "benchmarks", "docs", "examples", "passes", "spmd", "tests")
    found = [*ROOT.glob("*.*"), *(path for top in tops for path in [ROOT / top, *(ROOT / top).rglob("*")])]
    return frozenset(path.relative_to(ROOT).as_posix() + "/" * path.is_dir() for path in found)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_and_names_exist(document: str) -> None:
    wrong = []
    for span in spans(document):
        is_path = re.fullmatch(r"[\w./-]+(\.(py|md|toml)|/)", span) and not re.match(r"\d\d_|runs/", span)
        if is_path and not any(path == span or path.endswith(f"/{span}") for path in paths()):
            wrong.append(span)
        name = re.match(r"(spmd|passes)((?:\.[A-Za-z_]\w*)+)(?=\(|$)", span)
        if name and not is_path and not has(name[1], name[2][1:].split(".")):
            wrong.append(span)
    assert not wrong


@pytest.mark.parametrize("document", DOCUMENTS)
def test_identifiers_occur_in_the_source(document: str) -> None:
    """A single identifier in backticks: a class, an argument, an op. It guards documents against renames."""
    names = {span.rstrip("()") for span in spans(document)}
    known = words() | {word for block in blocks(document, "python") for word in re.findall(r"\w+", block)}
    assert not [name for name in names if re.fullmatch(r"\w*[a-z]\w*", name) and name not in known]


@cache
def words() -> frozenset[str]:
    """Every identifier in the source."""
    tops = ("benchmarks", "examples", "passes", "spmd", "tests")
    files = [path for top in tops for path in (ROOT / top).rglob("*.py") if path != Path(__file__)]
    return frozenset(word for path in files for word in re.findall(r"\w+", path.read_text()))


def has(package: str, attributes: list[str]) -> bool:
    try:
        pkgutil.resolve_name(".".join([package, *attributes]))
    except (AttributeError, ImportError):
        return False
    return True


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", DOCUMENTS[document].read_text())
    assert not [target for target in targets if not (DOCUMENTS[document].parent / target).exists()]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_lines_fit_120_columns(document: str) -> None:
    text = SHOWN.sub("", DOCUMENTS[document].read_text())
    lines = [line for line in text.splitlines() if not line.startswith("|") and "](http" not in line]
    assert not [line for line in lines if len(line) > 120]


def test_the_readme_fits_one_screen() -> None:
    """It is read before anything is installed: what this is, how to try it, and where to go on."""
    text = DOCUMENTS["README.md"].read_text()
    assert len(text.splitlines()) <= 120
    assert len(text.split()) <= 900


def test_the_api_page_has_todays_docstrings(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--renew"):
        DOCUMENTS["docs/api.md"].write_text(api_page())
    assert DOCUMENTS["docs/api.md"].read_text() == api_page()
