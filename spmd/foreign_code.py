"""Code that holds no settings of the user's: Python's standard library, torch with what it traces with, and our own."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import torch

import passes

_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep
_SITE = ("site-packages", "dist-packages")
_PACKAGES = {"torch", "spmd", "passes", "sympy", "mpmath", "numpy", "networkx"}  # torch traces with these
_OURS = tuple(f"{path.absolute()}{os.sep}" for path in (Path(__file__).parent, Path(passes.__file__).parent))
_TORCH = os.path.dirname(torch.__file__) + os.sep


def is_foreign_file(filename: str) -> bool:
    """Whether a file is Python's, torch's or ours, so that its globals are no settings of the user's."""
    if filename.startswith((_TORCH, *_OURS, "<")):
        return not filename.startswith(("<stdin", "<ipython"))
    for site in _SITE:
        if site in filename:
            return filename.partition(site)[2].split(os.sep)[1] in _PACKAGES
    return filename.startswith(_PYTHON)


def is_library_file(filename: str) -> bool:
    """Whether a file belongs to an installed package."""
    return any(site in filename for site in _SITE)


def is_foreign_module(name: str) -> bool:
    """The same by the full name of a module."""
    root = name.partition(".")[0]
    return root in _PACKAGES or root in sys.stdlib_module_names
