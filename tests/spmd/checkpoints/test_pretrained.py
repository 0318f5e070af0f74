"""Models read from a folder, each rank its parts, are those that transformers reads, and train as these do."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

import spmd
from tests.harness.oracle import random_generator
from tests.harness.pool import Ranks

from .runs import unequal, whole

transformers = pytest.importorskip("transformers")
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
)

OF_ALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 40,
    "max_position_embeddings": 16,
    "dtype": torch.float64,
}
LLAMA: dict[str, Any] = {**OF_ALL, "num_key_value_heads": 2}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2: dict[str, Any] = {
    "vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "dtype": torch.float64,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
MAKE: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "bert": lambda: BertForMaskedLM(BertConfig(**OF_ALL, **NO_DROPOUT)),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**LLAMA, num_local_experts=4, experts_implementation="batched_mm")
    ),
}
EXPERTS = "*.block_sparse_moe.experts.#"
NAMES: dict[str, dict[Any, Any]] = {
    "mixtral": {
        "*.mlp.experts.gate_up_proj": (f"{EXPERTS}.w1.weight", f"{EXPERTS}.w3.weight"),
        "*.mlp.experts.down_proj": (f"{EXPERTS}.w2.weight",),
        "*.mlp.gate.weight": "*.block_sparse_moe.gate.weight",
    }
}
COLUMNS_THEN_ROWS = {
    "*.[qkv]_proj.weight": {"tp": Shard(0)},
    "*.gate_proj.weight": {"tp": Shard(0)},
    "*.up_proj.weight": {"tp": Shard(0)},
    "*.o_proj.weight": {"tp": Shard(1)},
    "*.down_proj.weight": {"tp": Shard(1)},
}


def write(name: str, folder: Path, **options: Any) -> Any:
    """A folder as transformers writes it."""
    torch.manual_seed(0)
    with torch.no_grad():
        model = MAKE[name]().double()
        for parameter in model.parameters():  # not only ones and zeros
            parameter.add_(0.01 * torch.randn(parameter.shape, dtype=parameter.dtype))
    model.save_pretrained(folder, **options)
    return model


def everything(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model, and the buffers that are in no file."""
    return {name: whole(value) for name, value in (model.state_dict() | dict(model.named_buffers())).items()}


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits  # whose loss transformers computes in fp32
    loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss  # type: ignore[no-any-return]


def ids_of(k: int, rank: int = 0) -> Tensor:
    return torch.randint(40, (2, 6), generator=random_generator(rank, k))


def mode_of(style: str) -> spmd.DataParallel:
    if style != "tensor parallel":
        return spmd.DataParallel(style)  # type: ignore[arg-type]
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    return spmd.DataParallel("replicate", mesh=mesh, params=COLUMNS_THEN_ROWS)


def trained(rank: int, world: int, name: str, style: str, folder: Path) -> Any:
    """This rank's reading of a folder, its losses, and what training leaves."""
    mode = mode_of(style)
    config = AutoConfig.from_pretrained(folder, experts_implementation="batched_mm") if name == "mixtral" else None
    model = spmd.from_pretrained(folder, mode, config=config, names=NAMES.get(name))
    read = everything(model)
    shares = [each for each in model.parameters() if isinstance(each, DTensor)]
    assert bool(shares) == (style != "replicate")
    held = sum(each.to_local().numel() if isinstance(each, DTensor) else each.numel() for each in model.parameters())
    if style == "fully_shard":
        assert held < 0.6 * sum(each.numel() for each in model.parameters())
    spmd.export(folder / f"written-{style}", model, names=NAMES.get(name))
    again = spmd.from_pretrained(folder / f"written-{style}", mode, names=NAMES.get(name))
    assert unequal(read, everything(again)) == []
    step = spmd.compile(train_step, parallel_mode=mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = 0 if style == "tensor parallel" else rank
    losses = [step(model, optimizer, ids_of(k, data)).item() for k in range(3)]
    return read, losses, everything(model)


CASES = [
    ("gpt2", "fully_shard"),
    ("llama, tied", "replicate"),
    ("llama", "tensor parallel"),
    pytest.param("llama, tied", "fully_shard", marks=pytest.mark.exhaustive),  # GPT-2 is tied, too
    pytest.param("bert", "fully_shard", marks=pytest.mark.slow),
    pytest.param("mixtral", "fully_shard", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name, style", CASES)
def test_ranks_read_and_train_what_transformers_reads(name: str, style: str, ranks: Ranks, tmp_path: Path) -> None:
    kind = type(write(name, tmp_path, max_shard_size="8KB" if name != "gpt2" else "1GB"))
    theirs = kind.from_pretrained(tmp_path, **({"experts_implementation": "batched_mm"} if name == "mixtral" else {}))
    expected = {name: value.clone() for name, value in everything(theirs).items()}
    found = ranks.run(2, trained, name, style, tmp_path)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    losses = []
    for k in range(3):
        rows = [ids_of(k, rank) for rank in range(1 if style == "tensor parallel" else 2)]
        losses.append(train_step(theirs, optimizer, torch.cat(rows)).item())
    for read, got, left in found:
        assert unequal(expected, read) == []
        assert got == pytest.approx(losses, rel=1e-10)
        torch.testing.assert_close(left, everything(theirs), rtol=1e-9, atol=1e-11)


class Fused(nn.Module):
    """Projections that other files have one by one, with unequal rows, and one that they have as two."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 7, dtype=torch.float64)
        self.gate, self.up = nn.Linear(4, 3, dtype=torch.float64), nn.Linear(4, 5, dtype=torch.float64)
        self.experts = nn.Parameter(torch.zeros(3, 4, 5, dtype=torch.float64))
        self.register_buffer("scale", torch.arange(3.0), persistent=False)


TABLE: dict[Any, Any] = {
    "qkv.*": {"layer.q.*": 4, "layer.k.*": 2, "layer.v.*": 1},
    ("gate.*", "up.*"): "layer.gate_up.*",
    "experts": ["layer.#.w1", "layer.#.w3"],
}


def separate(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Write such files; returns their tensors, and those of the model."""
    random = torch.Generator().manual_seed(0)
    shapes = {"qkv.weight": (7, 4), "qkv.bias": (7,), "gate.weight": (3, 4), "gate.bias": (3,), "up.weight": (5, 4)}
    shapes |= {"up.bias": (5,), "experts": (3, 4, 5)}
    whole = {name: torch.rand(shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}
    files: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        parts = zip("qkv", whole[f"qkv.{kind}"].split([4, 2, 1]), strict=True)
        files |= {f"layer.{part}.{kind}": each.clone() for part, each in parts}
        files[f"layer.gate_up.{kind}"] = torch.cat([whole[f"gate.{kind}"], whole[f"up.{kind}"]])
    for k, expert in enumerate(whole["experts"]):
        files |= {f"layer.{k}.w1": expert[:2].clone(), f"layer.{k}.w3": expert[2:].clone()}
    folder.mkdir()
    save_file(files, folder / "model.safetensors")
    return files, whole


def read_fused(rank: int, world: int, dims: dict[str, int], folder: Path) -> list[dict[str, Tensor]]:
    """The model, what it is written as, and the model in another dtype."""
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    mode = spmd.DataParallel("replicate", mesh=mesh, params={f"*{name}*": {"tp": Shard(dims[name])} for name in dims})
    model = spmd.from_pretrained(folder, mode, model=Fused, names=TABLE)
    assert isinstance(model.experts, DTensor) and model.experts.to_local().numel() < 60
    written = folder.parent / "written"
    spmd.export(written, model, names=TABLE)
    half = spmd.from_pretrained(folder, mode, model=Fused, names=TABLE, dtype=torch.bfloat16)
    return [everything(model), load_file(written / "model.safetensors"), everything(half)]


@pytest.mark.parametrize("experts", [0, 1, 2])
@pytest.mark.parametrize("world", [2, 3])
def test_tensors_are_fused_and_split_by_a_table(experts: int, world: int, ranks: Ranks, tmp_path: Path) -> None:
    files, expected = separate(tmp_path / "separate")
    expected["scale"] = torch.arange(3.0)
    dims = {"qkv.weight": experts % 2, "up": 0, "experts": experts}
    for read, written, half in ranks.run(world, read_fused, dims, tmp_path / "separate"):
        assert unequal(expected, read) == []
        assert unequal(files, written) == []
        assert unequal({name: each.bfloat16() for name, each in expected.items()}, half) == []


def refusal(rank: int, world: int, folder: Path) -> str:
    try:
        spmd.from_pretrained(folder, "fully_shard")
    except (ValueError, OSError, spmd.SpmdError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_bad_folders_are_refused_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    write("llama", tmp_path / "good")
    good = load_file(tmp_path / "good" / "model.safetensors")

    def edited(name: str, change: Callable[[dict[str, Tensor]], Any]) -> Path:
        tensors = dict(good)
        change(tensors)
        shutil.copytree(tmp_path / "good", tmp_path / name)
        save_file(tensors, tmp_path / name / "model.safetensors", {"format": "pt"})
        return tmp_path / name

    key, other = "model.layers.0.mlp.up_proj.weight", torch.ones(2)
    torn = edited("torn", lambda tensors: None)
    os.truncate(torn / "model.safetensors", 9000)
    no_config = edited("no config", lambda tensors: None)
    (no_config / "config.json").unlink()
    cut = edited("cut", lambda tensors: None)
    (cut / "config.json").write_text('{"model_type": "lla')
    part = edited("part", lambda tensors: None)
    (part / "model.safetensors").rename(part / "first.safetensors")
    index = {"weight_map": {key: "first.safetensors", "model.norm.weight": "absent.safetensors"}}
    (part / "model.safetensors.index.json").write_text(json.dumps(index))
    expected = {
        tmp_path / "nowhere": r"FileNotFoundError: expected .*nowhere to be a folder .* no such folder",
        no_config: r"FileNotFoundError: expected config.json in .*no config",
        cut: r"ValueError: expected .*cut/config.json to be JSON",
        torn: r"SpmdError: .*torn/model.safetensors is damaged",
        part: r"SpmdError: .*absent.safetensors is damaged, or no safetensors file: No such file",
        edited("missing", lambda tensors: tensors.pop(key)): rf"ValueError: .*\n  {key}: {key} is missing in the files",
        edited("more", lambda tensors: tensors.update(more=other)): r"ValueError: .*\n  more: only in the files",
        edited("shape", lambda tensors: tensors.update({key: torch.ones(3, 2)})): (
            rf"ValueError: .*\n  {key}: shape \[3, 2\] in the files, \[24, 16\] here"
        ),
    }
    found = ranks.run(2, refusals, [*expected])
    for each in found:
        for message, pattern in zip(each, expected.values(), strict=True):
            assert re.match(pattern, message), message


def refusals(rank: int, world: int, folders: list[Path]) -> list[str]:
    return [refusal(rank, world, folder) for folder in folders]


@pytest.mark.usefixtures("alone")
def test_ties_dtypes_and_names_of_libraries(tmp_path: Path) -> None:
    model = write("llama, tied", tmp_path / "tied")
    tied: Any = spmd.from_pretrained(tmp_path / "tied", model=AutoModelForCausalLM)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight and not tied.training
    half: Any = spmd.from_pretrained(tmp_path / "tied", dtype=torch.bfloat16)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "tied", dtype=torch.bfloat16)
    assert unequal(everything(theirs), everything(half)) == []
    assert half.config.dtype is torch.bfloat16 and half.model.rotary_emb.inv_freq.dtype is torch.float32

    model.model.save_pretrained(tmp_path / "base")  # names without the "model." in front
    both = spmd.from_pretrained(tmp_path / "base", model=LlamaForCausalLM)
    assert unequal(dict(model.state_dict()), dict(both.state_dict())) == []
    assert isinstance(spmd.from_pretrained(tmp_path / "base"), LlamaModel)
    write("llama", tmp_path / "headed")
    (tmp_path / "headed" / "model.safetensors.index.json").write_text("left behind by an older save")
    body = spmd.from_pretrained(tmp_path / "headed", model=LlamaModel)
    assert unequal(everything(LlamaModel.from_pretrained(tmp_path / "headed")), everything(body)) == []

    tensors = load_file(tmp_path / "tied" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, tmp_path / "tied" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="are tied in the model, but the files have other values"):
        spmd.from_pretrained(tmp_path / "tied")


@pytest.mark.usefixtures("alone")
def test_parameters_and_buffers_that_modules_share_stay_shared(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model, held = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]), nn.Parameter(torch.ones(3, 3))
        for each in model:
            each.weight = held
        return model

    torch.manual_seed(0)
    stored = tied().state_dict()
    save_file({name: each.clone() for name, each in stored.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    model: Any = spmd.from_pretrained(tmp_path, model=tied)
    assert model[0].weight is model[1].weight and unequal(stored, dict(model.state_dict())) == []


@pytest.mark.usefixtures("alone")
def test_tables_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    separate(tmp_path / "files")
    wrong: dict[str, Any] = {
        "matches no tensor of the model": {"qvk.*": ("q.*", "k.*", "v.*")},
        "whose 7 rows are no multiple of that: give the rows of each": {"qkv.*": ("q.*", "k.*")},
        "gives qkv.weight 6 rows, but it has 7": {"qkv.*": {"q.*": 4, "k.*": 2}},
        "unequal numbers of": {"qkv.*": ("q", "k")},
        "expected one name on a side": {("gate.*", "up.*"): ("a.*", "b.*")},
        "# stands for an index": {("gate.*", "up.*"): "a.#.*"},
        "to two tensors": {"gate.*": "a.*", "up.*": "a.*"},
        "layer.0.w1: only in the files": {**TABLE, "experts": ("other.#.w1",)},
    }
    for message, table in wrong.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            spmd.from_pretrained(tmp_path / "files", model=Fused, names=table)
    with pytest.raises(TypeError, match="expected names to be a dict"):
        spmd.from_pretrained(tmp_path / "files", model=Fused, names=[])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected model\(\) to return a torch.nn.Module"):
        spmd.from_pretrained(tmp_path / "files", model=dict)

    class OnMeta(Fused):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("lost", torch.empty(2, device="meta"), persistent=False)

    with pytest.raises(ValueError, match="lost: on the meta device, and in no state dict"):
        spmd.from_pretrained(tmp_path / "files", model=OnMeta, names=TABLE)
