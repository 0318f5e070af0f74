"""Code that holds no settings of the user's: Python's standard library, torch with what it traces with, and our own."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import passes

_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep
_SITE = ("site-packages", "dist-packages")
_PACKAGES = {"torch", "spmd", "passes", "sympy", "mpmath", "numpy", "networkx"}  # torch traces with these
_PACKAGES |= {"typing_extensions"}  # which torch imports late, while it traces
_OURS = tuple(f"{path.absolute()}{os.sep}" for path in (Path(__file__).parents[1], Path(passes.__file__).parent))
_LOOPS = "spmd.integrations"  # our classes that a user's step computes with: to it they are a library's like any other
_LOOPS_FOLDER = f"{_OURS[0]}integrations{os.sep}"
_TORCH = os.path.dirname(torch.__file__) + os.sep


def is_foreign_file(filename: str) -> bool:
    """Whether a file is Python's, torch's or ours, so that its globals are no settings of the user's."""
    if filename.startswith(_LOOPS_FOLDER):
        return False
    if filename.startswith((_TORCH, *_OURS, "<")):
        return not filename.startswith(("<stdin", "<ipython"))
    for site in _SITE:
        if site in filename:
            return filename.partition(site)[2].split(os.sep)[1].removesuffix(".py") in _PACKAGES
    return filename.startswith(_PYTHON)


def is_foreign_code(code: CodeType, variables: dict[str, Any]) -> bool:
    """The same for code with the globals ``variables``; without a file it is the code of the module that has these.

    ``exec`` and ``python -c`` compile such code. So do torch and named tuples: lambdas, with a dict of their own. Code
    to which somebody gave another name in brackets is not the user's where it has a dict of its own.
    """
    if not code.co_filename.startswith("<"):
        return is_foreign_file(code.co_filename)
    name = variables.get("__name__")
    if name in sys.modules:
        return is_foreign_module(name)
    return code.co_name == "<lambda>" if code.co_filename == "<string>" else is_foreign_file(code.co_filename)


def is_foreign_frame(frame: FrameType) -> bool:
    """The same for code that runs."""
    return is_foreign_code(frame.f_code, frame.f_globals)


def is_importing(frame: FrameType | None) -> bool:
    """Whether code runs for an import that began since ours called the user's code."""
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def is_library_file(filename: str) -> bool:
    """Whether a file belongs to an installed package."""
    return any(site in filename for site in _SITE)


def is_foreign_module(name: str) -> bool:
    """The same by the full name of a module."""
    root = name.partition(".")[0]
    is_loop = f"{name}.".startswith(f"{_LOOPS}.")
    return (root in _PACKAGES and not is_loop) or root in sys.stdlib_module_names
