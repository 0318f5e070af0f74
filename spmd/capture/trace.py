"""``Trace``: run the user's step once on fakes under ``make_fx``.

In: the function, a call of it, a fake for each piece of state and each tensor argument. Out: a graph with the mutations
that the step made, and the final state. Whatever is swapped for the trace (parameters, optimizer state, flags of
parameter groups, torch's compiling flag) is restored, also when tracing raises.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import fx

from passes import Role

from .._torch import (
    accumulation_hooks,
    compiling,
    eager_selective_checkpoint,
    function_modes,
    gradient_hooks,
    make_fx,
    no_causal_mask_detection,
    tree_unflatten,
    unchecked_distributions,
    use_lazy_graph_module,
    users_global_hooks,
)
from ..answers.answer import Answers
from ..call.argument_logs import Log
from ..call.call import Call
from ..call.rng import refuse_other_generators
from ..call.state import Leaf, StateRef, submodules_of
from ..python_state.effects.carried import Carried
from ..python_state.effects.cleared_gradients import ClearedGradients
from ..python_state.effects.containers import ArgumentEntry, Containers
from ..python_state.effects.lasting_hooks import refuse_lasting_hooks
from ..python_state.lines import line_naming
from ..python_state.reads import Change, Reads, ReadSite
from ..python_state.reads.clocks import refused_clocks
from ..python_state.reads.one_device import one_device
from ..watching.traced import Watching
from .attached import attached_attributes, attached_objects
from .decompositions import first_trace_table
from .fakes import Fakes
from .final_state import FinalState, Incomplete
from .mixed_precision import mixed_precision
from .provenance import Recorder
from .set_data import SetDataCopies
from .state_branches import Branch, StateBranches
from .swap_state import StateSwap
from .symbolic_math import symbolic_math
from .tensor_attributes import constant_attributes
from .values.causal_masks import CausalMasks
from .values.ctc_loss import LengthsAsTensors
from .values.flex_attention import flex_attention_as_ops
from .values.live_ids import ids_of_live_state
from .values.lstm import UnfusedLSTM
from .values.number_arguments import NumberArguments
from .values.questions import Questions
from .values.scalar_indices import ScalarIndices
from .values.symbolic_text import numbers_as_text, tensors_as_text
from .values.tensor_checks import tensor_checks_as_ops
from .values.tensor_copies import TensorCopies
from .values.unread import Unread
from .values.watched_functions import WatchedFunctions


@dataclass
class Trace:
    """One run of the step: ``graph_module()`` traces it, then ``final`` and ``branches`` are there."""

    function: Callable[..., Any]
    call: Call
    fakes: Fakes
    reads: Reads
    carried: Carried
    number_arguments: Collection[int] = ()  # which calls take numbers as they are; see ``NumberArguments``
    lifts_anywhere: bool = False  # whether tensors that are no arguments, wherever the step reads them, are constants
    fixed_numbers: Collection[int] = ()  # which numbers that the step takes out of state are fixed
    fixes_carried: bool = False  # whether numbers that are inputs are their values, each with a program of its own
    guesses: Sequence[bool] = ()  # of answers that no call has shown
    final: FinalState | None = None
    branches: list[Branch] = field(default_factory=list)
    answers: Answers = ()  # to what the step asks of values
    cleared_first: frozenset[str] = frozenset()  # parameters whose gradient the step clears before it reads it
    entries: list[tuple[ArgumentEntry, Change]] = field(default_factory=list)  # of arguments that the step changed
    _state_branches: StateBranches | None = None
    _questions: Questions | None = None
    _caches_casts: bool = True
    _modes: tuple[Any, ...] = ()  # function modes of the user's around the call
    _numbers: dict[str, Any] = field(default_factory=dict)  # symbols of arguments, by name
    _unread: list[weakref.ref[Unread]] = field(default_factory=list)
    _unread_names: list[str] = field(default_factory=list)  # those of them that were read after all
    _pairs: list[tuple[str, torch.Tensor, torch.Tensor]] = field(default_factory=list)  # (name, tensor, its fake)

    def branched_on(self, error: Exception) -> set[int]:
        """The numbers taken out of state whose value the step asked for when it raised ``error``."""
        return self._state_branches.branched_on(error) if self._state_branches is not None else set()

    @property
    def guessed(self) -> list[bool]:
        """The answers of the trace so far that no call has shown."""
        found = self._questions.answers if self._questions is not None else []
        return [each.value for each in found[len(self.call.answers) :]]

    def graph_module(self) -> fx.GraphModule:
        """Trace; the graph's outputs are the traced values of ``final``."""
        self._caches_casts = torch.is_autocast_cache_enabled()  # make_fx turns it off
        self._modes = function_modes()  # it has some of its own
        with use_lazy_graph_module(True):
            made = make_fx(self._run, decomposition_table=first_trace_table(), tracing_mode="fake")(*self.fakes.flat)
        if self._unread_names or any(reference() is not None for reference in self._unread):
            raise TypeError("the step reads, keeps or returns a text among its arguments")
        return made

    def _run(self, *flat: Any) -> list[Any]:
        names = {id(module): name for name, module in self._submodules()}
        self.reads.names.update(names)
        recorder, branches = Recorder(names, self.reads), StateBranches(self.call.slots, self.fixed_numbers)
        self._state_branches = branches
        fakes = self.fakes.as_traced(flat)
        with ExitStack() as stack:
            numbers = fakes.hyper_parameters[len(self.call.hyper_parameters) :]
            numbers = [_value_of(number) if self.fixes_carried else number for number in numbers]
            count = len(self.carried.numbers)
            self._numbers = dict(zip(self.carried.leaves, numbers[count:], strict=True))
            stack.enter_context(self.carried.swapped(numbers[:count], fakes.kept))
            stack.enter_context(numbers_as_text())
            self._pairs = self._tensors(fakes)
            stack.enter_context(attached_attributes(self._pairs))
            swap = StateSwap(self.call, fakes, recorder)
            stack.enter_context(swap.swapped())
            stack.enter_context(_torch_settings())
            stack.enter_context(recorder.watch_modules())
            stack.enter_context(recorder.restored_generators())
            stack.enter_context(refuse_other_generators(lambda name: line_naming(self.reads.code, name)))
            set_data = stack.enter_context(SetDataCopies([*fakes.slots, *fakes.tensors]))
            stack.enter_context(TensorCopies())
            stack.enter_context(LengthsAsTensors())
            stack.enter_context(UnfusedLSTM())
            watched = WatchedFunctions(self.call.inputs, fakes.tensors, swap.fake_of.values(), self.reads)
            stack.enter_context(watched)
            if not fakes.sizes.traced.sizes:
                stack.enter_context(CausalMasks())
            stack.enter_context(flex_attention_as_ops())
            self.number_arguments = stack.enter_context(NumberArguments(self.number_arguments)).calls
            scalar_indices = stack.enter_context(ScalarIndices())
            cleared = stack.enter_context(ClearedGradients(swap.fake_of))
            stack.enter_context(cleared.watch_zero_grad())
            watching = Watching(self.call.watched, swap.fake_of, names)
            questions = Questions(self.call.answers, self.guesses, self.call.likely, self.call.asks_nothing)
            self._questions = stack.enter_context(questions)
            stack.enter_context(questions.of_numbers(lambda error: bool(branches.branched_on(error))))
            self.branches = stack.enter_context(branches).found
            constants = constant_attributes(self._submodules(), self.reads, self.lifts_anywhere)
            recorder.constants = stack.enter_context(constants)
            stack.enter_context(mixed_precision(self.call))
            stack.enter_context(recorder)  # the outermost mode: no other Python code runs inside of an op
            result = self._call_function(fakes, swap, watching, recorder)
            watched.joined.clear()  # the step has ended
            self.cleared_first = frozenset(cleared.names)
            set_data.check_end()
            scalar_indices.check_end()
            final = FinalState.of(swap, result, self.carried, self.reads, self.entries).map_state(set_data.current)
            results = list(map(set_data.current, final.results))
            self.final = replace(final, results=results, asked=questions.values, watched=watching.found())
            self.answers = tuple(questions.answers)
            branches.check_end(self.final.slots)
            return self.final.traced()

    def _call_function(self, fakes: Fakes, swap: StateSwap, watching: Watching, recorder: Recorder) -> Any:
        stand_ins = self._stand_ins(fakes)
        args, kwargs = tree_unflatten(stand_ins, self.call.arguments.spec)
        leaves, found = self.call.arguments.leaves, self.call.arguments.found
        self.reads.names.update((id(leaf.value), leaf.name) for leaf in leaves)
        self.reads.names.update((id(each.value), each.name) for each in found)
        self._name_instance()
        names = {id(given): leaf.name for leaf, given in zip(leaves, stand_ins, strict=True)}
        containers = Containers.of((args, kwargs), names)
        self.reads.stand_ins = swap.by_id
        self.reads.journals.carry = _carry
        held = [*swap.objects_in_groups(), *attached_objects(self._pairs)]
        self.call.remove_library_hooks()  # of an earlier trace, after which attributes were as before
        with (
            self.reads.watch(self.function, *[leaf.value for leaf in leaves], *self._around(swap), held=held),
            swap.watched_optimizer_state(),
            _cached_casts(self._caches_casts),
            self.reads.journals.recorded_prints(),
            self.reads.journals.recorded_logging(),
            self.reads.refusals.refused_streams(),
            refused_clocks(),
            one_device() as place,
            recorder.collectives.with_autograd(),
            tensors_as_text(),
            tensor_checks_as_ops(),
            ids_of_live_state(swap.live_and_fakes),
            refuse_lasting_hooks(
                [*self._submodules(), *swap.optimizers.items()],
                *(swap.live_of, swap.fake_of),
                self.reads,
                self.call.library_hooks,
            ),
            watching.of_step(),
        ):
            result = self.function(*args, **kwargs)
        recorder.collectives.check_end(place.asked_size)
        self.entries = list(containers.changes(names))
        return result

    def _stand_ins(self, fakes: Fakes) -> list[Any]:
        """The leaves of the arguments, with fakes."""
        tensors = {x.name: fake for x, fake in zip(self.call.inputs, fakes.tensors, strict=True)}
        first: dict[tuple[Any, ...], torch.Tensor] = {}  # a tensor that is passed twice is one in the step, too
        for x in self.call.inputs:
            tensors[x.name] = first.setdefault((id(x.value), x.placement), tensors[x.name])
        state = {slot.input.name: fake for slot, fake in zip(self.call.slots, fakes.slots, strict=True)}

        def stand_in(leaf: Leaf) -> Any:
            if isinstance(leaf.value, StateRef):
                return state[leaf.value.name]
            if isinstance(leaf.value, torch.Tensor):
                return tensors[leaf.name]
            if isinstance(leaf.value, Log):
                journal = self.reads.journals.by_id[id(leaf.value.container)]
                journal.arguments.append((leaf.name, leaf.value.path))
                return journal.stand_in
            if leaf.name in self.carried.unread:
                self._unread.append(weakref.ref(unread := Unread(leaf.name, self._unread_names)))
                return unread
            return self._numbers.get(leaf.name, self.reads.refusals.stand_in(leaf.value, leaf.name) or leaf.value)

        return list(map(stand_in, self.call.arguments.leaves))

    def _around(self, swap: StateSwap) -> list[Any]:
        """The user's code that runs besides the function: hooks on parameters, and function modes."""
        found = [(f"a hook on {name}", hook) for name, live in swap.live_of.items() for hook in _hooks_on(live)]
        found += [("a hook on all modules or optimizers", hook) for hooks in users_global_hooks() for hook in hooks]
        found += [("a function mode", mode) for mode in self._modes]
        self.reads.names.update((id(each), name) for name, each in found)
        return [each for _, each in found]

    def _tensors(self, fakes: Fakes) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Parameters, buffers and tensor arguments, while no fake is in the place of state."""
        slots = zip(self.call.slots, fakes.slots, strict=True)
        found = [(slot.input.name, slot.get(), fake) for slot, fake in slots if slot.input.role in _OF_MODULES]
        return found + [(x.name, x.value, fake) for x, fake in zip(self.call.inputs, fakes.tensors, strict=True)]

    def _name_instance(self) -> None:
        """Let messages call the object whose method the step is by the method's own name for it: ``self``."""
        if isinstance(self.function, types.MethodType):
            code = getattr(self.function.__func__, "__code__", None)
            name = code.co_varnames[0] if code is not None else "self"
            self.reads.names.setdefault(id(self.function.__self__), name)

    def _submodules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        return submodules_of(self.call.arguments.modules)


_OF_MODULES = (Role.PARAMETER, Role.BUFFER)


def _value_of(number: Any) -> Any:
    """The value of a symbol, of which the program holds for no other; any other number as it is."""
    kinds = {torch.SymInt: int, torch.SymFloat: float}
    return kinds.get(type(number), lambda value: value)(number)


def _hooks_on(parameter: torch.Tensor) -> list[Any]:
    return [hook for hooks in (gradient_hooks, accumulation_hooks) for hook in (hooks(parameter) or {}).values()]


def _carry(sites: list[ReadSite]) -> NoReturn:
    raise Incomplete(Carried(sites=tuple(sites)))


@contextmanager
def _torch_settings() -> Iterator[None]:
    """Set torch so that the step can be traced."""
    with (
        torch.set_grad_enabled(torch.is_grad_enabled()),  # restored, also where a step is interrupted
        compiling(),
        eager_selective_checkpoint(),
        unchecked_distributions(),
        no_causal_mask_detection(),
        symbolic_math(),
        _without_flat_weights(),
        torch.autograd.set_multithreading_enabled(False),
    ):
        yield


@contextmanager
def _cached_casts(enabled: bool) -> Iterator[None]:
    """Let autocast cast a parameter once in a region, as in eager: also where the step updates it in between."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(before)


@contextmanager
def _without_flat_weights() -> Iterator[None]:
    """Leave the weights of recurrent modules where they are: on CUDA each forward may ask for their addresses."""
    before = torch.nn.RNNBase.flatten_parameters
    torch.nn.RNNBase.flatten_parameters = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.RNNBase.flatten_parameters = before  # type: ignore[method-assign]
