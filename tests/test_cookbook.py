"""The recipes of ``docs/cookbook.md`` leave on two ranks what they leave, without ``spmd.compile``, on one device."""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import spmd
from spmd.publishing import folders

from .harness.pool import Ranks

TEXT = (Path(__file__).parents[1] / "docs" / "cookbook.md").read_text()
CODE = {
    heading: "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    for heading, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
}
RECIPES = [heading for heading in CODE if heading != "Setup"]
MODES = {
    "as written": spmd.DataParallel("fully_shard"),
    "replicate": spmd.DataParallel("replicate"),
    "zero1": spmd.DataParallel("replicate", shard_optimizer=True),
}


@contextmanager
def plain(is_plain: bool) -> Iterator[None]:
    """``spmd.compile`` returns steps as they are, at which hooks look, ``spmd.from_pretrained`` models for them."""
    read = spmd.from_pretrained
    with pytest.MonkeyPatch.context() as patch:
        if is_plain:
            patch.setattr(spmd, "compile", lambda **options: Hooked)
            patch.setattr(spmd, "from_pretrained", lambda folder, mode, **options: read(folder, "replicate", **options))
        yield


class Hooked:
    """A plain step; ``watch`` has the norm of all gradients or updates of the optimizer that it calls, by hooks."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self.step, self.norms = step, {"*.grad": Norm(), "*.update": Norm()}

    def watch(self, pattern: str, statistic: str, as_one: bool) -> Norm:
        assert statistic == "norm" and as_one
        return self.norms[pattern]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before: list[torch.Tensor] = []

        def begin(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            held = parameters_of(optimizer)
            self.norms["*.grad"].of([p.grad for p in held if p.grad is not None])
            before[:] = [p.detach().clone() for p in held]

        def end(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self.norms["*.update"].of([p - old for p, old in zip(parameters_of(optimizer), before, strict=True)])

        hooks = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)
        try:
            return self.step(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()


class Norm:
    """The norm of all of some tensors, as a watch has it."""

    values: dict[str, dict[str, float]]

    def of(self, tensors: list[torch.Tensor]) -> None:
        self.values = {"all": {"norm": torch.cat([x.detach().flatten() for x in tensors]).norm().item()}}


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def left_by(rank: int, world: int, recipe: str, mode: str, folder: Path, is_plain: bool) -> dict[str, Any]:
    """Every model, optimizer and number that a recipe leaves, in fp64; tensors are whole."""
    here, dtype = Path.cwd(), torch.get_default_dtype()
    try:
        os.chdir(folder)
        torch.set_default_dtype(torch.float64)
        names: dict[str, Any] = {"__name__": "recipe"}
        with plain(is_plain), pytest.MonkeyPatch.context() as patch:
            patch.setattr(folders, "MEMORY", memory_of(folder))
            exec(compile(CODE["Setup"], "docs/cookbook.md: Setup", "exec"), names)
            names["mode"] = MODES[mode]
            before = set(names)
            exec(compile(CODE[recipe], f"docs/cookbook.md: {recipe}", "exec"), names)
        return whole({name: value for name, value in names.items() if name not in before})
    finally:
        torch.set_default_dtype(dtype)
        os.chdir(here)


def memory_of(folder: Path) -> Path:
    """Where a recipe publishes that runs in a folder: others run meanwhile, under the same name."""
    return folders.MEMORY / f"spmd-{zlib.crc32(str(folder).encode()):08x}"


def whole(names: dict[str, Any]) -> dict[str, Any]:
    models = {name: value for name, value in names.items() if isinstance(value, nn.Module)}
    optimizers = {name: value for name, value in names.items() if isinstance(value, torch.optim.Optimizer)}
    found = {name: spmd.state_dict(model) for name, model in models.items()}
    found |= {name: spmd.state_dict(nn.Module(), each)[1]["state"] for name, each in optimizers.items()}
    return found | {name: value for name, value in names.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    if isinstance(value, list) and value:
        return all(map(_is_number, value))
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.ndim == 0)


@pytest.mark.parametrize(
    "mode", [name if name == "as written" else pytest.param(name, marks=pytest.mark.exhaustive) for name in MODES]
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_has_the_numbers_of_one_device(recipe: str, mode: str, ranks: Ranks, tmp_path: Path) -> None:
    places = [tmp_path / "plain", tmp_path / "ranks"]
    for place in places:
        place.mkdir()
    assert 'mode = spmd.DataParallel("fully_shard")' in CODE["Setup"]
    try:
        (expected,) = ranks.run(1, left_by, recipe, mode, places[0], True)
        results = ranks.run(2, left_by, recipe, mode, places[1], False)
    finally:
        for place in places:
            shutil.rmtree(memory_of(place), ignore_errors=True)
    assert expected
    for found in results:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
