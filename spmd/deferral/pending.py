"""Whatever looks at state from outside of compiled steps finishes the updates that these have deferred.

While an update is pending, hooks on its modules and optimizers finish it before a state dict is made or loaded, before
a forward or an optimizer's step outside of compiled steps, before a module or an optimizer is copied or pickled, before
a module is converted (``to``, ``double``) or initialised (``apply``), and before values of split tensors are read or
assigned. ``spmd.save`` and the like call ``finish_pending``, and so does the end of the process. To finish an update
takes all its ranks. What takes the place of state without a hook (``p.data = ...``, an entry of optimizer state) is
found by the next call, and the update is of the memory that the state had (``PendingUpdate.memory``).
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from .._torch import CONVERSION, takes_state_hooks
from ..interpreter.source_lines import warn_user
from ..state.split_tensor import SplitTensor

# One call after the other, of all steps: they share connections with the other ranks, and programs share memory.
calling = threading.RLock()

_METHODS = {"module": ("__getstate__", CONVERSION, "apply"), "optimizer": ("__getstate__",)}  # they look at state


class Finisher(Protocol):
    """An object that has an update pending."""

    def owners(self) -> list[Any]:
        """The modules and optimizers whose state it updates."""

    def finish_pending(self) -> None:
        """Run the update, on all ranks together, if it is still pending."""


def add(finisher: Finisher) -> None:
    """Note that an update is pending."""
    remove_stale()
    if id(finisher) not in _pending:
        _pending[id(finisher)] = Hooks(finisher)


def remove(finisher: Finisher) -> None:
    """Note that no update is pending any more."""
    hooks = _pending.pop(id(finisher), None)
    if hooks is not None:
        hooks.remove()


def pending_on(owners: Iterable[Any]) -> list[Finisher]:
    """The finishers that have an update of one of ``owners`` pending, oldest first."""
    remove_stale()
    found = set(map(id, owners))
    each = [hooks.finisher for hooks in _pending.values()]
    return [finisher for finisher in each if any(id(owner) in found for owner in finisher.owners())]


def finish_pending() -> None:
    """Finish all updates that are pending in this process. All ranks call it together."""
    for hooks in list(_pending.values()):
        hooks.finisher.finish_pending()


@contextmanager
def no_hooks_on_calls() -> Iterator[None]:
    """Trace a step as if no update of another one was pending: a hook on all optimizers would show in its program."""
    paused = list(_pending.values())
    for hooks in paused:
        hooks.ignore_calls()
    try:
        yield
    finally:
        for hooks in paused:
            hooks.watch_calls()


class Hooks:
    """The hooks by which one pending update is finished before anybody else looks at the state that it writes."""

    def __init__(self, finisher: Finisher) -> None:
        self.finisher = finisher
        owners = finisher.owners()
        self._modules = {id(m): m for each in owners if isinstance(each, nn.Module) for m in each.modules()}
        self._optimizers = [each for each in owners if isinstance(each, Optimizer)]
        self._handles: dict[str, list[Any]] = {"forward": [], "step": [], "state": []}
        self._methods: list[_Method] = []
        self._running = ""  # the kind of the hook that torch is in
        self.watch_calls()
        watched: list[Any] = [*self._modules.values(), *self._optimizers]
        for each in filter(takes_state_hooks, watched):
            self._handles["state"].append(each.register_state_dict_pre_hook(_BeforeState(self)))
            self._handles["state"].append(each.register_load_state_dict_pre_hook(_BeforeState(self)))
        for owner in watched:
            names = _METHODS["module" if isinstance(owner, nn.Module) else "optimizer"]
            self._methods += [_Method(owner, name, self) for name in names if name not in vars(owner)]

    def watch_calls(self) -> None:
        """Finish the update before a forward, and before a step of an optimizer."""
        self._handles["forward"].append(register_module_forward_pre_hook(self._before_forward))
        self._handles["step"].append(register_optimizer_step_pre_hook(self._before_step))

    def ignore_calls(self) -> None:
        """Do not, until ``watch_calls``."""
        for handle in [*self._handles["forward"], *self._handles["step"]]:
            handle.remove()
        self._handles |= {"forward": [], "step": []}

    def remove(self) -> None:
        """Leave nothing behind, but what torch is just going through: that goes with the next compiled call."""
        while self._methods:
            self._methods.pop().remove()
        for kind, handles in self._handles.items():
            while handles and kind != self._running:
                handles.pop().remove()
        if any(self._handles.values()):
            _stale.append(self)

    def finish(self, kind: str) -> None:
        """Finish the update, within a hook of this kind."""
        self._running = kind
        try:
            self.finisher.finish_pending()
        finally:
            self._running = ""

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if id(module) in self._modules:
            self.finish("forward")

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if any(each is optimizer for each in self._optimizers):
            self.finish("step")


class _BeforeState:
    """A hook before a state dict is made or loaded. It may outlive the update by a while, and nothing waits for a copy.

    A module that is copied, or pickled, with it gets one that does nothing.
    """

    def __init__(self, hooks: Hooks | None) -> None:
        self._hooks = hooks

    def __call__(self, *_: Any) -> None:
        if self._hooks is not None:
            self._hooks.finish("state")

    def __reduce__(self) -> Any:
        return _BeforeState, (None,)


class _Method:
    """A method of a module or optimizer that finishes the update, then calls that of the class."""

    def __init__(self, owner: Any, name: str, hooks: Hooks) -> None:
        self._owner, self._name, self._hooks = owner, name, hooks
        vars(owner)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._hooks.finisher.finish_pending()
        self.remove()
        return getattr(self._owner, self._name)(*args, **kwargs)

    def remove(self) -> None:
        """Leave the method of the class."""
        if vars(self._owner).get(self._name) is self:
            del vars(self._owner)[self._name]


def remove_stale() -> None:
    """Remove the hooks that had to stay while torch went through them."""
    while _stale:
        _stale.pop().remove()


def _finish_at_exit() -> None:
    try:
        finish_pending()
    except Exception as error:
        warn_user(f"the update of the last call was not finished at the end of the process: {error}. Call flush()")


_pending: dict[int, Hooks] = {}  # by the id of what has an update pending
_stale: list[Hooks] = []  # of those that have finished
SplitTensor.before_read.append(finish_pending)
atexit.register(_finish_at_exit)
