"""The code that is generated for a GPU, run on the CPU with other streams: it issues what was proven, and no more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from passes import Program
from passes.ir.collectives import OUT_VARIANTS, WAIT
from passes.ir.schemas import schema
from passes.runtime import streams as real
from passes.schedule.streams import COMPUTE, HOST, Begin, Launch, Record, StreamProgram, Wait
from spmd.lowering import codegen
from spmd.lowering.codegen import Bound
from spmd.verification.collective_semantics import SEMANTICS
from tests.spmd.verification.cuda_programs import MODES, WORLD, for_cuda
from tests.spmd.verification.stream_emulator import Outcome
from tests.spmd.verification.test_streams import differs, plain

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


class Written:
    """Streams and events that write down what they are asked for; what is issued on a stream runs at once."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.names = iter(range(1000))

    def current(self) -> str:
        self.log.append(("begin",))
        return COMPUTE

    def stream(self, name: str) -> str:
        return name

    def event(self) -> Event:
        return Event(self.log, next(self.names))

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        self.log.append(("launch", stream))
        yield

    def join(self) -> None:
        self.log.append(("join",))


class Event:
    def __init__(self, log: list[tuple[Any, ...]], number: int) -> None:
        self.log, self.number = log, number

    def record(self, stream: str) -> None:
        self.log.append(("record", stream, self.number))

    def wait(self, stream: str) -> None:
        self.log.append(("wait", stream, self.number))

    def synchronize(self) -> None:
        self.log.append(("wait", HOST, self.number))


class Ranks:
    """Collectives of ranks that are threads."""

    def __init__(self) -> None:
        self.rank, self.barrier = threading.local(), threading.Barrier(WORLD)
        self.brought: dict[int, dict[str, Any]] = {}

    def collective(self, op: Any, *args: Any, out: Tensor) -> Tensor:
        arguments = dict(zip(schema(op).names, args, strict=False))
        self.brought[self.rank.number] = arguments
        self.barrier.wait()
        given = [self.brought[rank] for rank in range(WORLD)]
        results = SEMANTICS[op]([each[schema(op).names[0]] for each in given], given)
        self.barrier.wait()
        return out.copy_(results[self.rank.number].reshape(out.shape))

    def run(self, works: list[Callable[[], Any]]) -> list[Any]:
        results: list[Any] = [None] * WORLD

        def work(rank: int) -> None:
            self.rank.number = rank
            with torch.no_grad():
                results[rank] = works[rank]()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(WORLD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Let what is generated run here: on the CPU, with collectives of threads."""
    ranks, compiled = Ranks(), codegen._compiled

    def here(value: Any) -> Any:
        if value in OUT_VARIANTS.values():
            return partial(ranks.collective, value)
        if value is WAIT:
            return lambda x: x
        if isinstance(value, partial):
            return partial(value.func, *map(here, value.args))
        return CPU if isinstance(value, torch.device) else value

    def compile_here(text: str, scope: dict[str, Any]) -> Any:
        return compiled(text, {name: here(value) for name, value in scope.items()})

    monkeypatch.setattr(codegen, "_compiled", compile_here)
    return ranks


def issued(streams: StreamProgram) -> list[tuple[Any, ...]]:
    """What code has to ask of streams."""
    found: list[tuple[Any, ...]] = []
    for each in streams.operations:
        match each:
            case Begin(stream) if stream == COMPUTE:
                found.append(("begin",))
            case Launch(stream, _) if stream not in (COMPUTE, HOST):
                found.append(("launch", stream))
            case Record(stream, event):
                found.append(("record", stream, event))
            case Wait(stream, event):
                found.append(("wait", stream, event))
    return found


@pytest.mark.parametrize("mode", MODES)
def test_code_issues_what_was_proven_and_computes_the_same(mode: str, on_cpu: Ranks) -> None:
    found, devices, calls = for_cuda(mode), [Written() for _ in range(WORLD)], 2
    bounds = [bound_to(program, device) for program, device in zip(found.programs, devices, strict=True)]
    inputs = found.inputs()
    for _ in range(calls):
        returned = on_cpu.run([partial(bound, *given) for bound, given in zip(bounds, inputs, strict=True)])
    assert not differs(plain(mode, calls), [Outcome(list(r), i) for r, i in zip(returned, inputs, strict=True)])
    for device, streams in zip(devices, found.streams, strict=True):
        assert device.log == issued(streams) * calls


def bound_to(program: Program, device: Written) -> Bound:
    return Bound(program, device=device)  # type: ignore[arg-type]


def test_after_an_error_all_streams_are_joined(on_cpu: Ranks) -> None:
    found, device = for_cuda("replicate"), Written()
    inputs = found.inputs()[0]
    on_cpu.barrier.abort()  # as if the other rank was gone
    on_cpu.rank.number = 0
    with torch.no_grad(), pytest.raises(threading.BrokenBarrierError):
        bound_to(found.programs[0], device)(*inputs)
    assert device.log[-1] == ("join",)


def test_real_streams_have_what_code_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stand-in for ``torch.cuda``, with what its classes have."""
    for name in ("record", "wait", "synchronize"):
        assert callable(getattr(torch.cuda.Event, name))
    assert callable(torch.cuda.Stream.wait_stream)
    made: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or len(made))
    monkeypatch.setattr(real, "_streams", {})
    device = torch.device("cuda", 0)
    one, other = real.DeviceStreams(device), real.DeviceStreams(device)
    assert one.stream("dp") == other.stream("dp") != one.stream("to host")
    assert made == [device, device]
