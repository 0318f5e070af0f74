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

_KEPT = 2  # the second one follows an equal one, as most do


def shortened(
    step: CompiledStep[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, int]]:
    """Copies of the arguments with fewer blocks, all parameters on the meta device; and how many blocks there were.

    These counts are by the name of the first of equal blocks that are left. Optimizers lose what the models lose.
    """
    given = step.read(args, dict(kwargs))
    modules = list(given.modules.values())
    memo = {id(each): _on_meta(each) for module in modules for each in module.parameters()}
    args, kwargs = copy.deepcopy((args, dict(kwargs)), memo)
    given, counts = step.read(args, dict(kwargs)), dict[str, int]()
    for name, module in given.modules.items():
        for path, container in list(module.named_modules()):
            if isinstance(container, (nn.ModuleList, nn.Sequential)):
                counts |= _shorten(container, f"{name}.{path}" if path else name)
    left = {id(each) for module in given.modules.values() for each in module.parameters()}
    for optimizer in given.optimizers.values():
        _keep(optimizer, left)
    return args, dict(kwargs), counts


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)


def _shorten(container: nn.ModuleList | nn.Sequential, name: str) -> dict[str, int]:
    """Leave two of each kind of blocks, by their parameters; how many there were, by the name of the first."""
    kinds = [_signature(each) for each in container]
    seen, counts, positions = Counter[Signature](), Counter(kinds), list[int]()
    first = dict[Signature, int]()
    for k, kind in enumerate(kinds):
        seen[kind] += 1
        if not kind or len({leaf.rpartition(".")[0] for leaf, _ in kind}) < 2 or seen[kind] <= _KEPT:
            first.setdefault(kind, len(positions))
            positions.append(k)
    for k in reversed(range(len(kinds))):
        if k not in positions:
            del container[k]
    return {f"{name}.{first[kind]}": count for kind, count in counts.items() if count > _KEPT}


def _signature(module: nn.Module) -> Signature:
    return tuple((name, tuple(each.shape)) for name, each in module.named_parameters())


def _keep(optimizer: Optimizer, left: set[int]) -> None:
    for group in optimizer.param_groups:
        group["params"] = [each for each in group["params"] if id(each) in left]
    for each in [each for each in optimizer.state if id(each) not in left]:
        del optimizer.state[each]
