"""No stale hit: once one line of a model is another one, a call finds no entry in the cache (``spmd/cache``).

Files stay as they are, since these are compared, too: each edit is of the code that would run, in memory.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from examples.gpt import GPT, Config
from spmd import capture_call
from spmd.cache.code_digests import code_digest, nested_codes

from .catalog import ENTRIES
from .examine import Training
from .test_recommender import Clicks


class TracedError(Exception):
    """Raised in place of a trace."""


def language_step(model: nn.Module, optimizer: Any, tokens: Tensor) -> Tensor:
    """Each token but the first is guessed."""
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def gpt() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step of the examples' model, with its arguments."""
    model = GPT(Config(width=8, layers=1, heads=2, context=8, vocabulary=11))
    return language_step, (model, torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(2, 9, dtype=torch.int64))


def case(made: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step of a case, with its arguments."""
    return made.step, (*made.build(), *made.part(0, 0))


MODELS: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "gpt": gpt,
    "recommender": lambda: case(Clicks()),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    zoo = [entry.name for entry in ENTRIES] if metafunc.config.getoption("exhaustive") else []
    metafunc.parametrize("name", [*MODELS, *zoo])


def functions_of(model: nn.Module) -> list[FunctionType]:
    """The functions of the model's own classes, but for those that build it."""
    classes = dict.fromkeys(cls for module in model.modules() for cls in type(module).__mro__)
    own = [cls for cls in classes if cls.__module__.partition(".")[0] not in ("torch", "builtins")]
    found = [value for cls in own for value in vars(cls).values() if isinstance(value, FunctionType)]
    return [each for each in dict.fromkeys(found) if each.__name__ != "__init__" and not each.__code__.co_freevars]


def edits_of(function: FunctionType) -> Iterator[CodeType]:
    """The code of a function with one line edited: what it assigns, adds or returns becomes twice as much."""
    text = inspect.getsource(sys.modules[function.__module__])
    assert code_digest(_compiled(text, function)) == code_digest(function.__code__), function
    lines = {line for *_, line in function.__code__.co_lines()}
    for statement in ast.walk(ast.parse(text)):
        value = getattr(statement, "value", None)
        if isinstance(statement, (ast.Assign, ast.Return, ast.AugAssign)) and value and value.lineno in lines:
            edited = text.splitlines()
            end, row = value.end_col_offset, value.end_lineno - 1
            edited[row] = f"{edited[row][:end]}) * 2{edited[row][end:]}"
            start, row = value.col_offset, value.lineno - 1
            edited[row] = f"{edited[row][:start]}({edited[row][start:]}"
            yield _compiled("\n".join(edited), function)


def _compiled(text: str, function: FunctionType) -> CodeType:
    own = function.__code__
    module = compile(text, own.co_filename, "exec", dont_inherit=True)
    found = (code for code in nested_codes(module) if code.co_qualname == own.co_qualname)
    return next(code for code in found if code.co_firstlineno == own.co_firstlineno)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_no_entry_is_found_once_a_line_is_edited(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of transformers may have no entry at all, for a reason that the report gives."""
    entries = {entry.name: entry for entry in ENTRIES}
    step, objects = MODELS[name]() if name in MODELS else case(Training(entries[name], momentum=0.0))
    compiled = spmd.compile(step, cache=tmp_path / "cache")
    compiled(*objects)
    if not list((tmp_path / "cache").iterdir()):
        assert name not in MODELS and any(note.startswith("not kept") for note in compiled.report().notes)
        return
    spmd.compile(step, cache=tmp_path / "cache")(*objects)

    def refuse(*_: Any) -> Any:
        raise TracedError

    monkeypatch.setattr(capture_call, "capture", refuse)
    spmd.compile(step, cache=tmp_path / "cache")(*objects)
    count = 0
    for function in functions_of(objects[0]):
        for code in edits_of(function):
            with monkeypatch.context() as context:
                context.setattr(function, "__code__", code)
                with pytest.raises(TracedError):
                    spmd.compile(step, cache=tmp_path / "cache")(*objects)
            count += 1
    assert count >= 5
