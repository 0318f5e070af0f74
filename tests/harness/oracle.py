"""The oracle for numbers: the plain step, on one process that holds the whole batch.

A ``Case`` builds modules and optimizers, draws each rank's part of each step's batch, and has the step.
``differences``, a job for the pool, runs the plain step on the parts of all ranks put together, then the compiled step
with this rank's part, and compares everything a user can see after every step: results, parameters, buffers, gradients,
scalers, optimizer state with its keys, their order and its dtypes. No warm-up, other data on every rank, in every step.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten_with_path, tree_map

import spmd

from .pool import Ranks

Snapshot = dict[str, Any]


class Case(ABC):
    """One training run. Subclasses are frozen dataclasses whose fields are options, so that they can be pickled."""

    rtol, atol = 1e-9, 1e-10  # differences in fp64, from the order of sums

    @abstractmethod
    def build(self) -> tuple[Any, ...]:
        """Fresh modules and optimizers: the step's first arguments."""

    @abstractmethod
    def part(self, rank: int, step: int) -> tuple[Any, ...] | dict[str, Any]:
        """The step's other arguments on one rank, by position or by name."""

    @staticmethod
    @abstractmethod
    def step(*args: Any, **kwargs: Any) -> Any:
        """The train step as the user writes it."""

    def whole(self, parts: list[Any]) -> Any:
        """The concatenation of all ranks' parts along dim 0; values without dims are the same on all ranks."""
        return tree_map(lambda *leaves: torch.cat(leaves) if _has_dims(leaves[0]) else leaves[0], *parts)

    def after(self, objects: tuple[Any, ...], step: int) -> None:  # noqa: B027 (most loops do nothing)
        """The rest of the user's loop after a step, such as a scheduler's step."""


@dataclass(frozen=True)
class Later(Case):
    """A case whose third batch is short, whose fourth step evaluates, and whose fifth has a frozen parameter."""

    case: Case

    def build(self) -> tuple[Any, ...]:
        """As the case."""
        return self.case.build()

    def part(self, rank: int, step: int) -> tuple[Any, ...] | dict[str, Any]:
        """As the case, without the last row in the third step."""
        part = self.case.part(rank, step)
        return tree_map(lambda leaf: leaf[:-1] if _has_dims(leaf) else leaf, part) if step == 2 else part

    @property
    def step(self) -> Any:  # type: ignore[override]
        """As the case."""
        return self.case.step

    def whole(self, parts: list[Any]) -> Any:
        """As the case."""
        return self.case.whole(parts)

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        """The loop's other changes, each of which needs a program."""
        self.case.after(objects, step)
        model = objects[0]
        model.train(step != 2)
        if step == 3:
            next(iter(model.parameters())).requires_grad_(False)


def assert_agrees(
    ranks: Ranks, world: int, case: Case, mode: str | dict[str, Any] = "replicate", passes: Any = None, steps: int = 3
) -> None:
    """Fail with a line for each value that differs on any rank. For ``mode`` and ``passes`` see ``differences``.

    Two steps have programs of their own, as an optimizer has no state in the first; the third runs that of the second.
    """
    found = [line for lines in ranks.run(world, differences, case, mode, passes, steps) for line in lines]
    assert not found, f"{len(found)} values differ:\n" + "\n".join(found[:20])


def differences(
    rank: int, world: int, case: Case, mode: str | dict[str, Any] = "replicate", passes: Any = None, steps: int = 3
) -> list[str]:
    """Compare the compiled step with the plain one.

    ``mode``: a style, ``"shard_optimizer"``, or the arguments of ``DataParallel``.
    """
    expected = plain_run(case, world, steps)
    if isinstance(mode, str):
        mode = {"shard_optimizer": True} if mode == "shard_optimizer" else {"parallel_style": mode}
    _, got = compiled_run(rank, case, steps, parallel_mode=spmd.DataParallel(**mode), passes=passes)
    return all_unequal(expected, got, rank, world, case.rtol, case.atol)


def plain_run(case: Case, world: int, steps: int) -> list[Snapshot]:
    """Snapshots after each plain step on the whole batch."""
    torch.manual_seed(0)
    objects = case.build()
    batches = [case.whole([case.part(rank, k) for rank in range(world)]) for k in range(steps)]
    return [_step(case, case.step, objects, batch, k) for k, batch in enumerate(batches)]


def compiled_run(
    rank: int, case: Case, steps: int, seed: int = 0, **options: Any
) -> tuple[spmd.CompiledStep, list[Snapshot]]:
    """``spmd.compile(**options)`` of the step, and snapshots after each of its calls with this rank's part."""
    torch.manual_seed(seed)
    objects = case.build()
    compiled = spmd.compile(**options)(case.step)
    return compiled, [_step(case, compiled, objects, case.part(rank, k), k) for k in range(steps)]


def all_unequal(
    expected: list[Snapshot],
    got: list[Snapshot],
    rank: int,
    world: int,
    rtol: float = Case.rtol,
    atol: float = Case.atol,
) -> list[str]:
    """A line for each value that differs, over all steps."""
    return [
        f"rank {rank} of {world}, step {k}: {line}"
        for k, (want, have) in enumerate(zip(expected, got, strict=True))
        for line in unequal(want, have, rank, world, rtol, atol)
    ]


def random_generator(rank: int, step: int) -> torch.Generator:
    """A source of data that differs from rank to rank and from step to step."""
    return torch.Generator().manual_seed(1000 * step + rank)


def snapshot(result: Any, objects: tuple[Any, ...]) -> Snapshot:
    """Everything a user can see, by name, as full values. All ranks must call it together."""
    seen: Snapshot = {f"result{path}": _whole(value) for path, value in _leaves(result)}
    for path, value in _leaves(objects):
        if isinstance(value, nn.Module):
            seen |= {f"module{path} {name}": seen_value for name, seen_value in _module(value)}
        elif isinstance(value, Optimizer):
            seen |= {f"optimizer{path} {name}": seen_value for name, seen_value in _optimizer(value)}
        elif isinstance(value, torch.amp.GradScaler):
            seen |= {f"scaler{path} {name}": seen_value for name, seen_value in value.state_dict().items()}
    return seen


def unequal(
    expected: Snapshot, got: Snapshot, rank: int, world: int, rtol: float = Case.rtol, atol: float = Case.atol
) -> list[str]:
    """A line for each name whose values differ. A result split along the batch is this rank's part of the whole."""
    missing = [f"{name} is missing" for name in expected if name not in got]
    extra = [f"{name} should not be there" for name in got if name not in expected]
    return (
        missing
        + extra
        + [
            f"{name}: {difference}"
            for name in expected
            if name in got and (difference := _difference(name, expected[name], got[name], rank, world, rtol, atol))
        ]
    )


def _difference(name: str, want: Any, got: Any, rank: int, world: int, rtol: float, atol: float) -> str:
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        return "" if type(want) is type(got) and want == got else f"expected {want!r}, got {got!r}"
    want = _part_like(want, got, rank, world) if name.startswith("result") else want
    try:
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""


def _step(case: Case, step: Any, objects: tuple[Any, ...], batch: Any, k: int) -> Snapshot:
    result = step(*objects, **batch) if isinstance(batch, dict) else step(*objects, *batch)
    seen = snapshot(result, objects)
    case.after(objects, k)
    return seen


def _module(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield "state_dict keys", list(module.state_dict())
    yield "training", module.training
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield name, _whole(parameter)
        yield f"{name} requires_grad", parameter.requires_grad
        yield f"{name}.grad", _whole(parameter.grad)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield name, _whole(buffer)


def _optimizer(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    state = optimizer.state_dict()
    yield "param_groups", copy.deepcopy(state["param_groups"])
    yield "state keys", {index: _structure(entries) for index, entries in state["state"].items()}
    yield "state order", list(state["state"])
    for index, entries in state["state"].items():
        for key, value in entries.items() if isinstance(entries, dict) else [("", entries)]:
            for path, leaf in _leaves(value):
                yield f"{key}{path}[{index}]", _whole(leaf)


def _structure(entries: Any) -> Any:
    """The keys of entries, and of containers in them; a tensor or a number is None."""
    if isinstance(entries, dict):
        return [(key, _structure(value)) for key, value in entries.items()]
    return [type(entries).__name__, *map(_structure, entries)] if isinstance(entries, (list, tuple)) else None


def _whole(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().clone()


def _part_like(whole: Any, got: Any, rank: int, world: int) -> Any:
    """This rank's part of ``whole``, if ``got`` has the shape of one: along one dim, of equal size on every rank."""
    if not isinstance(whole, Tensor) or not isinstance(got, Tensor) or whole.ndim != got.ndim:
        return whole
    split = [d for d, (all_rows, rows) in enumerate(zip(whole.shape, got.shape, strict=True)) if all_rows != rows]
    if len(split) == 1 and got.shape[split[0]] * world == whole.shape[split[0]]:
        return whole.chunk(world, split[0])[rank]
    return whole


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    return [("".join(str(key) for key in path), value) for path, value in tree_flatten_with_path(tree)[0]]


def _has_dims(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0
