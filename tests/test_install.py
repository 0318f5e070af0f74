"""An editable install is found from wherever a script lies."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INSTALL = """
import sys, zipfile
from setuptools import build_meta
folder = sys.argv[1]  # before setuptools has its own there
wheel = build_meta.build_editable(folder)
zipfile.ZipFile(f"{folder}/{wheel}").extractall(folder)
"""
IMPORT = """
import site, sys
site.addsitedir(sys.argv[1])
import spmd, passes
print(spmd.__file__, passes.__file__)
"""


@pytest.mark.processes
def test_a_script_beside_a_clone_imports_the_package_in_it(tmp_path: Path) -> None:
    """Of a clone in a folder called spmd, which Python would take for a package without an ``__init__.py``."""
    clone, installed = tmp_path / "spmd", tmp_path / "installed"
    installed.mkdir()
    for package in ("spmd", "passes"):
        (clone / package).mkdir(parents=True)
        (clone / package / "__init__.py").touch()
    for name in ("pyproject.toml", "README.md", "LICENSE", "spmd/version.py"):
        shutil.copy(ROOT / name, clone / name)

    def run(code: str, folder: Path, *options: str) -> str:
        command = [sys.executable, *options, "-c", code, str(installed)]
        return subprocess.run(command, cwd=folder, env={}, capture_output=True, text=True, check=True).stdout

    run(INSTALL, clone)
    found = run(IMPORT, tmp_path, "-S")  # without what is installed here
    assert found.split() == [str(clone / package / "__init__.py") for package in ("spmd", "passes")]
