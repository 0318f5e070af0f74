"""``compile(program=FOLDER)``: a dumped program runs as it stands in the file, unchanged or edited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import spmd
from passes import PassError
from tests.harness.cases import MLP
from tests.harness.pool import Ranks
from tests.harness.structure import compile_on_fake_ranks

CASE = MLP(sizes=(6, 6, 2), rows=4, optimizer="SGD")
UNEVEN = MLP(sizes=(5, 3, 1), rows=4, optimizer="SGD")
FILE = "program-0/99_lowered.py"


def trained(rank: int, case: MLP, **options: Any) -> tuple[list[Tensor], spmd.CompiledStep]:
    """The losses of three calls."""
    step = spmd.compile(case.step, parallel_mode=spmd.DataParallel("fully_shard"), **options)
    torch.manual_seed(0)
    model, optimizer = case.build()
    return [step(model, optimizer, *case.part(rank, call)) for call in range(3)], step


def dumped_and_read_back(rank: int, world: int, folder: Path) -> dict[str, Any]:
    losses, _ = trained(rank, CASE, dump=folder)
    torch.distributed.barrier()  # rank 0 has written
    same, step = trained(rank, CASE, program=folder / "step")
    found: dict[str, Any] = {"same": losses == same, "notes": step.report().notes}
    path = folder / "step" / FILE
    text = path.read_text()
    torch.distributed.barrier()
    if rank == 0:
        assert text.count("tanh.out(") == 1
        path.write_text(text.replace("tanh.out(", "sigmoid.out("))
    torch.distributed.barrier()
    changed, step = trained(rank, CASE, program=folder / "step")
    assert step.program is not None
    targets = [str(node.target) for node in step.program.graph.nodes]
    return found | {
        "differs": not torch.equal(changed[0], losses[0]),
        "edited": step.report().notes,
        "runs": ("aten.sigmoid.out" in targets, "aten.tanh.out" in targets),
    }


def test_a_dump_runs_as_it_was_and_as_it_is_edited(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "step" / FILE
    for found in ranks.run(2, dumped_and_read_back, tmp_path):
        assert found["same"] and found["differs"] and found["runs"] == (True, False)
        assert found["notes"] == (f"the program is that of {file}, as the passes made it",)
        assert found["edited"] == (f"the program is that of {file}, 1 lines of it are not those that the passes made",)


@pytest.mark.slow
def test_verify_names_what_an_edit_broke(tmp_path: Path) -> None:
    fake(tmp_path, dump=tmp_path)
    path = tmp_path / "step" / FILE
    mode, parts = spmd.DataParallel("fully_shard"), zip(CASE.part(0, 0), CASE.part(1, 0), strict=True)
    whole = [torch.cat(each) for each in parts]
    step = spmd.compile(CASE.step, parallel_mode=mode, program=tmp_path / "step")
    assert spmd.verify(step, *CASE.build(), *whole, world=2)
    path.write_text(path.read_text().replace("tanh.out(", "sigmoid.out("))
    step = spmd.compile(CASE.step, parallel_mode=mode, program=tmp_path / "step")
    verdict = spmd.verify(step, *CASE.build(), *whole, world=2)
    assert (bool(verdict), verdict.stage, verdict.node) == (False, "program", "tanh"), verdict


def one_text_for_unequal_ranks(rank: int, world: int, folder: Path) -> str:
    trained(rank, UNEVEN, dump=folder)
    torch.distributed.barrier()
    with pytest.raises((PassError, spmd.RankMismatchError)) as caught:
        trained(rank, UNEVEN, program=folder / "step")
    return str(caught.value)


def test_a_dump_of_one_rank_is_not_run_where_the_ranks_differ(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks.run(2, one_text_for_unequal_ranks, tmp_path):
        assert "does not fit" in message and "expected: " in message, message


def fake(folder: Path, case: MLP = CASE, **options: Any) -> Any:
    options = {"parallel_mode": spmd.DataParallel("fully_shard"), **options}
    return compile_on_fake_ranks(2, case.step, case.build(), *case.part(0, 0), **options)


def test_what_is_no_dump_of_the_step_is_refused(tmp_path: Path) -> None:
    fake(tmp_path, dump=tmp_path)
    folder = tmp_path / "step"
    with pytest.raises(ValueError, match=rf"with program-0/99_lowered.py in it, got {tmp_path}: did you mean {folder}"):
        spmd.compile(CASE.step, program=tmp_path)
    with pytest.raises(ValueError, match=r"got .*program-0; it has 00_capture.py, 01_partition.py"):
        spmd.compile(CASE.step, program=folder / "program-0")
    with pytest.raises(TypeError, match="expected program to be a folder's path or None, got 3"):
        spmd.compile(CASE.step, program=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected dump to be another folder than that of program="):
        spmd.compile(CASE.step, program=folder, dump=tmp_path)
    model, optimizer = UNEVEN.build()
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(
        PassError, match=rf"{folder / FILE} does not fit step/program-0: the inputs of the text are not"
    ):
        compile_on_fake_ranks(2, UNEVEN.step, (model, optimizer), *UNEVEN.part(0, 0), program=folder)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_program_that_the_folder_lacks_runs_as_compiled_and_warns(tmp_path: Path) -> None:
    fake(tmp_path, dump=tmp_path)
    (tmp_path / "step" / "program-0").rename(tmp_path / "step" / "program-7")
    with pytest.warns(UserWarning, match=r"step/program-0 runs as it was compiled: .* has program-7, no program-0"):
        fake(tmp_path, program=tmp_path / "step")
