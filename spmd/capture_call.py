"""Capture one call: an entry of the cache, or an earlier capture, serves it, else the step is traced, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .cache.compile_cache import Lookup, set_flags
from .call.argument_logs import LogsFound
from .call.call import Call
from .call.state import submodules_of
from .capture import Captured, capture, in_rank_zero_order, retraced
from .capture.sizes.any_size import AnySize, capture_any_size
from .capture.sizes.size_symbols import AS_CALLED, TracedSizes
from .guards.read_guards import ReadGuards
from .interpreter.source_lines import warn_user
from .next_capture import NextCapture
from .options import Options
from .override import Override, replaced
from .python_state.effects.carried import Carried
from .python_state.reads import Reads, ReplacementReads
from .ranks.consensus import Agreement
from .running.describe import text_of
from .shared_captures import ServingCapture, SharedCapture


class CapturedCall(NamedTuple):
    """The captured step with the Python state that it reads.

    ``any_size``: the trace, if it serves other sizes, too. ``by_first_rank``: whether that traced the step for all.
    """

    captured: Captured
    reads: Reads | ReadGuards
    any_size: AnySize | None = None
    by_first_rank: bool = False

    def for_this_size(self) -> CapturedCall:
        """The same, which is to serve no other sizes."""
        return CapturedCall(replace(self.captured, is_of_one_size=False), self.reads)


def capture_call(
    function: Callable[..., Any],
    call: Call,
    name: str,
    options: Options,
    captures: NextCapture,
    agreement: Agreement,
    shared: ServingCapture,
    lookup: Lookup,
) -> CapturedCall:
    """The program of a call on global shapes, in rank 0's order. All ranks call it together.

    ``shared`` is as ``NextCapture.find`` finds it; ``lookup`` has the capture of an entry, on all ranks or on none, and
    says whether the first rank captures for all. Raises ``CaptureError`` if the step cannot be traced.
    """
    if (warm := lookup.capture) is not None:
        agreement.check_captured(text_of(warm.captured, call, warm.number))
        captures.numbers.note_fixed(lookup.live, warm.captured)
        set_flags(call, warm.flags)
        return CapturedCall(warm.captured, warm.reads)
    tracing = _Tracing(function, call, name, options.overrides, captures, lookup.live, shared.own)
    if shared.own is not None and shared.is_common:
        found = tracing.capture()
    else:
        found = _by_first_rank(tracing, lookup, agreement) if lookup.is_shared else tracing.trace()
        captures.numbers.note_fixed(lookup.live, found.captured)
        if found.captured.returns_loss and agreement.is_first_rank:
            warn_user(_RETURNS_LOSS.format(captures.name))
        if not found.by_first_rank and len(set(agreement.all_gather_text(str(found.any_size is not None)))) > 1:
            found = found.for_this_size()  # some rank could trace it for no other
    captured = found.captured
    if not found.by_first_rank:
        captured = in_rank_zero_order(captured, call, agreement.all_gather_text)
    agreement.check_captured(text_of(captured, call))
    return CapturedCall(captured, found.reads, found.any_size, found.by_first_rank)


def _by_first_rank(tracing: _Tracing, lookup: Lookup, agreement: Agreement) -> CapturedCall:
    """The capture of the first rank on all of them, bound to each rank's own objects, or that of this rank.

    What the first rank raises, the others find out for themselves, so that each has the error at its user's line. After
    that, as where some rank cannot bind the capture, each captures for itself, also for later programs of the step.
    """
    found: CapturedCall | None = None
    unbound = ""

    def captured() -> bytes:
        nonlocal found
        found = tracing.capture()
        lookup.note_capture(found.captured, found.reads, found.any_size or tracing.serving)
        return lookup.send(found.captured.program)

    content = agreement.by_first_rank(captured)
    if content and found is None:
        try:
            found = CapturedCall(*lookup.receive(content, tracing.name))
        except Exception as error:  # of objects of the user's, too
            unbound = f"{error}" or type(error).__name__
    if content and not any(agreement.all_gather_text(unbound)):
        assert found is not None, "all ranks have captured or bound it"
        return CapturedCall(*found[:3], by_first_rank=True)
    tracing.captures.is_apart = True
    if found is not None and agreement.is_first_rank:
        return found
    lookup.forget()
    return tracing.trace()


_RETURNS_LOSS = (
    "{} returns a loss and has no backward pass. What a compiled step returns has no graph, so that loss.backward() "
    "outside of it raises an error: call it in the step (the optimizer may stay outside), or, where nothing is to be "
    "trained, compute under torch.no_grad() or in eval() mode"
)


@dataclass(frozen=True)
class _Tracing:
    """The context of a trace. ``live``: numbers that become inputs; ``own``: a capture that serves the call."""

    function: Callable[..., Any]
    call: Call
    name: str
    overrides: Sequence[Override]
    captures: NextCapture
    live: Carried
    own: SharedCapture | None

    @property
    def serving(self) -> AnySize | None:
        """The earlier trace that serves the call."""
        return None if self.own is None else self.own.capture

    def capture(self) -> CapturedCall:
        """Take the capture of an earlier trace, if one serves the call, else trace anew."""
        if self.own is None:
            return self.trace()
        return CapturedCall(self.own.capture.at(self.call, self.name), self.own.guards.reads)

    def trace(self) -> CapturedCall:
        """Trace the step; once more if optimizer state that was made for it has to go, or gradients are state."""
        call, retries = self.call, retraced()
        while True:
            try:
                found = self._for_sizes()
            except LogsFound as logs:
                retries.note(f"{path} among its arguments, which is {logs.kind}" for path in logs.paths)
                self.captures.note_logs(call, logs)
                continue
            reasons = []
            if call.end_idle_state(found.captured.program, self.captures.idle):
                reasons.append("optimizer state that was made for it")
            read = call.without_gradient - found.captured.cleared_first
            if read and call.leave_out_gradients(call.without_gradient - read):
                reasons += [f"the gradient of {name}, which it reads" for name in sorted(read)]
            if not reasons:
                return found
            retries.note(reasons)

    def _for_sizes(self) -> CapturedCall:
        """Trace the step for any of the sizes that change from call to call if that can be, else for those it has."""
        captures, call = self.captures, self.call
        found, fixed = capture_any_size(self._once, captures.open_sizes(call), captures.earlier(call))
        notes = captures.shared.note_fixed(fixed)
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
            carried = self.captures.carried(self.call)
            captured, reads = capture(self.function, self.call, self.name, carried, self.live, sizes)
        chosen.add_to(reads)
        return captured, reads
