"""A step in a Python file, and its arguments, for the commands that take ``FILE:STEP``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from ..step import CompiledStep


def load_step(which: str, args: str) -> tuple[Any, tuple[Any, ...]]:
    """The step of a file, and its arguments. Raises ``ValueError`` with the names there are for one that is not."""
    path, _, name = which.rpartition(":")
    if not path or not name:
        raise ValueError(f"expected FILE:STEP, such as train.py:train_step, got {which!r}")
    module = imported(Path(path))
    steps = [key for key, value in vars(module).items() if isinstance(value, CompiledStep)]
    step = _attribute(module, name)
    if not isinstance(getattr(step, "__func__", step), CompiledStep):
        raise ValueError(
            f"{path} has no compiled step {name!r}; it has {', '.join(steps) or 'none'}. One that is a method goes by "
            "trainer.step, or by Trainer.step with the trainer as the first argument"
        )
    make = getattr(module, args, None)
    if not callable(make):
        functions = [key for key, value in vars(module).items() if callable(value) and key not in steps]
        raise ValueError(
            f"{path} has no function {args!r}: let one return the arguments of {name} with the whole batch, and name "
            f"it with --args; it has {', '.join(functions) or 'none'}"
        )
    given = make()
    return step, tuple(given) if isinstance(given, (tuple, list)) else (given,)


def _attribute(module: Any, name: str) -> Any:
    """The attribute of a module by its path; None if there is none."""
    found = module
    for key in name.split("."):
        found = getattr(found, key, None)
    return found


def imported(path: Path) -> Any:
    """The module of a Python file. Raises ``FileNotFoundError``, with the files that are there, for none."""
    if not path.is_file():
        near = sorted(each.name for each in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise FileNotFoundError(f"there is no file {path}; {path.parent} has {', '.join(near) or 'no Python files'}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "a Python file can be imported"
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))  # as if it were run
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
