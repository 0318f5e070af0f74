"""Programs for CUDA on streams: proven free of races, run in random interleavings, and wrong ones found out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

import pytest
from torch import Tensor

from passes import PassError, SpmdError
from passes.schedule.happens_before import check_streams
from passes.schedule.streams import COMPUTE, HOST, TO_DEVICE, TO_HOST, StreamProgram, Wait
from spmd.verification.lockstep import run_in_lockstep, same_bits
from tests.harness.on_cuda import back_on_cpu

from .cuda_programs import MODES, for_cuda
from .order_of_collectives import check_order_of_collectives
from .stream_emulator import Emulator, Outcome
from .stream_mutants import Mutant, mutants, swapped_collectives

pytestmark = pytest.mark.slow

INTERLEAVINGS, CALLS = 200, 2
HELD = "offload replicated"  # by what is offloaded and split, and by what is replicated
USUAL = [pytest.param(mode, marks=pytest.mark.exhaustive) if mode == HELD else mode for mode in MODES]


def waits_of_host(streams: StreamProgram) -> list[Wait]:
    """The waits that hold up the host."""
    return [each for each in streams.operations if isinstance(each, Wait) and each.stream == HOST]


@pytest.mark.parametrize("mode", USUAL)
def test_programs_are_free_of_races_and_of_waits_of_the_host(mode: str) -> None:
    found = for_cuda(mode)
    for program, streams in zip(found.programs, found.streams, strict=True):
        check_streams(program, streams)
        copies = [TO_DEVICE, TO_HOST] if "offload" in mode else []
        gathers = [] if "repl" in mode else ["dp gathers"]
        assert sorted(streams.streams) == sorted([COMPUTE, "dp", *gathers, *copies])
        updates_on_host = mode in ("offload", "offload replicated")
        assert len(waits_of_host(streams)) == updates_on_host  # for gradients
    check_order_of_collectives(found.programs, found.streams)


@cache
def plain(mode: str, calls: int) -> list[Outcome]:
    """What every rank has in the order of the program."""
    found, inputs = for_cuda(mode), for_cuda(mode).inputs()
    programs = [back_on_cpu(program) for program in found.programs]
    for _ in range(calls):
        returned = run_in_lockstep(programs, inputs)
    return [Outcome(list(each), given) for each, given in zip(returned, inputs, strict=True)]


def differs(expected: Sequence[Outcome], got: Sequence[Outcome]) -> bool:
    pairs = [
        pair
        for one, other in zip(expected, got, strict=True)
        for pair in zip([*one.returned, *one.inputs], [*other.returned, *other.inputs], strict=True)
    ]
    return not all(same_bits(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("mode", USUAL)
def test_200_interleavings_have_the_bits_of_the_plain_order(mode: str) -> None:
    found, expected = for_cuda(mode), plain(mode, 1)
    emulator = Emulator(found.programs, found.streams)
    for seed in range(INTERLEAVINGS // len(MODES)):
        assert not differs(expected, emulator.run(found.inputs(), seed)), f"seed {seed}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", MODES)
def test_interleavings_of_two_calls(mode: str) -> None:
    found, expected = for_cuda(mode), plain(mode, CALLS)
    emulator = Emulator(found.programs, found.streams)
    for seed in range(INTERLEAVINGS // 4):
        assert not differs(expected, emulator.run(found.inputs(), seed, CALLS)), f"seed {seed}"


def test_interleavings_differ() -> None:
    """With other seeds the streams of a rank take turns otherwise; with one seed always the same."""
    found = for_cuda("offload")
    wrong = without_waits(found.streams[0])
    emulator = Emulator(found.programs, [wrong, found.streams[1]])
    expected = plain("offload", 1)
    runs = [[differs(expected, emulator.run(found.inputs(), seed)) for seed in range(4)] for _ in range(2)]
    assert runs[0] == runs[1] and any(runs[0])


def without_waits(streams: StreamProgram) -> StreamProgram:
    return StreamProgram(tuple(each for each in streams.operations if not isinstance(each, Wait)))


@cache
def all_mutants(mode: str) -> list[Mutant]:
    found = for_cuda(mode)
    return [*mutants(found.programs[0], found.streams[0]), *swapped_collectives(found.programs[1], 1)]


@cache
def error_of(mutant: Mutant, mode: str) -> str:
    """What the checker says; empty if it finds nothing."""
    found = for_cuda(mode)
    programs, streams = list(found.programs), list(found.streams)
    programs[mutant.rank], streams[mutant.rank] = mutant.program, mutant.streams
    try:
        check_streams(mutant.program, mutant.streams, mutant.memory)
        check_order_of_collectives(programs, streams)
    except PassError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mode", USUAL)
def test_all_mutants_are_caught(mode: str) -> None:
    errors = {mutant.name: error_of(mutant, mode) for mutant in all_mutants(mode)}
    assert len(errors) == len(all_mutants(mode)) > 150
    assert [name for name, error in errors.items() if not error] == []


def is_shown(mutant: Mutant, mode: str, seeds: int) -> bool:
    """Whether the emulator has other bits, or cannot go on, in one of so many interleavings."""
    found, expected = for_cuda(mode), plain(mode, 1)
    programs, streams = list(found.programs), list(found.streams)
    programs[mutant.rank], streams[mutant.rank] = mutant.program, mutant.streams
    emulator = Emulator(programs, streams)
    for seed in range(seeds):
        try:
            if differs(expected, emulator.run(found.inputs(), seed)):
                return True
        except (SpmdError, RuntimeError):
            return True
    return False


@pytest.mark.parametrize("mode", [
    "offload", *(pytest.param(mode, marks=pytest.mark.exhaustive) for mode in MODES if mode != "offload"),
])  # fmt: skip
def test_the_emulator_shows_mutants(mode: str, request: pytest.FixtureRequest) -> None:
    """One of each kind that it can show by default, else all."""
    exhaustive = request.config.getoption("--exhaustive")
    kinds = Counter[str]()
    for mutant in all_mutants(mode):
        kind = mutant.name.partition(":")[0]
        if (exhaustive or not kinds[kind]) and is_shown(mutant, mode, 5 if exhaustive else 3):
            kinds[kind] += 1
    print(mode, sum(kinds.values()), "of", len(all_mutants(mode)), dict(kinds))
    assert len(kinds) >= 10


def test_an_error_names_both_nodes_the_memory_the_missing_order_and_the_lines() -> None:
    errors = [error_of(m, "fully_shard") for m in all_mutants("fully_shard") if m.name.startswith("wait_missing")]
    (error,) = [each for each in errors if "split_with_sizes_copy_2 on compute" in each]
    assert "split_with_sizes_copy_2 on compute may read bytes" in error and "of arena before all_gather" in error
    assert "expected compute to wait for an event that is recorded on dp gathers behind it" in error
    assert "cuda_programs.py" in next(each for each in errors if "sum_1" in each)


@pytest.mark.parametrize("kind, says", [
    ("freed_early", "on compute uses .* in the memory of .* after it is freed"),
    ("memory_reused_early", "has written over it: that memory is used again too early"),
    ("launch_missing", "before it is written|nothing launches"),
    ("launched_twice", "expected each node to run once"),
    ("swapped_collectives", "expected all ranks to start the same collectives in the same order, but as number"),
])  # fmt: skip
def test_errors_say_what_is_wrong(kind: str, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(next(error_of(m, "fully_shard") for m in all_mutants("fully_shard") if kind in m.name))
