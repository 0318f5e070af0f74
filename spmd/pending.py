"""Whatever looks at state from outside of compiled steps finishes the updates that these have deferred.

While an update is pending, hooks on its modules and optimizers finish it before a state dict is made or loaded, before
a forward or an optimizer's step outside of compiled steps, and before a module is copied or pickled. ``spmd.save`` and
the like call ``finish_pending``, and so does the end of the process. To finish an update takes all its ranks.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterable
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from .source_lines import warn_user

# One call after the other, of all steps: they share connections with the other ranks, and programs share memory.
calling = threading.RLock()

_GETSTATE = "__getstate__"


class Finisher(Protocol):
    """What has an update pending."""

    def owners(self) -> list[Any]:
        """The modules and optimizers whose state it updates."""

    def finish_pending(self) -> None:
        """Run the update, on all ranks together, if it is still pending."""


def add(finisher: Finisher) -> None:
    """Note that an update is pending."""
    _remove_stale()
    if id(finisher) not in _pending:
        _pending[id(finisher)] = Hooks(finisher)


def remove(finisher: Finisher) -> None:
    """Note that no update is pending any more.

    Inside of one of the hooks they stay up to the next compiled call: torch is just going through them.
    """
    if id(finisher) in _pending:
        _stale.append(_pending.pop(id(finisher)))
    if not _hooks_running:
        _remove_stale()


def pending_on(owners: Iterable[Any]) -> list[Finisher]:
    """What has an update of one of ``owners`` pending, in the order in which they became so."""
    _remove_stale()
    found = set(map(id, owners))
    each = [hooks.finisher for hooks in _pending.values()]
    return [finisher for finisher in each if any(id(owner) in found for owner in finisher.owners())]


def finish_pending() -> None:
    """Finish all updates that are pending in this process. All ranks call it together."""
    for hooks in list(_pending.values()):
        hooks.finisher.finish_pending()


class Hooks:
    """The hooks by which one pending update is finished before anybody else looks at the state that it writes."""

    def __init__(self, finisher: Finisher) -> None:
        self.finisher = finisher
        owners = finisher.owners()
        self._modules = {id(m): m for each in owners if isinstance(each, nn.Module) for m in each.modules()}
        self._optimizers = [each for each in owners if isinstance(each, Optimizer)]
        self._handles = [
            register_module_forward_pre_hook(self._before_forward),
            register_optimizer_step_pre_hook(self._before_step),
        ]
        watched: list[Any] = [*self._modules.values(), *self._optimizers]
        for each in watched:
            self._handles.append(each.register_state_dict_pre_hook(self._finish))
            self._handles.append(each.register_load_state_dict_pre_hook(self._finish))
        for module in self._modules.values():
            vars(module)[_GETSTATE] = _CopiedState(module, self)

    def remove(self) -> None:
        """Leave nothing behind."""
        for handle in self._handles:
            handle.remove()
        self.remove_copied_states()

    def remove_copied_states(self) -> None:
        """Let copies be made as ever."""
        for module in self._modules.values():
            vars(module).pop(_GETSTATE, None)

    def _finish(self, *_: Any) -> None:
        global _hooks_running
        _hooks_running += 1
        try:
            self.finisher.finish_pending()
        finally:
            _hooks_running -= 1

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if id(module) in self._modules:
            self._finish()

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if any(each is optimizer for each in self._optimizers):
            self._finish()


class _CopiedState:
    """What ``copy`` and ``pickle`` ask a module for, in the place of its class's ``__getstate__``."""

    def __init__(self, module: nn.Module, hooks: Hooks) -> None:
        self._module, self._hooks = module, hooks

    def __call__(self) -> Any:
        self._hooks.finisher.finish_pending()
        self._hooks.remove_copied_states()
        return self._module.__getstate__()


def _remove_stale() -> None:
    while _stale:
        _stale.pop().remove()


def _finish_at_exit() -> None:
    try:
        finish_pending()
    except Exception as error:
        warn_user(f"the update of the last call was not finished at the end of the process: {error}. Call flush()")


_pending: dict[int, Hooks] = {}  # by the id of what has an update pending
_stale: list[Hooks] = []  # of those that have finished
_hooks_running = 0
atexit.register(_finish_at_exit)
