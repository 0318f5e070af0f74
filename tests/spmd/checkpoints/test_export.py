"""Safetensors files for other tools, and from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import spmd
from spmd.checkpoints import export as export_module
from spmd.checkpoints import storage
from tests.harness.pool import Ranks

from .runs import Run, unequal, whole


def round_trip(rank: int, world: int, layout: str, folder: Path) -> list[str]:
    """What differs after exports of shards, as one process reads them, and as ranks do into other shards."""
    run = Run(layout, on_meta=True)
    run.update()
    expected = {name: whole(value) for name, value in run.model.state_dict().items()}
    wrong = []
    for limit in (500, 1_000_000):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(export_module, "_LEAST", limit)
            patched.setattr(storage, "_LEAST", limit)  # and each rank writes its parts to several
            spmd.export(folder / str(limit), run.model)
        found: dict[str, Any] = {"head.weight": expected["head.weight"]}  # tied, and stored once
        for path in (folder / str(limit)).glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                assert file.metadata() == {"format": "pt"}
                found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        other = Run(layout, seed=1, on_meta=True).model
        assert spmd.load(folder / str(limit), model=other) is None
        got = {name: whole(value) for name, value in other.state_dict().items()}
        wrong += unequal(expected, found) + unequal(expected, got)
    return wrong


@pytest.mark.parametrize("layout, world", [("fully_shard", 2), ("hybrid", 4), ("tensor parallel", 3), ("annotated", 2)])
def test_shards_become_files_and_files_shards(layout: str, world: int, ranks: Ranks, tmp_path: Path) -> None:
    earlier = tmp_path / "500" / "model-00001-of-00009.safetensors"
    earlier.parent.mkdir()
    earlier.touch()
    assert ranks.run(world, round_trip, layout, tmp_path) == [[]] * world
    assert [path.name for path in (tmp_path / "1000000").iterdir()] == ["model.safetensors"]
    *files, index = sorted(path.name for path in (tmp_path / "500").iterdir())
    assert index == "model.safetensors.index.json"
    assert files == [f"model-{k:05d}-of-00003.safetensors" for k in (1, 2, 3)]
    where = json.loads((tmp_path / "500" / index).read_text())["weight_map"]
    assert set(where.values()) == set(files) and "embed.weight" in where and "head.weight" not in where


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_hugging_face_reads_it_and_is_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    spmd.export(tmp_path / "ours", model, dtype=torch.bfloat16)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16)
    rounded = {name: value.bfloat16() for name, value in model.state_dict().items()}
    assert unequal(rounded, dict(theirs.state_dict())) == []

    model.save_pretrained(tmp_path / "theirs", max_shard_size="4KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    other = transformers.GPT2LMHeadModel(config)
    spmd.load(tmp_path / "theirs", model=other)
    assert unequal(dict(model.state_dict()), dict(other.state_dict())) == []


@pytest.mark.usefixtures("alone")
def test_what_does_not_fit_is_listed(tmp_path: Path) -> None:
    spmd.export(tmp_path, nn.Linear(2, 3), dtype=torch.float16)
    (file,) = tmp_path.iterdir()
    with pytest.raises(ValueError) as raised:
        spmd.load(file, model=nn.Sequential(nn.Linear(2, 3)))
    assert "model.0.weight: missing in the checkpoint" in str(raised.value)
    assert "model.bias: unexpected, only in the checkpoint" in str(raised.value)
    with pytest.raises(ValueError, match=r"float16 in the checkpoint, torch.float32 here"):
        spmd.load(tmp_path, model=nn.Linear(2, 3))
    with pytest.raises(ValueError, match="expected one model, got optimizer"):
        model = nn.Linear(2, 3)
        spmd.load(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters()))


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    class Noted(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"note": "text"}

        def set_extra_state(self, state: Any) -> None: ...

    with pytest.raises(ValueError, match=r"_extra_state.note is no tensor"):
        spmd.export(tmp_path / "new", Noted(2, 3))
    with pytest.raises(TypeError, match=r"a floating-point torch.dtype"):
        spmd.export(tmp_path / "new", nn.Linear(2, 3), dtype=torch.int8)
    assert not (tmp_path / "new").exists()
