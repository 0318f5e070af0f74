"""``spmd cache``: list, check and clear."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spmd.cache.folder import Folder
from spmd.cli.commands import main


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["cache", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().out


def test_list_check_and_clear(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder.open(tmp_path / "cache")
    folder.write("a-1-0", {"final.json": b'{"name": "train_step/program-0"}'})
    folder.write("b-1-0", {"final.json": b'{"name": "other/program-0"}'})
    code, shown = run(capsys, "list", "--folder", folder.path)
    assert code == 0 and "train_step/program-0" in shown and "other/program-0" in shown
    assert run(capsys, "check", "--folder", folder.path)[0] == 0
    (folder.path / "a-1-0" / "final.json").write_bytes(b'{"name": "train_step/program-1"}')
    monkeypatch.setenv("SPMD_CACHE", str(folder.path))
    code, shown = run(capsys, "check")
    assert code == 1 and "is damaged" in shown
    code, shown = run(capsys, "check", "--json")
    damage = {row["entry"]: row["damage"] for row in json.loads(shown)}
    assert code == 1 and damage["a-1-0"] and not damage["b-1-0"]
    assert run(capsys, "clear")[0] == 0
    assert not folder.entries()


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = run(capsys, "list", "--folder", tmp_path / "none")
    assert code == 0 and "nothing is kept" in shown
    assert not (tmp_path / "none").exists()


def test_a_folder_that_is_not_private(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    assert run(capsys, "list", "--folder", tmp_path / "cache")[0] == 2
