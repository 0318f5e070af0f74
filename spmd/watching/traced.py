"""``Watching``: compute the statistics that a call is to have, while its step is traced.

Gradients are looked at where the ``step()`` of an optimizer begins, outputs where a module returns; parameters, what
was added to them and the state of optimizers where the step ends, for a scaler may have taken an update back. What is
looked at twice in a call counts as it was the last time.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from passes import CaptureError

from .._torch import has_own_storage, register_module_forward_hook, tree_flatten
from .statistics import STATISTICS, row_of
from .watch import ALL, Spec, Watched

PARAMETER, GRADIENT, UPDATE, OUTPUT = "", "grad", "update", "output"
_KINDS = (PARAMETER, GRADIENT, UPDATE, OUTPUT)  # any other is a key of the state of an optimizer


class Watching:
    """Looks at what ``specs`` name, of ``parameters``, traced, by name, and ``modules``, names by their id."""

    def __init__(self, specs: Iterable[Spec], parameters: Mapping[str, Tensor], modules: Mapping[int, str]) -> None:
        self._specs, self._parameters, self._modules = tuple(specs), parameters, modules
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._seen: dict[Spec, dict[str, list[Tensor]]] = {spec: {} for spec in self._specs}
        self._before: dict[str, Tensor] = {}
        self._optimizers: dict[int, Optimizer] = {}
        found = {spec: self._kind(spec) for spec in self._specs}
        self._kinds, self._of_names = ({spec: each[k] for spec, each in found.items()} for k in (0, 1))

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """Look at what the step computes, for the length of the context."""
        with ExitStack() as stack:
            if self._specs:
                stack.callback(register_optimizer_step_pre_hook(self._begin_update).remove)
                stack.callback(register_module_forward_hook(self._returned).remove)
            yield
            self._look_at_end()

    def found(self) -> dict[Watched, Tensor]:
        """The statistics of all that was looked at: a row for each that a spec asks for."""
        return {key: value for spec in self._specs for key, value in self._of(spec)}

    def _of(self, spec: Spec) -> Iterator[tuple[Watched, Tensor]]:
        seen = self._seen[spec]
        names = (ALL,) if spec.as_one else tuple(seen)
        for k, statistic in enumerate(spec.statistics if seen else ()):
            each = [values[k] for values in seen.values()]
            yield (spec, names, statistic), row_of(each, STATISTICS[statistic], spec.as_one)

    def _look(self, kind: str, values: Mapping[str, Tensor]) -> None:
        """Compute the statistics of some values of a kind, by the name of what they are of."""
        for spec in self._specs:
            of = self._of_names[spec] if self._kinds[spec] == kind else ""
            named = {name: value for name, value in values.items() if of and _fits(name, of)}
            if not named:
                continue
            with torch.no_grad():
                for name, value in named.items():
                    found = [STATISTICS[each].of(value.detach()) for each in spec.statistics]
                    self._seen[spec][f"{name}.{kind}".removesuffix(".")] = found

    def _begin_update(self, optimizer: Optimizer, *_: Any) -> None:
        updated = self._updated_by(optimizer)
        self._optimizers[id(optimizer)] = optimizer
        self._look(GRADIENT, {name: p.grad for name, p in updated.items() if p.grad is not None})
        if UPDATE in self._kinds.values():
            self._before = {name: p.detach().clone() for name, p in updated.items()} | self._before

    def _returned(self, module: nn.Module, _: Any, output: Any) -> None:
        name = self._modules.get(id(module))
        tensors = [x for x in tree_flatten(output)[0] if isinstance(x, Tensor) and x.is_floating_point()]
        if name is not None and tensors and has_own_storage(tensors[0]):  # else one row of a value, in torch.vmap
            self._look(OUTPUT, {name: tensors[0]})

    def _look_at_end(self) -> None:
        self._look(PARAMETER, self._parameters)
        left = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        seen = {name for of in self._seen.values() for name in of}
        self._look(GRADIENT, {name: g for name, g in left.items() if f"{name}.{GRADIENT}" not in seen})
        self._look(UPDATE, {name: self._parameters[name].detach() - old for name, old in self._before.items()})
        # By dict's own method: a step that looks at the state of an optimizer is traced without what was made ahead.
        updated = [(each, name, p) for each in self._optimizers.values() for name, p in self._updated_by(each).items()]
        held = {name: state for each, name, p in updated if isinstance(state := dict.get(each.state, p), dict)}
        for key in dict.fromkeys(kind for kind in self._kinds.values() if kind not in _KINDS):
            named = {name: state[key] for name, state in held.items() if isinstance(state.get(key), Tensor)}
            if held and not named:
                keys = dict.fromkeys(str(each) for state in held.values() for each in state)
                raise CaptureError(f"watch: the optimizers keep no tensors under {key!r}, but {', '.join(keys)}")
            self._look(key, named)

    def _updated_by(self, optimizer: Optimizer) -> dict[str, Tensor]:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        return {self._names[id(p)]: p for p in held if id(p) in self._names}

    def _kind(self, spec: Spec) -> tuple[str, str]:
        """The kind of values that a pattern is of, and the pattern of names. Raises ``CaptureError`` if none fits."""
        of, _, kind = spec.pattern.rpartition(".")
        names = [*self._modules.values()] if kind == OUTPUT else [*self._parameters]
        if kind not in _KINDS and any(_fits(name, spec.pattern) for name in names):
            return PARAMETER, spec.pattern
        if any(_fits(name, of) for name in names):
            return kind, of
        near = difflib.get_close_matches(of or kind, names, n=3, cutoff=0.3) or names[:3]
        if spec.if_any:
            return (kind, of) if of else (PARAMETER, spec.pattern)
        what = "modules" if kind == OUTPUT else "parameters"
        raise CaptureError(
            f'watch("{spec.pattern}") fits none of the {len(names)} {what} of the step: expected a name, or a pattern '
            f"of some, such as {', '.join(near)}, with .grad, .update, .output or a key of the optimizer's state behind"
        )


def _fits(name: str, pattern: str) -> bool:
    """Whether a name fits, with the argument that holds it in front or without."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.partition(".")[2], pattern)
