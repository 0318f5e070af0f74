"""A bundle of three programs on two ranks that send to each other: proven, verified, certified, simulated, and run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from passes import DeadCode, Kind, MergeEqual, PassError, Report, default, run
from passes.analysis.collective_algorithms import BUILT_IN, Algorithm, Link, Point
from passes.ir.bundle import Bundle, print_bundle, read_bundle
from passes.ir.check_bundle import check_bundle
from passes.ir.collectives import WAIT, c10d, kind_of
from passes.runtime.message_collectives import recv, send
from passes.schedule.bundle_simulation import simulate_bundle
from passes.schedule.happens_before import check_streams
from passes.schedule.streams import StreamProgram, Wait, assign_streams, runs_on_streams
from spmd.lowering.arenas import Arenas
from spmd.lowering.run_bundle import BundleExecutable
from spmd.state.commit import Commit
from spmd.verification.bundle_lockstep import BundleRank, BundleRun
from spmd.verification.certificate import Certificate, certify_bundle
from spmd.verification.lockstep import LockstepError
from tests.harness.pipelines import (
    aten,
    backward,
    backward_ending,
    batch,
    forward,
    forward_sending,
    initial,
    loss,
    pipeline,
    plain,
    program_of,
    received,
    whole,
)
from tests.harness.pool import Ranks

STEPS = 4


def differs(bundle: Bundle) -> list[str]:
    """What is not as in the plain step after some steps in lockstep."""
    ranks = [BundleRank(bundle, k, initial()) for k in range(2)]
    both, expected, found = BundleRun(ranks), initial(), list[str]()
    for step in range(STEPS):
        results = both.call("step", [batch(step)] * 2)
        mean = plain(expected, **batch(step))
        found += [f"loss of rank {k}" for k in range(2) if not torch.allclose(results[k]["loss"], mean, 1e-12, 0)]
    for name, rank in (("w0", 0), ("w1", 1)):
        found += [] if torch.allclose(ranks[rank].state[name], expected[name], 1e-12, 1e-14) else [name]
    return found


def test_it_computes_what_the_plain_step_does() -> None:
    bundle = pipeline()
    check_bundle(bundle)
    assert differs(bundle) == []


def test_passes_keep_what_it_computes_and_the_order_of_messages() -> None:
    bundle = pipeline((forward_sending, loss, backward_ending))
    programs = {role: run(program, default()) for role, program in bundle.programs.items()}
    assert any(each.in_place for each in programs["backward"].inputs)
    after = Bundle.of(bundle.name, programs, bundle.calls, bundle.axis)
    check_bundle(after)
    assert differs(after) == []


def both_sum(reduction: str) -> Callable[..., Any]:
    """A program that sums over both ranks, after work of its own."""

    def function(x: Any) -> Any:
        return (WAIT(c10d.all_reduce.default(aten.mul.Tensor(x, 3.0 if reduction == "sum" else 2.0), reduction, "0")),)

    return function


def alone(x: Any) -> Any:
    return (aten.mul.Tensor(x, 2.0),)


def test_ranks_of_several_programs_start_one_collective() -> None:
    def doubled(x: Any) -> Any:
        return (WAIT(c10d.all_reduce.default(aten.add.Tensor(x, x), "sum", "0")),)

    bundle = _two([both_sum("sum"), doubled], "gloo")
    check_bundle(bundle)
    results = BundleRun([BundleRank(bundle, k, {}) for k in range(2)]).call("step", [batch(0), batch(1)])
    expected = 3 * batch(0)["x"] + 2 * batch(1)["x"]
    assert all(torch.equal(each["loss"], expected) for each in results)
    for other, message in ((both_sum("max"), "start the same collective"), (alone, "pp=0 waits for all_reduce in a")):
        wrong = _two([both_sum("sum"), other], "gloo")
        with pytest.raises(PassError, match=message):
            check_bundle(wrong)
    with pytest.raises(LockstepError, match="wait for each other for ever"):
        BundleRun([BundleRank(wrong, k, {}) for k in range(2)]).call("step", [batch(0)] * 2)


def test_its_text_is_read_back(golden: Any) -> None:
    bundle = pipeline()
    golden(print_bundle(bundle))
    text = print_bundle(bundle)
    read, count = read_bundle(text, bundle)
    assert (count, print_bundle(read), read.digest()) == (0, text, bundle.digest())
    other, count = read_bundle(text.replace("aten.rsub.Scalar(mul, 1)", "aten.rsub.Scalar(mul, 2.0)"), bundle)
    assert count == 1 and other.digest() != bundle.digest()
    turned, _ = read_bundle(text.replace("pp=0: forward, backward", "pp=0: backward, forward"), bundle)
    assert turned.digest() != bundle.digest() and turned.order("step", 0) == ("backward", "forward")
    with pytest.raises(PassError, match="would never end: pp=0 waits for the recv of gradient from pp=1 in backward"):
        check_bundle(turned)


def test_ranks_agree_on_the_digest_whatever_their_parts_are() -> None:
    bundle = pipeline()
    other = pipeline()
    for node in other.programs["loss"].graph.find_nodes(op="call_function", target=recv.default):
        node.args = ([8, 3], *node.args[1:])
    assert other.digest() == bundle.digest()
    swapped = pipeline((forward, sends_in_another_order, backward))
    assert swapped.digest() != bundle.digest()


def test_floats_that_are_the_ranks_own_are_marked() -> None:
    ranks = [pipeline(), pipeline()]
    for bundle, number in zip(ranks, (0.0, 1e30), strict=True):
        [node] = bundle.programs["backward"].graph.find_nodes(op="call_function", target=aten.rsub.Scalar)
        node.args = (node.args[0], number)
    assert ranks[0].digest() != ranks[1].digest()
    for bundle in ranks:
        for node in bundle.programs["backward"].graph.find_nodes(op="call_function", target=aten.rsub.Scalar):
            node.meta["numbers"] = "keys of the ranks before"
    assert ranks[0].digest() == ranks[1].digest()


# Mutants: each is one edit of a stage.


def sends_nothing(w0: Any, x: Any) -> Any:
    return (aten.tanh.default(aten.mm.default(x, w0)),)


def sends_other_values(w0: Any, x: Any) -> Any:
    hidden = aten.mm.default(x, w0)
    WAIT(send.default(hidden, 1, "hidden", "0"))
    return (aten.tanh.default(hidden),)


def sends_another_shape(w0: Any, x: Any) -> Any:
    hidden = aten.tanh.default(aten.mm.default(x, w0))
    WAIT(send.default(aten.t.default(hidden), 1, "hidden", "0"))
    return (hidden,)


def sends_another_dtype(w0: Any, x: Any) -> Any:
    hidden = aten.tanh.default(aten.mm.default(x, w0))
    WAIT(send.default(aten._to_copy.default(hidden, dtype=torch.float32), 1, "hidden", "0"))
    return (hidden,)


def sends_twice(w0: Any, x: Any) -> Any:
    hidden = aten.tanh.default(aten.mm.default(x, w0))
    one, other = send.default(hidden, 1, "hidden", "0"), send.default(hidden, 1, "hidden", "0")
    WAIT(one)
    WAIT(other)
    return (hidden,)


def waits_for_nothing(w0: Any, x: Any) -> Any:
    hidden = aten.tanh.default(aten.mm.default(x, w0))
    send.default(hidden, 1, "hidden", "0")
    return (hidden,)


def waits_for_what_comes_later(w0: Any, x: Any) -> Any:
    """Rank 0 waits for a gradient before it sends what rank 1 computes it from."""
    gradient = WAIT(received(w0, [4, 3], 1, "gradient"))
    hidden = aten.tanh.default(aten.mm.default(x, w0))
    WAIT(send.default(hidden, 1, "hidden", "0"))
    return (aten.add.Tensor(hidden, aten.mul.Tensor(gradient, 0.0)),)


def receives_no_gradient(w0: Any, x: Any, lr: Any, hidden: Any) -> Any:
    mean = WAIT(received(w0, [], 1, "loss"))
    step = aten.mul.Tensor(aten.mm.default(aten.t.default(x), hidden), lr)
    return mean, aten.sub.Tensor(w0, step)


def sends_in_another_order(w1: Any, y: Any, lr: Any) -> Any:
    hidden = WAIT(received(w1, [4, 3], 0, "hidden"))
    error = aten.sub.Tensor(aten.mm.default(hidden, w1), y)
    mean = aten.mean.default(aten.pow.Tensor_Scalar(error, 2))
    gradient = aten.mul.Tensor(error, 0.25)
    reported = send.default(mean, 0, "loss", "0")
    sent = send.default(aten.mm.default(gradient, aten.t.default(w1)), 0, "gradient", "0")
    step = aten.mul.Tensor(aten.mm.default(aten.t.default(hidden), gradient), lr)
    WAIT(reported)
    WAIT(sent)
    return mean, aten.sub.Tensor(w1, step)


def sends_to_itself(w0: Any, x: Any) -> Any:
    hidden = aten.tanh.default(aten.mm.default(x, w0))
    WAIT(send.default(hidden, 0, "hidden", "0"))
    return (hidden,)


PROVEN_WRONG: dict[str, tuple[tuple[Callable[..., Any], ...], str]] = {
    "a send is missing": ((sends_nothing, loss, backward), "channel hidden: .*: no program writes it"),
    "a recv is missing": ((forward, loss, receives_no_gradient), "channel gradient: .*: no program reads it"),
    "another shape": ((sends_another_shape, loss, backward), r"expected f64\[3, 4\] in loss, got f64\[4, 3\]"),
    "another dtype": ((sends_another_dtype, loss, backward), r"expected f32\[4, 3\] in loss, got f64\[4, 3\]"),
    "one send too many": ((sends_twice, loss, backward), "pp=0 waits for the send of hidden to pp=1 in forward"),
    "a deadlock": (
        (waits_for_what_comes_later, loss, backward),
        "pp=0 waits for the recv of gradient .* pp=1 waits for",
    ),
    "no other rank": ((sends_to_itself, loss, backward), "expected a peer among 2 ranks, but send of forward has 0"),
}


@pytest.mark.parametrize("mutant", PROVEN_WRONG)
def test_what_does_not_fit_together_is_refused_before_it_runs(mutant: str) -> None:
    functions, message = PROVEN_WRONG[mutant]
    with pytest.raises(PassError, match=message):
        check_bundle(pipeline(functions))


def test_messages_may_leave_in_another_order_but_on_nccl() -> None:
    functions = forward, sends_in_another_order, backward
    bundle, on_nccl = pipeline(functions), pipeline(functions, backend="nccl")
    check_bundle(bundle)
    assert not differs(bundle) and certified(*functions)
    with pytest.raises(PassError, match="received in the same order and type"):
        check_bundle(on_nccl)
    with pytest.raises(LockstepError, match="receives gradient, but what comes is loss"):
        differs(on_nccl)


def test_a_message_that_nobody_waits_for_is_refused() -> None:
    with pytest.raises(PassError, match="nobody waits for send"):
        pipeline((waits_for_nothing, loss, backward))


def test_wrong_values_are_found_by_running_it() -> None:
    bundle = pipeline((sends_other_values, loss, backward))
    check_bundle(bundle)  # they have the right type
    assert differs(bundle) == ["loss of rank 0", "loss of rank 1"] * STEPS + ["w0", "w1"]


def certified(*functions: Callable[..., Any]) -> Certificate:
    bundle = pipeline(functions)
    with torch.no_grad():
        return certify_bundle(program_of(whole, "whole", 0), [(bundle, k) for k in range(2)], "step")


def test_it_is_certified_without_numbers() -> None:
    found = certified(forward, loss, backward)
    assert found and (found.ranks, found.outputs) == (2, 6), found
    assert certified(forward_sending, loss, backward_ending)
    assert not certified(sends_other_values, loss, backward)
    assert "wait for each other for ever" in certified(waits_for_what_comes_later, loss, backward).why


def test_lockstep_finds_what_was_not_proven() -> None:
    """Of bundles that were not checked: a deadlock, and a message that nobody receives."""
    for name, message in {
        "a deadlock": "wait for each other for ever",
        "one send too many": "nobody receives what send",
    }.items():
        with pytest.raises(LockstepError, match=message):
            differs(pipeline(PROVEN_WRONG[name][0]))


def test_what_is_sent_keeps_its_values_until_the_wait() -> None:
    bundle = pipeline()
    program = bundle.programs["forward"]
    wait = next(iter(program.graph.find_nodes(op="call_function", target=WAIT)))
    with program.graph.inserting_before(wait):
        program.graph.call_function(aten.mul_.Tensor, (wait.args[0].args[0], 2.0))
    with pytest.raises(LockstepError, match="the operand of send is overwritten before it is waited for"):
        differs(bundle)


def test_orders_that_block_on_nccl_alone() -> None:
    """Both send before they receive: gloo has a line for each direction, NCCL one for both."""
    sides = [_swapping(first, k) for k, first in enumerate(("send", "send"))]
    for backend, blocks in (("gloo", False), ("nccl", True)):
        bundle = _two(sides, backend)
        if blocks:
            with pytest.raises(PassError, match="would never end: pp=0 waits for"):
                check_bundle(bundle)
        else:
            check_bundle(bundle)
    check_bundle(_two([_swapping("send", 0), _swapping("recv", 1)], "nccl"))


def _swapping(first: str, coordinate: int) -> Callable[..., Any]:
    """Send and receive, in one order or the other, and only then wait."""
    out, into = (("up", "down"), ("down", "up"))[coordinate]

    def function(x: Any) -> Any:
        if first == "send":
            sent = send.default(x, 1 - coordinate, out, "0")
            came = received(x, [4, 5], 1 - coordinate, into)
        else:
            came = received(x, [4, 5], 1 - coordinate, into)
            sent = send.default(x, 1 - coordinate, out, "0")
        WAIT(sent)
        return (WAIT(came),)

    return function


def _two(sides: list[Callable[..., Any]], backend: str) -> Bundle:
    programs = {
        name: program_of(side, name, k, backend=backend) for k, (name, side) in enumerate(zip("ab", sides, strict=True))
    }
    return Bundle.of("swap", programs, {"step": (("a",), ("b",))}, axis="pp")


def sums_and_sends(x: Any) -> Any:
    """A message behind a sum that has started."""
    summed = c10d.all_reduce.default(x, "sum", "0")
    WAIT(send.default(x, 1, "down", "0"))
    return (WAIT(summed),)


def receives_and_sums(x: Any) -> Any:
    return (WAIT(c10d.all_reduce.default(aten.add.Tensor(x, WAIT(received(x, [4, 5], 0, "down"))), "sum", "0")),)


def sums_and_receives(x: Any) -> Any:
    summed = c10d.all_reduce.default(x, "sum", "0")
    return (aten.add.Tensor(WAIT(received(x, [4, 5], 0, "down")), WAIT(summed)),)


def test_on_nccl_a_message_waits_for_a_sum_that_started_before_it() -> None:
    for backend in ("gloo", "nccl"):
        check_bundle(_two([sums_and_sends, sums_and_receives], backend))
    check_bundle(_two([sums_and_sends, receives_and_sums], "gloo"))
    with pytest.raises(PassError, match=r"would never end: pp=0 waits for the send of down .* pp=1 waits for the"):
        check_bundle(_two([sums_and_sends, receives_and_sums], "nccl"))


def test_values_of_several_micro_batches_arrive_in_order() -> None:
    """All forwards first, then all backwards, which ends only where a send goes on beside the next forward."""
    both: Any = {"step": (("forward", "forward", "backward", "backward"), ("loss", "loss"))}
    bundle = pipeline((forward_sending, loss, backward_ending), both)
    check_bundle(bundle)
    run, given = BundleRun([BundleRank(bundle, k, initial() | {"lr": 0.0}) for k in range(2)]), [batch(0)] * 2
    assert torch.allclose(run.call("step", given)[0]["loss"], plain(initial(), **batch(0)), 1e-12, 0)
    timeline = simulate_bundle(bundle, "step")
    assert timeline is not None and len(timeline.ranks[0].transfers) == 6
    with pytest.raises(
        PassError, match="pp=0 waits for the send of hidden to pp=1 in forward, pp=1 waits for the send"
    ):
        check_bundle(pipeline(calls=both))
    with pytest.raises(PassError, match=r"would never end: pp=1 waits for the recv of hidden .* pp=0 has ended"):
        check_bundle(pipeline(calls={"step": (("forward", "backward"), ("loss", "loss"))}))


def test_what_a_call_leaves_is_there_for_the_next() -> None:
    """Two programs without messages, in calls of their own; a call that would find nothing is refused."""

    def keeps(w0: Any, x: Any) -> Any:
        return (aten.tanh.default(aten.mm.default(x, w0)),)

    def takes(w0: Any, x: Any, lr: Any, hidden: Any) -> Any:
        return aten.mean.default(hidden), aten.mul.Tensor(w0, lr)

    programs = {name: program_of(each, name, 0) for name, each in (("forward", keeps), ("backward", takes))}
    for bundle in (
        Bundle.of("kept", programs, {"finish": [["backward"]], "first": [["forward"]]}),
        Bundle.of("kept", programs, {"both": [["forward", "backward"]]}),
    ):
        check_bundle(bundle)
        rank, order = BundleRank(bundle, 0, initial()), sorted(bundle.calls, reverse=True)
        run = BundleRun([rank])
        calls = ["first", "finish"] if "first" in order else order
        results = [run.call(call, [batch(0)])[0] for call in calls]
        expected = (batch(0)["x"] @ initial()["w0"]).tanh().mean()
        assert torch.allclose(results[-1]["loss"], expected) and not any(rank.in_flight.counts.values())
    bundle = Bundle.of("kept", programs, {"finish": [["backward"]], "both": [["forward", "backward"]]})
    with pytest.raises(PassError, match=r"call finish of kept reads pending\.hidden, which no call before it leaves"):
        check_bundle(bundle)


def test_messages_stay_where_passes_remove_and_merge() -> None:
    bundle = pipeline()
    for role, program in bundle.programs.items():
        after = run(program, [DeadCode(), MergeEqual()])
        kinds = [[kind_of(node) for node in each.collectives()] for each in (program, after)]
        assert kinds[0] == kinds[1] and kinds[0], role
        assert len(after.graph.find_nodes(op="call_function", target=WAIT)) == len(kinds[1])
    report = Report.of(bundle.programs["loss"])
    assert [report.count(kind) for kind in ("send", "recv")] == [2, 1]
    assert (report.bytes("send"), report.bytes("recv")) == (12 * 8 + 8, 12 * 8)


def test_a_simulated_rank_idles_until_what_it_receives_has_come() -> None:
    bundle = pipeline()
    timeline = simulate_bundle(bundle, "step")
    assert timeline is not None
    first, second = timeline.ranks
    sends = [each for each in first.transfers if each.queue == "pp to 1"]
    came = [each for each in second.transfers if each.queue == "pp from 0"]
    assert [each.end for each in came] == [each.end for each in sends]
    assert timeline.idle[1] >= sends[0].seconds > 0 and timeline.idle[0] > 0
    assert timeline.seconds == max(first.seconds, second.seconds) and 0 < timeline.bubble < 1
    assert str(came[0].cause) == "peer"
    slower = replace(BUILT_IN, links=(_slow(),))
    slow = simulate_bundle(bundle, "step", slower)
    assert slow is not None and slow.seconds > timeline.seconds + 1.0


def _slow() -> Link:
    """A second for a message of any size."""
    return Link("gloo", "", 2, {(Kind.SEND, Algorithm.NATIVE): (Point(1, 1.0, 0.0),)})


def test_on_gpus_messages_have_streams_of_their_own() -> None:
    bundle = pipeline((forward_sending, loss, backward_ending), backend="nccl", device=torch.device("cuda", 0))
    check_bundle(bundle)
    for role, program in bundle.programs.items():
        assert runs_on_streams(program)
        streams = assign_streams(program)
        check_streams(program, streams)
        peer = 0 if role == "loss" else 1
        assert [each for each in streams.streams if each != "compute"] == [f"pp with {peer}"], role
    for program in bundle.programs.values():
        streams = assign_streams(program)
        waits = [each for each in streams.operations if isinstance(each, Wait)]
        left = tuple(each for each in streams.operations if each is not waits[0])
        with pytest.raises(PassError):
            check_streams(program, StreamProgram(left))


def _given(bundle: Bundle, values: dict[str, Any], role: str, _: int) -> list[Any]:
    return [values[each.name] for each in bundle.programs[role].inputs if not each.role.is_of_channel]


def on_ranks(rank: int, world: int, functions: tuple[Callable[..., Any], ...]) -> tuple[str, list[str]]:
    """The bundle on real ranks, each of which lowers and runs its own programs; the digest, and what differs."""
    group = init_device_mesh("cpu", (world,)).get_group().group_name
    bundle = pipeline(functions, group=group)
    check_bundle(bundle)
    executable = BundleExecutable(bundle, rank, Arenas(), Commit())
    state, expected, found = initial(), initial(), list[str]()
    for step in range(STEPS):
        values = state | batch(step)
        (mean,) = executable.run("step", partial(_given, bundle, values))
        found += [] if torch.allclose(mean, plain(expected, **batch(step)), 1e-12, 0) else [f"loss {step}"]
    own = f"w{rank}"
    found += [] if torch.allclose(state[own], expected[own], 1e-12, 1e-14) else [own]
    return bundle.digest(), found


def test_real_ranks_run_a_program_each(ranks: Ranks) -> None:
    for functions in ((forward, loss, backward), (forward_sending, loss, backward_ending)):
        digest = pipeline(functions).digest()
        assert ranks.run(2, on_ranks, functions) == [(digest, [])] * 2
