"""``Captured``: a captured step, and where the outputs of its program belong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from passes import Program
from passes.analysis.reachability import ancestors

from .._torch import TreeSpec, tree_unflatten
from ..answers.answer import Answers
from ..call.dynamic_dims import DynamicSize
from ..python_state.effects.carried import Carried
from ..python_state.effects.repeated import Effect
from ..python_state.effects.writes import Write
from ..python_state.reads import ReadSite
from ..watching.watch import Spec, Watched
from .hyper_conditions import HyperGuards
from .sizes.size_symbols import NO_SIZES, SizeSymbols


@dataclass(frozen=True)
class FromOutput:
    """A value that the graph computes, by its index among the outputs that are no updates."""

    index: int


@dataclass(frozen=True)
class NewState:
    """State that the step makes, and where it is stored after the call."""

    parameter: str  # or the text that has the entry; where ``key`` is None, the value itself
    value: Any  # ``FromOutput``, or a plain Python value; or lists, tuples and dicts of them
    optimizer: str = ""  # empty for a gradient
    key: Any = None
    unless: FromOutput | None = None  # true in a call that does not make it after all


@dataclass
class Captured:
    """The program of a step, its guards on numbers, and where its outputs belong."""

    program: Program
    guards: HyperGuards
    constants: list[torch.Tensor]
    result_leaves: list[Any]  # plain values, and ``FromOutput`` for each traced one
    result_spec: TreeSpec
    new_state: list[NewState]
    cleared_gradients: list[str]  # parameters whose stored gradient the step sets to None
    carried: Carried  # Python state that the program takes as inputs
    writes: list[Write | Effect]  # to Python state
    requires_grad: dict[str, bool]  # of parameters for which the step changes it, by name
    live: bool = False  # whether numbers that were to be inputs are
    fixed: dict[str, Any] = field(default_factory=dict)  # numbers whose value the program depends on, by name
    sizes: SizeSymbols = NO_SIZES  # that stand for sizes of arguments in the program
    is_of_one_size: bool = False  # whether it was made from one that has symbols for sizes
    fixed_sizes: dict[DynamicSize, str] = field(default_factory=dict)  # of these, those that it needs, with the lines
    returns_loss: bool = False  # of a model in train() mode, with a graph, and without a backward pass
    cleared_first: frozenset[str] = frozenset()  # parameters whose gradient is cleared before it is read
    specs: tuple[Spec, ...] = ()  # of the statistics that its calls look at
    watched: dict[Watched, FromOutput] = field(default_factory=dict)  # these, as far as the step has such values
    answers: Answers = ()  # for which it was traced, of the values that the step branches on

    @cached_property
    def code(self) -> str:
        """The text of the program, as ranks compare it: nothing edits it from here on."""
        return self.program.code

    @property
    def constants_read(self) -> list[torch.Tensor]:
        """The constants that each call reads anew; of others the step took values, while it was traced."""
        if not self.constants:
            return []
        nodes, needed = self.program.placeholders, ancestors([self.program.output_node])
        names = {each.name for each, node in zip(self.program.inputs, nodes, strict=True) if node in needed}
        return [each for k, each in enumerate(self.constants) if f"constant.{k}" in names]

    @property
    def leaves_something(self) -> bool:
        """Whether a call puts something somewhere on this rank. Another may log less: ``if get_rank() == 0``."""
        return bool(self.new_state or self.cleared_gradients or self.requires_grad or self.writes)

    def all_carried(self) -> Carried:
        """The state that becomes inputs, and the other sites that the program writes, which may hold tensors then."""
        sites = [write.target for write in self.writes if isinstance(write.target, ReadSite)]
        return self.carried | Carried(sites=tuple(sites))

    def shown(self) -> list[int]:
        """The outputs that users see as results: those of results, and what logs get; by index as ``FromOutput``."""
        effects = [leaf for write in self.writes if isinstance(write, Effect) for leaf in write.leaves]
        return sorted({leaf.index for leaf in [*self.result_leaves, *effects] if isinstance(leaf, FromOutput)})

    def release(self) -> None:
        """Hold on to no Python state: the model is gone."""
        self.writes.clear()
        self.carried = Carried()

    def result(self, outputs: Sequence[Any]) -> Any:
        """The return value of the user's function, from the program's results in order."""
        leaves = [outputs[leaf.index] if isinstance(leaf, FromOutput) else leaf for leaf in self.result_leaves]
        return tree_unflatten(leaves, self.result_spec)
