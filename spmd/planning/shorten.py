"""Shorten the models of a step: of equal blocks that follow each other in a container, two stand for all."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from passes.analysis.repeated_blocks import Signature

from ..step import CompiledStep

_CONTAINERS = (nn.ModuleList, nn.Sequential)
_KEPT = 2  # the second one follows an equal one, as most do


def shortened(
    step: CompiledStep[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, int]]:
    """Copies of the arguments with fewer blocks, all parameters on the meta device; and how many blocks there were.

    These counts are by the name of the first of equal blocks that are left. Optimizers lose what the models lose.
    """
    given = step.runner.read(args, dict(kwargs))
    modules = list(given.modules.values())
    memo = {id(each): _on_meta(each) for module in modules for each in module.parameters()}
    args, kwargs = copy.deepcopy((args, dict(kwargs)), memo)
    given, counts = step.runner.read(args, dict(kwargs)), dict[str, int]()
    for name, module in given.modules.items():
        found = list(module.named_modules(prefix=name))
        repeating = [
            path for path, each in found if isinstance(each, _CONTAINERS) and max(_counts(each).values(), default=0) > 1
        ]
        for path, container in found:
            if path in repeating and not any(path.startswith(f"{outer}.") for outer in repeating):
                counts |= _shorten(container, path)  # what is in a block counts with it
    left = {id(each) for module in given.modules.values() for each in module.parameters()}
    for optimizer in given.optimizers.values():
        _keep(optimizer, left)
    return args, dict(kwargs), counts


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)


def _counts(container: nn.Module) -> Counter[Signature]:
    """Count the blocks of each kind in a container; a block has parameters in several leaf modules."""
    kinds = map(_signature, container.children())
    return Counter(k for k in kinds if len({leaf.rpartition(".")[0] for leaf, _ in k}) > 1)


def _shorten(container: nn.Module, name: str) -> dict[str, int]:
    """Leave two of each kind of block; how many there were, by the name of the first."""
    assert isinstance(container, _CONTAINERS), "only these are shortened"
    counts, seen, first, left = _counts(container), Counter[Signature](), dict[Signature, int](), 0
    dropped = []
    for k, block in enumerate(container):
        kind = _signature(block)
        seen[kind] += 1
        if kind in counts and seen[kind] > _KEPT:
            dropped.append(k)
            continue
        first.setdefault(kind, left)
        left += 1
    for k in reversed(dropped):
        del container[k]
    return {f"{name}.{first[kind]}": count for kind, count in counts.items() if count > _KEPT}


def _signature(module: nn.Module) -> Signature:
    return tuple((name, tuple(each.shape)) for name, each in module.named_parameters())


def _keep(optimizer: Optimizer, left: set[int]) -> None:
    for group in optimizer.param_groups:
        group["params"] = [each for each in group["params"] if id(each) in left]
    for each in [each for each in optimizer.state if id(each) not in left]:
        del optimizer.state[each]
