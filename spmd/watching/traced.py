"""``Watching``: compute the statistics that a call is to have, while its step is traced.

Gradients and the state of an optimizer are looked at where its ``step()`` begins and ends, outputs where a module
returns, parameters where the step ends. What is looked at twice in a call counts as it was the last time.
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
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from passes import CaptureError

from .._torch import register_module_forward_hook, tree_flatten
from .statistics import STATISTICS
from .watch import ALL, Spec, Watched

GRADIENT, UPDATE, OUTPUT = "grad", "update", "output"
_KINDS = (GRADIENT, UPDATE, OUTPUT)


class Watching:
    """Looks at what ``specs`` name, of ``parameters``, traced, by name, and ``modules``, names by their id."""

    def __init__(self, specs: Iterable[Spec], parameters: Mapping[str, Tensor], modules: Mapping[int, str]) -> None:
        self._specs, self._parameters, self._modules = tuple(specs), parameters, modules
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._seen: dict[Spec, dict[str, list[Tensor]]] = {spec: {} for spec in self._specs}
        self._before: dict[str, Tensor] = {}
        for spec in self._specs:
            self._check(spec)

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """Look at what the step computes, for the length of the context."""
        with ExitStack() as stack:
            if self._specs:
                stack.callback(register_optimizer_step_pre_hook(self._begin_update).remove)
                stack.callback(register_optimizer_step_post_hook(self._end_update).remove)
                stack.callback(register_module_forward_hook(self._returned).remove)
            yield
            self._look_at_end()

    def found(self) -> dict[Watched, Tensor]:
        """The statistics of all that was looked at."""
        return {key: value for spec in self._specs for key, value in self._of(spec)}

    def _of(self, spec: Spec) -> Iterator[tuple[Watched, Tensor]]:
        seen = self._seen[spec]
        for k, statistic in enumerate(spec.statistics if seen else ()):
            if spec.as_one:
                each = torch.stack([values[k] for values in seen.values()])
                yield (spec, ALL, statistic), STATISTICS[statistic].as_one(each)
            else:
                yield from (((spec, name, statistic), values[k]) for name, values in seen.items())

    def _look(self, kind: str, values: Mapping[str, Tensor]) -> None:
        """Compute the statistics of some values of a kind, by the name of what they are of."""
        for spec in self._specs:
            wanted, of = _divided(spec.pattern)
            named = {name: value for name, value in values.items() if _fits(name, of)} if wanted == kind else {}
            if not named:
                continue
            with torch.no_grad():
                computed = [STATISTICS[each].of([x.detach() for x in named.values()]) for each in spec.statistics]
            for name, *found in zip(named, *computed, strict=True):
                self._seen[spec][f"{name}.{kind}".removesuffix(".")] = found

    def _begin_update(self, optimizer: Optimizer, *_: Any) -> None:
        updated = self._updated_by(optimizer)
        self._look(GRADIENT, {name: p.grad for name, p in updated.items() if p.grad is not None})
        if any(_divided(spec.pattern)[0] == UPDATE for spec in self._specs):
            self._before |= {name: p.detach().clone() for name, p in updated.items()}

    def _end_update(self, optimizer: Optimizer, *_: Any) -> None:
        updated = self._updated_by(optimizer)
        known = {name: p for name, p in updated.items() if name in self._before}
        self._look(UPDATE, {name: p.detach() - self._before[name] for name, p in known.items()})
        # By dict's own method: a step that looks at the state of an optimizer is traced without what was made ahead.
        held = {name: dict.get(optimizer.state, p, {}) for name, p in updated.items()}
        for key in dict.fromkeys(str(key) for state in held.values() for key in state):
            self._look(key, {name: state[key] for name, state in held.items() if isinstance(state.get(key), Tensor)})

    def _returned(self, module: nn.Module, _: Any, output: Any) -> None:
        name = self._modules.get(id(module))
        tensors = [x for x in tree_flatten(output)[0] if isinstance(x, Tensor) and x.is_floating_point()]
        if name is not None and tensors:
            self._look(OUTPUT, {name: tensors[0]})

    def _look_at_end(self) -> None:
        self._look("", self._parameters)
        left = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        seen = {name for of in self._seen.values() for name in of}
        self._look(GRADIENT, {name: g for name, g in left.items() if f"{name}.{GRADIENT}" not in seen})

    def _updated_by(self, optimizer: Optimizer) -> dict[str, Tensor]:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        return {self._names[id(p)]: p for p in held if id(p) in self._names}

    def _check(self, spec: Spec) -> None:
        """Raise ``CaptureError`` for a pattern that no name of the step fits."""
        kind, of = _divided(spec.pattern)
        names = [*self._modules.values()] if kind == OUTPUT else [*self._parameters]
        if any(_fits(name, of) for name in names):
            return
        near = difflib.get_close_matches(of, names, n=3, cutoff=0.3) or names[:3]
        what = "modules" if kind == OUTPUT else "parameters"
        raise CaptureError(
            f'watch("{spec.pattern}") fits none of the {len(names)} {what} of the step: expected a name, or a pattern '
            f"of some, such as {', '.join(near)}, with .grad, .update, .output or a key of the optimizer's state behind"
        )


def _divided(pattern: str) -> tuple[str, str]:
    """The kind of values that a pattern is of, and the pattern of names; a parameter itself is of no kind."""
    of, _, kind = pattern.rpartition(".")
    return (kind, of) if kind in _KINDS or kind in _STATE else ("", pattern)


# Keys of the state of torch's optimizers, which no parameter is called.
_STATE = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum"),
    *("exp_inf", "row_var", "col_var", "variance", "ax", "prev", "step_size"),
)


def _fits(name: str, pattern: str) -> bool:
    """Whether a name fits, with the argument that holds it in front or without."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.partition(".")[2], pattern)
