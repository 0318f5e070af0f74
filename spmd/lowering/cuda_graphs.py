"""CUDA graphs: from its third call on a program's halves are launched as a whole, each by one call of the driver.

A graph holds the launches of kernels with their addresses and numbers, so it computes the next call only if all that
the call brings lies in memory that never moves. Tensors are copied there before a launch; numbers lie on the device
(``DeviceNumbers``), but for those that kernels of optimizers take from the host: other ones are captured anew. Between
the halves, and outside of both, ranks wait for each other as ever. Where a program cannot be captured, its report has
the reason, and it runs as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from passes import InputSource, Program, Role
from passes.analysis.aliases import storages
from passes.analysis.out_variants import is_constant
from passes.ir.effects import mutates, written
from passes.schedule.node_costs import device_of
from passes.schedule.streams import TO_DEVICE, TO_HOST, stream_of

from ..interpreter.source_lines import warn_user

_CALLS_BEFORE = 2  # in which libraries choose kernels and reserve their memory
_FREE_CAPTURES, _CALLS_OF_A_CAPTURE = 4, 100  # for other numbers of the host, and how many calls pay for one

aten = torch.ops.aten

Halves = tuple[Callable[..., Any], Callable[[list[Any]], Any] | None]
"""``gradients(*given) -> handed`` and ``update(handed) -> results``; without a write the first returns the results."""
Capture = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]
"""Captures a function; gives what it returned, which each replay computes anew, and the replay."""


def why_not_captured(program: Program) -> str:
    """Why a program cannot be captured, for a sentence; empty if nothing is known to be in the way."""
    if device_of(program).type != "cuda":
        return "it does not run on a GPU"
    if program.collectives():
        return "it communicates"
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    if any(stream_of(program, node) in (TO_DEVICE, TO_HOST) for node in calls):
        return "it copies between host and device"
    if any(each.role is Role.SEED and not each.numbers for each in program.inputs):
        return "an op draws with a kernel of its own, whose seed is a number of the host"
    if any(each.role.source is InputSource.RUN for each in program.inputs):
        return "each run of a micro-batch takes its own number, by which it draws or cuts rows"
    if _writes_to_arguments(program):
        return "it writes to an argument of the call"
    if found := [node for node in calls if _is_on_host(node)]:
        source = f" ({line})" if (line := found[0].meta.get("source")) else ""
        return f"{found[0].target} computes on the host{source}: make the optimizer with fused=True or capturable=True"
    return ""


def _writes_to_arguments(program: Program) -> bool:
    """Whether a replay would write to its own copy of an argument, and leave the user's as it was."""
    found, inputs = storages(program.graph), zip(program.placeholders, program.inputs, strict=True)
    given = {each for node, x in inputs if x.role in (Role.BATCH, Role.ARGUMENT, Role.KEPT) for each in found[node]}
    writes = filter(mutates, program.graph.nodes)
    return any(not given.isdisjoint(found[to]) for node in writes for to in written(node) or node.all_input_nodes)


def _is_on_host(node: fx.Node) -> bool:
    vals = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
    return any(isinstance(val, Tensor) and val.device.type == "cpu" for val in vals) and not is_constant(node)


class Replay:
    """Runs the halves of one program. ``capture`` makes what captures functions on ``device``.

    ``copied``: for each output, whether the caller copies it, so that it needs no memory of its own.
    """

    def __init__(
        self,
        device: torch.device,
        capture: Callable[[torch.device], Capture] | None = None,
        copied: Sequence[bool] = (),
    ) -> None:
        self._device, self._make_capture = device, capture or CudaCapture
        self._copied = {k for k, is_copied in enumerate(copied) if is_copied}
        self.failed = ""  # why nothing is captured any more
        self.release()

    def release(self) -> None:
        """Let go of graphs, and of the memory that they compute in; later calls capture anew."""
        self._halves: Halves | None = None
        self._calls = self._captures = 0
        self._given: list[Any] = []  # memory of what a call brings
        self._numbers: list[Any] = []
        self._launches: list[Callable[[], None]] = []
        self._results: list[Callable[[Sequence[Any]], Any]] = []

    def __call__(
        self, halves: Halves, given: Sequence[Any], state: Sequence[Tensor], before_update: Callable[[], None]
    ) -> Any:
        """Run both halves on what a call brings; ``before_update`` between them."""
        if halves is not self._halves:
            self.release()
            self._halves = halves
        self._calls += 1
        if self._calls <= _CALLS_BEFORE or self.failed:
            return run_halves(halves, given, before_update)
        if not self._launches or self._numbers != _numbers(given):
            self._capture(halves, given, state)
            if self.failed:
                return run_halves(halves, given, before_update)
        for memory, value in zip(self._given, given, strict=True):
            if isinstance(memory, Tensor):
                memory.copy_(value)
        for k, launch in enumerate(self._launches):
            if k:
                before_update()
            launch()
        return [own(given) for own in self._results]

    def _capture(self, halves: Halves, given: Sequence[Any], state: Sequence[Tensor]) -> None:
        gradients, update = halves
        capture, launches = self._make_capture(self._device), list[Callable[[], None]]()
        self._captures += bool(self._launches)
        self._launches, self._results, self._numbers = [], [], _numbers(given)
        if self._captures > _FREE_CAPTURES + self._calls // _CALLS_OF_A_CAPTURE:
            return self._fail("its kernels take a number from the host that changes from call to call")
        self._given = [torch.empty_like(x).copy_(x) if isinstance(x, Tensor) else x for x in given]
        try:
            handed, launch = capture(lambda: gradients(*self._given))
            launches.append(launch)
            if update is not None:
                handed, launch = capture(lambda: update(handed))
                launches.append(launch)
        except RuntimeError as error:
            return self._fail(f"it cannot be captured: {error}")
        self._launches = launches
        self._results = [_as_is(x) if k in self._copied else self._own(x, state) for k, x in enumerate(handed)]

    def _fail(self, why: str) -> None:
        self.failed, self._given = why, []
        warn_user(f"a program runs without CUDA graphs from here on: {why}")

    def _own(self, result: Any, state: Sequence[Tensor]) -> Callable[[Sequence[Any]], Any]:
        """What gives a result of a call, from what the call brings: in memory that the next call leaves as it is."""
        if not isinstance(result, Tensor):
            return lambda _: result
        for k, memory in enumerate(self._given):
            if result is memory:
                return operator.itemgetter(k)
        if _storage(result) not in {_storage(each) for each in state}:
            return lambda _: result.clone()
        return lambda _: result if any(result is each for each in state) else aten.alias.default(result)


def _as_is(result: Any) -> Callable[[Sequence[Any]], Any]:
    return lambda _: result


def _numbers(given: Sequence[Any]) -> list[Any]:
    return [x for x in given if not isinstance(x, Tensor)]


def run_halves(halves: Halves, given: Sequence[Any], before_update: Callable[[], None]) -> Any:
    """Run the halves of a program as they are."""
    gradients, update = halves
    handed = gradients(*given)
    if update is None:
        return handed
    before_update()
    return update(handed)


class CudaCapture:
    """Captures functions on one device, which compute in the same memory since one follows the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Capture a function, which computes nothing meanwhile. Raises ``RuntimeError`` where that cannot be."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as one that pins a loader's memory, may go on.
        capturing = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        with torch.cuda.device(self._device), capturing:
            returned = function()
        return returned, graph.replay


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
