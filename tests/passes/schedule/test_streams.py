"""Streams of small programs: which operations wait for which, and what the checker says of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from passes import Axis, Mesh, PassError, Program, run
from passes.memory.reuse_memory import ReuseMemory
from passes.runtime.host_memory import to_device, to_host, wait_copy
from passes.schedule.happens_before import check_streams
from passes.schedule.streams import HOST, StreamProgram, Wait, assign_streams, runs_on_streams

from ..programs import CUDA, GROUP, all_gather, all_reduce, f64, make_program, moved_to_cuda

aten = torch.ops.aten


def on_cuda(function: Callable[..., Any], backend: str = "nccl", **inputs: Tensor) -> Program:
    """A program whose values are fake ones on a GPU, but for inputs whose names begin with h, in planned memory."""
    made = make_program(function, **inputs)
    host = {node for node in made.graph.nodes if node.name.startswith("h")}
    for node in made.graph.nodes:
        if node not in host and node.target not in (to_host, wait_copy):
            node.meta["val"] = tree_map(moved_to_cuda, node.meta.get("val"))
    mesh = Mesh((Axis("dp", 2, GROUP, 0, backend),))
    return run(replace(made, mesh=mesh), [ReuseMemory()], check=False)


def hidden(x: Any, y: Any) -> Any:
    """A gather beside a product that does not need it."""
    gathered = all_gather(aten.mul.Tensor(x, 2.0))
    product = aten.mm.default(y, y)
    return (aten.sum.default(aten.mm.default(product, gathered)),)


def lines(streams: StreamProgram) -> list[str]:
    return [line.strip() for line in str(streams).splitlines()]


def test_compute_waits_for_a_gather_where_it_is_read() -> None:
    program = on_cuda(hidden, x=f64(2, 4), y=f64(4, 4))
    streams = assign_streams(program)
    check_streams(program, streams)
    assert (
        lines(streams)
        == """\
compute  begin
host  begin
compute  launch mul
compute  record 0
dp  wait 0
dp  launch all_gather_into_tensor
dp  record 1
compute  launch mm
compute  wait 1
compute  launch mm_1
compute  launch sum_1""".splitlines()
    )


def test_without_an_event_the_error_names_nodes_memory_and_order() -> None:
    program = on_cuda(hidden, x=f64(2, 4), y=f64(4, 4))
    operations = [each for each in assign_streams(program).operations if each != Wait("compute", 1)]
    with pytest.raises(
        PassError,
        match=r"^mm_1 on compute may read bytes \d+ to \d+ of arena before all_gather_into_tensor on dp has written "
        r"it: expected compute to wait for an event that is recorded on dp behind it$",
    ):
        check_streams(program, StreamProgram(tuple(operations)))


def test_what_a_collective_allocates_is_allocated_where_compute_is() -> None:
    """Its result is returned, so it has no place in an arena."""
    program = on_cuda(lambda x: (all_reduce(aten.mul.Tensor(x, 2.0)),), x=f64(4))
    streams = assign_streams(program)
    check_streams(program, streams)
    assert (
        lines(streams)[2:]
        == """\
compute  launch mul
compute  allocate all_reduce
compute  record 0
dp  wait 0
dp  launch all_reduce
dp  record 1
compute  wait 1""".splitlines()
    )


def copied_out(x: Any, h: Any) -> Any:
    """What is copied to the host is added there; compute goes on in the memory that it was copied from."""
    out = to_host(aten.mul.Tensor(x, 2.0), True)
    later = aten.mm.default(aten.mm.default(x, x), x)
    return aten.sum.default(later), aten.add.Tensor(h, wait_copy(out))


def test_the_host_waits_for_what_it_computes_with_and_compute_for_memory_that_is_copied() -> None:
    program = on_cuda(copied_out, x=f64(4, 4), h=f64(4, 4))
    add = next(node for node in program.graph.nodes if node.target is aten.add.Tensor)
    add.meta["val"] = add.args[0].meta["val"]  # type: ignore[union-attr]
    streams = assign_streams(program)
    check_streams(program, streams)
    found = lines(streams)
    assert [each.event for each in streams.operations if isinstance(each, Wait) and each.stream == HOST] == [1]
    assert found.index("host  wait 1") == found.index(f"host  launch {add}") - 1
    assert found.index("to host  record 1") > found.index("to host  launch to_host")
    assert not any(isinstance(each, Wait) and each.stream == HOST for each in streams.operations[:-2])


def test_state_in_host_memory_is_not_written_before_it_was_copied() -> None:
    def step(h: Any) -> Any:
        product = aten.sum.default(to_device(h, CUDA))
        return product, aten.mul.Tensor(h, 2.0)

    program = on_cuda(step, h=f64(4, 4))
    write = next(node for node in program.graph.nodes if node.target is aten.mul.Tensor)
    write.target = aten.mul_.Tensor
    write.meta["val"] = write.args[0].meta["val"]  # type: ignore[union-attr]
    streams = assign_streams(program)
    check_streams(program, streams)
    found = lines(streams)
    assert found.index(f"host  launch {write}") == found.index("host  wait 1") + 1
    without = StreamProgram(
        tuple(each for each in streams.operations if each.stream != HOST or not isinstance(each, Wait))
    )
    with pytest.raises(
        PassError, match=f"{write} on host may overwrite the memory of h before to_device on to device has read"
    ):
        check_streams(program, without)


def test_what_the_host_gets_by_another_op_is_waited_for() -> None:
    program = on_cuda(lambda x: (aten._to_copy.default(aten.mul.Tensor(x, 2.0), device=torch.device("cpu")),), x=f64(4))
    (copy,) = [node for node in program.graph.nodes if node.target is aten._to_copy.default]
    with copy.meta["val"].fake_mode:
        copy.meta["val"] = torch.empty(4, dtype=torch.float64)
    streams = assign_streams(program)
    check_streams(program, streams)
    assert lines(streams)[-4:] == [
        f"compute  launch {copy}", "compute  record 0", "host  wait 0", f"host  hostaccess {copy}",
    ]  # fmt: skip


@pytest.mark.parametrize(("backend", "does"), [("nccl", True), ("gloo", False), ("fake", False)])
def test_only_programs_of_nccl_run_on_streams(backend: str, does: bool) -> None:
    assert runs_on_streams(on_cuda(hidden, backend, x=f64(2, 4), y=f64(4, 4))) is does
    assert not runs_on_streams(make_program(hidden, x=f64(2, 4), y=f64(4, 4)))
