"""``backend="inductor"``: a second process loads the kernels of the first, and takes the islands that it took."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import spmd
from passes import print_program
from passes.ir.region import islands
from spmd import capture_call
from spmd.cache import kernel_data
from spmd.lowering import island_library
from spmd.lowering import islands as compiled_islands
from tests.harness.oracle import all_unequal, compiled_run, plain_run
from tests.harness.pool import Ranks
from tests.spmd.test_islands import Gated

from .test_warm import run
from .trainer import TracedError, Trainer, batch
from .trainer import trainer as trainer

pytestmark = pytest.mark.slow

FULLY_SHARD: dict[str, Any] = {"parallel_style": "fully_shard"}
OTHER_STYLES: list[dict[str, Any]] = [
    {"parallel_style": "replicate"},
    {"shard_optimizer": True},
    {**FULLY_SHARD, "reshard_after_forward": False},
]


def noted(patch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows with each island that is lowered, compiled or measured; every second one is found slower."""
    work: list[str] = []

    def note(module: Any, name: str, instead: Callable[..., Any] | None = None) -> None:
        original = instead or getattr(module, name)
        patch.setattr(module, name, lambda *given: (work.append(name), original(*given))[1])

    note(compiled_islands, "island_code")
    note(island_library, "cpp_library")
    note(compiled_islands, "seconds_of", lambda *_: (3.0, 1.0) if work.count("seconds_of") % 2 else (1.0, 3.0))
    return work


@pytest.mark.usefixtures("alone")
def test_a_second_process_compiles_and_measures_nothing(trainer: Trainer, tmp_path: Path) -> None:
    """Also where passes run anew, since somebody else holds the parameters."""
    traces, work, cache = trainer.count_traces(), noted(trainer.monkeypatch), tmp_path / "cache"
    cold, expected = run(trainer, cache, backend="inductor")
    assert len(traces) == 2 and {*work} == {"island_code", "cpp_library", "seconds_of"}
    rows = cold.report().islands
    assert {row.is_taken for row in rows} == {True, False} and islands(cold.program.graph)
    traces.clear(), work.clear()
    warm, got = run(trainer, cache, backend="inductor")
    assert not traces and not work, [each.program.notes for each in warm._dispatch.programs.all]
    assert got == expected
    for one, other in zip(cold._dispatch.programs.all, warm._dispatch.programs.all, strict=True):
        assert list(map(print_program, one.graphs)) == list(map(print_program, other.graphs))
    assert warm.report().islands == rows and not warm.diff("lowered", "lowered").changes
    module = trainer.start()
    model, optimizer = module.build()
    held = [p.detach() for p in model.parameters()]
    step = spmd.compile(module.step, cache=cache, backend="inductor")
    again = [step(model, optimizer, *batch(k)).detach().numpy().tobytes() for k in range(3)]
    assert held and "passes" not in step.report().seconds and len(step.report().passes) > 5
    assert again == expected[:3] and step.report().islands == rows
    assert not traces and not work


@pytest.mark.usefixtures("alone")
def test_damaged_kernels_and_those_for_something_else_are_not_taken(trainer: Trainer, tmp_path: Path) -> None:
    from torch._inductor import config

    cache = tmp_path / "cache"

    def train() -> Any:
        module = trainer.start()
        model, optimizer = module.build()
        step = spmd.compile(module.step, cache=cache, backend="inductor")
        step(model, optimizer, *batch())
        return step

    noted(trainer.monkeypatch)
    train()
    (entry,) = cache.iterdir()
    trainer.refuse_traces()
    files = sorted(entry.glob("kernels*"))
    assert [file.name for file in files] == ["kernels-0.so", "kernels.cpp", "kernels.json"]
    assert {file.name for file in files} <= {
        *json.loads((entry / "spmd-entry.json").read_text().split("\n", 1)[1])["files"]
    }
    for file in files:
        content = file.read_bytes()
        for position in (0, len(content) // 2):
            file.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
            with pytest.raises(TracedError):
                train()
        file.write_bytes(content)
    for name, change in other_surroundings(tmp_path).items():
        with trainer.monkeypatch.context() as context:
            change(context)
            with pytest.raises(TracedError):
                train()
            assert len(list(cache.iterdir())) == 1, name
    for setting in ({"cpp.simdlen": 256}, {"_pre_fusion_custom_pass": lambda nodes: nodes}):
        with config.patch(setting), pytest.raises(TracedError):
            train()
    train()


def other_surroundings(folder: Path) -> dict[str, Callable[[pytest.MonkeyPatch], object]]:
    """By which entries with kernels are compared, and a disk on which none can be loaded."""
    compiler, processor = folder / "c++", folder / "cpuinfo"
    compiler.write_text("another one")
    compiler.chmod(0o700)
    processor.write_text("flags\t\t: fpu vme de\n")
    threads = torch.get_num_threads()

    def full(content: bytes) -> Any:
        raise OSError("No space left on device")

    return {
        "processor": lambda patch: patch.setattr(kernel_data, "_CPU_FACTS", processor),
        "compiler": lambda patch: patch.setenv("CXX", str(compiler)),
        "environment": lambda patch: patch.setenv("TORCHINDUCTOR_SIMDLEN", "256"),
        "headers": lambda patch: patch.setenv("CPLUS_INCLUDE_PATH", str(folder)),
        "threads": lambda patch: patch.setattr(torch, "get_num_threads", lambda: threads + 1),
        "torch": lambda patch: patch.setattr(torch, "__version__", "2.12.9"),
        "disk": lambda patch: patch.setattr(island_library.IslandLibrary, "read", full),
    }


@pytest.mark.usefixtures("alone")
def test_verify_decides_by_what_the_entry_measured(trainer: Trainer, tmp_path: Path) -> None:
    """Islands that are slower now were quicker then: that is no difference."""
    work, cache = noted(trainer.monkeypatch), tmp_path / "cache"
    _, expected = run(trainer, cache, backend="inductor")
    work.clear()
    trainer.monkeypatch.setattr(compiled_islands, "seconds_of", lambda *_: (1.0, 9.0))
    _, got = run(trainer, f"verify:{cache}", backend="inductor")
    assert "island_code" in work and got == expected


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:.*no kernels compile here")
def test_kernels_of_a_gpu_and_what_does_not_compile_are_not_kept(trainer: Trainer, tmp_path: Path) -> None:
    def no_compiler(text: str) -> Any:
        raise OSError("no space left for c++")

    noted(trainer.monkeypatch)
    for module, name, instead, why in (
        (kernel_data, "CompiledIsland", compiled_islands.LaunchedIsland, "its kernels are those of a GPU"),
        (island_library, "cpp_library", no_compiler, "its kernels did not compile: OSError: no space left for c++"),
    ):
        with trainer.monkeypatch.context() as context:
            context.setattr(module, name, instead)
            step, _ = run(trainer, tmp_path / "cache", steps=1, backend="inductor")
        assert f"what follows the trace is not kept for later processes: {why}" in "".join(step.report().notes)
        (entry,) = (tmp_path / "cache").iterdir()
        assert not [*entry.glob("*kernel*"), *entry.glob("*.so"), *entry.glob("final*")], "the trace alone is kept"
        shutil.rmtree(entry)


def trained(
    rank: int, world: int, folder: str, mode: dict[str, Any] = FULLY_SHARD
) -> tuple[list[str], bool, list[Any], list[str]]:
    """Work on islands, whether the rank traced, the parameters, and what differs from the plain step."""
    traces, case = [], Gated(optimizer="SGD")
    with pytest.MonkeyPatch.context() as patch:
        work, original = noted(patch), capture_call.capture
        patch.setattr(capture_call, "capture", lambda *given: (traces.append(rank), original(*given))[1])
        step, got = compiled_run(
            rank, case, 3, cache=folder, parallel_mode=spmd.DataParallel(**mode), backend="inductor"
        )
    assert islands(step.program.graph)
    return work, bool(traces), got, all_unequal(plain_run(case, world, 3), got, rank, world)


def assert_starts_warm(ranks: Ranks, folder: Path, mode: dict[str, Any]) -> None:
    """Fail unless a second run traces, compiles and measures nothing, and has the bits of the first."""
    cold, warm = (ranks.run(2, trained, str(folder), mode) for _ in range(2))
    assert all(work for work, *_ in cold) and not any(work or traced for work, traced, *_ in warm)
    for one, other in zip(cold, warm, strict=True):
        assert not [*one[3], *other[3]] and all_unequal(one[2], other[2], 0, 2, 0, 0) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", OTHER_STYLES, ids=["replicate", "shard_optimizer", "kept whole"])
def test_each_style_starts_warm(ranks: Ranks, tmp_path: Path, mode: dict[str, Any]) -> None:
    assert_starts_warm(ranks, tmp_path, mode)


def test_ranks_start_warm_together_or_not_at_all(ranks: Ranks, tmp_path: Path) -> None:
    assert_starts_warm(ranks, tmp_path, FULLY_SHARD)
    for library in tmp_path.glob("*-1/kernels-0.so"):
        library.write_bytes(library.read_bytes()[:-1])
    (work, traced, _, unequal), (others, _, _, differing) = ranks.run(2, trained, str(tmp_path))
    assert work and others and traced, "rank 0 compiles, though it has entries"
    assert not [*unequal, *differing]
