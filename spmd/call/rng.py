"""The seed of random ops in compiled steps, for the whole process: one number a call, equal on all ranks.

It is a function of a base seed and of how many calls of compiled steps have drawn so far. The base seed is the user's
(``seed``), or else rank 0 takes it from its default generator when a step first compiles; ranks agree on it while they
compile, so that no call has to communicate. While a step is traced, ``Draws`` numbers the random ops; ops that repeat a
draw get its number.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from passes import CaptureError
from passes.runtime.random import BY_POSITION, default_generator, device_of, mix

from ..interpreter.source_lines import user_lines
from .refusals import refuse


@dataclass
class _State:
    """``chosen``: by the user, so ranks must agree. ``settled``: a checkpoint holds it, so no step changes it."""

    seed: int | None = None
    calls: int = 0
    invariant: bool = False
    chosen: bool = False
    settled: bool = False


_state = _State()


def seed(seed: int | None, *, invariant: bool = False) -> None:
    """Derive all random numbers of compiled steps, from their next call on, from ``seed``. Call it on all ranks.

    With ``invariant=True`` each number depends only on the seed, the call, the op and the index of the element in the
    global tensor: any number of ranks and any parallel mode draw the same. It costs a few more passes over the drawn
    tensor. Without it each rank runs torch's own kernels on its part. ``seed(None)`` restores the state in which a
    process starts: a step that is compiled for the first time takes a seed from rank 0's default generator, so that
    ``torch.manual_seed`` decides.

    Raises ``TypeError`` if ``seed`` is no int. Ranks whose seeds differ raise ``RankMismatchError`` when they compile.
    """
    if seed is None and not invariant:
        return _replace_state(_State())
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"expected the seed to be an int, got {seed!r}")
    _replace_state(_State(seed, 0, bool(invariant), chosen=True, settled=True))


def rng_state() -> dict[str, int | bool]:
    """The random state of compiled steps for a checkpoint, as plain ints and bools.

    With it ``set_rng_state`` makes the next calls draw what they would have drawn here. From then on steps that are
    compiled take over this state, also where ``seed`` was never called.
    """
    _state.seed = _seed_from_torch() if _state.seed is None else _state.seed
    _state.settled = True
    return {"seed": _state.seed, "calls": _state.calls, "invariant": _state.invariant}


def set_rng_state(state: Mapping[str, int | bool]) -> None:
    """Continue from the state that ``rng_state`` returned, in any process. Call it on all ranks.

    Raises ``ValueError`` for anything that is not what ``rng_state`` returns.
    """
    expected = {"seed", "calls", "invariant"}
    if not isinstance(state, Mapping) or set(state) != expected or not all(isinstance(v, int) for v in state.values()):
        raise ValueError(f"expected a dict as spmd.rng_state() returns it, with {sorted(expected)}, got {state!r}")
    _replace_state(_State(int(state["seed"]), int(state["calls"]), bool(state["invariant"]), chosen=True, settled=True))


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore, after the body, the state that random ops of compiled steps and of torch's default generator read."""
    ours, torchs = replace(_state), torch.default_generator.get_state()
    try:
        yield
    finally:
        _replace_state(ours)
        torch.default_generator.set_state(torchs)


@contextmanager
def kept_where(is_unchanged: Callable[[], bool]) -> Iterator[None]:
    """Restore that state if the body raises before it has changed any other: made again, a call draws the same."""
    ours, torchs = replace(_state), torch.default_generator.get_state()
    try:
        yield
    except BaseException:
        if is_unchanged():
            _replace_state(ours)
            torch.default_generator.set_state(torchs)
        raise


def next_call() -> int:
    """The seed of one call of a compiled step that draws."""
    assert _state.seed is not None, "ranks agree on a seed before anything runs"
    _state.calls += 1
    return mix(mix(0, _state.seed), _state.calls) % BY_POSITION + BY_POSITION * _state.invariant


def describe_seed() -> str:
    """The user's choice of seed, which must be equal on all ranks."""
    if not _state.chosen:
        return "no spmd.seed"
    return f"spmd.seed({_state.seed}, invariant={_state.invariant}), {_state.calls} calls since"


def proposed(first: bool) -> list[int]:
    """Rank 0's base seed and call count; a step that is compiled for the ``first`` time may start them anew."""
    if _state.seed is None or (first and not _state.settled):
        return [_seed_from_torch(), 0]
    return [_state.seed, _state.calls]


def adopt(agreed: Sequence[int]) -> None:
    """Take over the base seed and call count of rank 0."""
    _state.seed, _state.calls = agreed


def _replace_state(state: _State) -> None:
    vars(_state).update(vars(state))


def _seed_from_torch() -> int:
    """A number derived from ``torch.manual_seed``, without a draw from the default generator."""
    generator = torch.Generator()
    generator.set_state(torch.default_generator.get_state())
    return int(torch.randint(1 << 62, (), generator=generator).item())


@contextmanager
def refuse_other_generators(line_naming: Callable[[str], str]) -> Iterator[None]:
    """Raise ``CaptureError`` if a trace draws with Python's or numpy's generator, and restore its state.

    The drawn number would be a constant of the program, and the same in each call. So would ``torch.initial_seed()``.
    ``line_naming``: the line of the step's code that has a name.
    """
    before, initial_seed, thread = _foreign_states(), torch.initial_seed, threading.get_ident()

    def refused() -> int:
        if threading.get_ident() == thread:
            refuse(
                CaptureError,
                "the step asks for torch.initial_seed(), which each call of its program would find as it is now. Ask "
                f"outside of the step, and pass the number as an argument\n    {user_lines(sys._getframe(1))}",
            )
        return initial_seed()

    torch.initial_seed = refused
    try:
        yield
    finally:
        torch.initial_seed = initial_seed
    moved = [name for name, state in _foreign_states().items() if name in before and state != before[name]]
    if not moved:
        return
    random.setstate(before["random"])
    if "numpy.random" in before:
        name, keys, *rest = before["numpy.random"]
        sys.modules["numpy"].random.set_state((name, list(keys), *rest))
    refuse(
        CaptureError,
        f"the step draws from {moved[0]}, which a compiled step would do only once, while it is traced. Draw with "
        "torch (torch.rand(()), say), or draw outside of the step and pass the result as a tensor"
        + (f"\n    {line}" if (line := line_naming("random")) else ""),
    )


def _foreign_states() -> dict[str, Any]:
    """The states of the generators of Python and, where it is loaded, of numpy."""
    states: dict[str, Any] = {"random": random.getstate()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy.random"] = (name, tuple(keys), *rest)
    return states


class Draws:
    """Numbers the random ops of one trace: ops that start from the same state of a generator get the same number.

    Nothing is drawn while tracing, so a generator's seed serves as its state, and each draw replaces it by another. If
    the step restores an earlier state, as ``torch.utils.checkpoint`` does before it recomputes, the draws that follow
    get the numbers of the earlier ones.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int], int] = {}

    def number(self, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
        """The number of a random op with these arguments, which is about to be traced."""
        device = device_of(args, kwargs)
        generator = default_generator(device)
        state = generator.initial_seed()
        generator.manual_seed(mix(state, 0))
        return self._numbers.setdefault((device.type, state), len(self._numbers))

    @contextmanager
    def restored_generators(self) -> Iterator[None]:
        """Restore the states of the default generators at the end of the context."""
        cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        states = [(generator, generator.get_state()) for generator in (torch.default_generator, *cuda)]
        for generator, _ in states:
            generator.manual_seed(0xD1CE)  # no seed of the user's, who may set one inside of the step
        try:
            yield
        finally:
            for generator, state in states:
                generator.set_state(state)
