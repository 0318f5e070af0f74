"""Capture one call: an earlier capture serves it where only sizes differ, else the step is traced, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .call.argument_logs import LogsFound
from .call.call import Call
from .call.state import submodules_of
from .capture import Captured, capture, in_rank_zero_order
from .capture.sizes.any_size import AnySize, capture_any_size
from .capture.sizes.size_symbols import AS_CALLED, TracedSizes
from .dispatch import Dispatch
from .guards.read_guards import ReadGuards
from .interpreter.source_lines import warn_user
from .options import Options
from .override import Override, replaced
from .python_state.effects.carried import Carried
from .python_state.reads import Reads, ReplacementReads
from .ranks.consensus import Agreement
from .running.describe import text_of
from .shared_captures import SharedCapture


class CapturedCall(NamedTuple):
    """The captured step with the Python state that it reads. ``any_size``: the trace, if it serves other sizes, too."""

    captured: Captured
    reads: Reads | ReadGuards
    any_size: AnySize | None = None

    def for_this_size(self) -> CapturedCall:
        """The same, which is to serve no other sizes."""
        return CapturedCall(replace(self.captured, is_of_one_size=False), self.reads)


def capture_call(
    function: Callable[..., Any],
    call: Call,
    name: str,
    options: Options,
    dispatch: Dispatch,
    agreement: Agreement,
    shared: SharedCapture | None,
    live: Carried,
) -> CapturedCall:
    """The program of a call on global shapes, in rank 0's order. All ranks call it together.

    ``shared`` and ``live`` are as ``Dispatch.find_capture`` finds them. Raises ``CaptureError`` if the step cannot be
    traced.
    """
    if shared is not None:
        found = CapturedCall(shared.capture.at(call, name), shared.guards.reads)
    else:
        found = _Tracing(function, call, name, options.overrides, dispatch, live).trace()
        dispatch.numbers.note_fixed(live, found.captured)
        if found.captured.returns_loss and agreement.is_first_rank:
            warn_user(_RETURNS_LOSS.format(dispatch.name))
        if len(set(agreement.all_gather_text(str(found.any_size is not None)))) > 1:
            found = found.for_this_size()  # some rank could trace it for no other
    captured = in_rank_zero_order(found.captured, call, agreement.all_gather_text)
    agreement.check_captured(text_of(captured, call))
    return CapturedCall(captured, found.reads, found.any_size)


_RETURNS_LOSS = (
    "{} returns a loss and has no backward pass. What a compiled step returns has no graph, so that loss.backward() "
    "outside of it raises an error: call it in the step (the optimizer may stay outside), or, where nothing is to be "
    "trained, compute under torch.no_grad() or in eval() mode"
)


@dataclass(frozen=True)
class _Tracing:
    """The context of a trace. ``live``: numbers that become inputs."""

    function: Callable[..., Any]
    call: Call
    name: str
    overrides: Sequence[Override]
    dispatch: Dispatch
    live: Carried

    def trace(self) -> CapturedCall:
        """Trace the step; once more if optimizer state that was made for it has to go, or gradients are state."""
        call = self.call
        while True:
            try:
                found = self._for_sizes()
            except LogsFound as logs:
                self.dispatch.note_logs(call, logs)
                continue
            again = call.end_idle_state(found.captured.program, self.dispatch.idle)
            if call.without_gradient - found.captured.cleared_first:
                again |= call.leave_out_gradients(call.without_gradient & found.captured.cleared_first)
            if not again:
                return found

    def _for_sizes(self) -> CapturedCall:
        """Trace the step for any of the sizes that change from call to call if that can be, else for those it has."""
        dispatch, call = self.dispatch, self.call
        found, fixed = capture_any_size(self._once, dispatch.open_sizes(call), dispatch.programs.captures(call))
        notes = dispatch.shared.note_fixed(fixed)
        if found is None:
            captured, reads = self._once(AS_CALLED)
        else:
            captured, reads = found[0].at(call, self.name), found[1]
        captured.program.notes += notes
        call.references = reads.references
        return CapturedCall(captured, reads, found[0] if found else None)

    def _once(self, sizes: TracedSizes) -> tuple[Captured, Reads]:
        """Trace the step with what the overrides replace; what they read is guarded as what the step reads."""
        modules = self.call.given.modules
        chosen = ReplacementReads(names={id(module): name for name, module in submodules_of(modules)})
        watch = chosen.watch(*self.overrides) if self.overrides else nullcontext()
        with replaced(modules, self.overrides, watch):
            carried = self.dispatch.carried(self.call)
            captured, reads = capture(self.function, self.call, self.name, carried, self.live, sizes)
        chosen.add_to(reads)
        return captured, reads
