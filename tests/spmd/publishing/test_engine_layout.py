"""An engine's names, fusions and splits of what is published; and one sentence where they do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd
from tests.harness.pool import Ranks
from tests.spmd.checkpoints.runs import Run

HIDDEN, HEADS, KV = 8, 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS)
        self.k_proj, self.v_proj = nn.Linear(HIDDEN, KV), nn.Linear(HIDDEN, KV)
        self.o_proj = nn.Linear(HEADS, HIDDEN, bias=False)
        self.experts = nn.Parameter(torch.empty(2, 6, HIDDEN))
        self.qkv = nn.Linear(HIDDEN, HEADS + 2 * KV)
        self.register_buffer("seen", torch.tensor(3))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, HIDDEN), nn.Linear(HIDDEN, 10, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList([Block(), Block()])
        for k, parameter in enumerate(self.parameters()):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(k))


NAMES: Any = {
    ("*.q_proj.*", "*.k_proj.*", "*.v_proj.*"): "*.attn.qkv_proj.*",
    "*.experts": ("*.experts.#.w1", "*.experts.#.w3"),
}
SPLIT: Any = {
    "embed.weight": 0,
    "head.weight": 0,
    "*.attn.qkv_proj.*": 0,
    "*.o_proj.weight": 1,
    "*.experts.*.w1": -1,
    "*.qkv.*": (0, (HEADS, KV, KV)),
}


def by_hand(model: nn.Module, rank: int, ranks: int) -> dict[str, Tensor]:
    """What rank ``rank`` of an engine has."""
    state, found = {name: each.detach() for name, each in model.state_dict().items()}, dict[str, Tensor]()
    for name in ("embed.weight", "head.weight"):
        found[name] = state[name].chunk(ranks)[rank]
    for k in range(2):
        at = f"blocks.{k}."
        for kind in ("weight", "bias"):
            of_each = [state[f"{at}{name}_proj.{kind}"].chunk(ranks)[rank] for name in "qkv"]
            found[f"{at}attn.qkv_proj.{kind}"] = torch.cat(of_each)
            fused = state[f"{at}qkv.{kind}"].split((HEADS, KV, KV))
            found[f"{at}qkv.{kind}"] = torch.cat([each.chunk(ranks)[rank] for each in fused])
        found[f"{at}o_proj.weight"] = state[f"{at}o_proj.weight"].chunk(ranks, 1)[rank]
        for expert in range(2):
            w1, w3 = state[f"{at}experts"][expert].chunk(2)
            found |= {f"{at}experts.{expert}.w1": w1.chunk(ranks, 1)[rank], f"{at}experts.{expert}.w3": w3}
        found[f"{at}seen"] = state[f"{at}seen"]
    return found


@pytest.fixture
def model(alone: None, to: str) -> Iterator[Model]:
    model = Model()
    spmd.publish(model, to=to, wait=True)
    yield model


@pytest.mark.parametrize("rank, of", [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_a_rank_of_an_engine_gets_its_parts(rank: int, of: int, model: Model, to: str) -> None:
    split = {name: value for name, value in SPLIT.items() if of < 4 or name.startswith("*")}
    expected = by_hand(model, rank, of)
    if of == 4:
        expected |= {name: model.embed.weight.detach() for name in ("embed.weight", "head.weight")}
    reader = spmd.subscribe(to, names=NAMES, split=split, rank=rank, ranks=of)
    found = reader.read()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    narrow = {name: torch.zeros_like(each, dtype=torch.float32) for name, each in found.items() if each.ndim}
    narrow |= {name: torch.zeros_like(each) for name, each in found.items() if not each.ndim}
    del narrow["head.weight"]  # an engine need not have both names
    assert reader.load(narrow) == 1 == reader.version
    assert all(torch.equal(narrow[name], expected[name].to(narrow[name].dtype)) for name in narrow)


def parts_of_parts(rank: int, world: int, to: str) -> list[str]:
    """An engine's parts of tensors that ranks have other parts of: fused, cut along the other dim, in bfloat16."""
    run = Run("fully_shard")
    run.train(rank, 0, 2)
    state = spmd.state_dict(run.model)
    spmd.publish(run.model, to=to, dtype=torch.bfloat16).wait()
    names = {("up.bias", "norm.bias"): "biases", "*": "model.*"}
    found = spmd.subscribe(to, names=names, split={"model.down.weight": (0, (3, 4)), "model.embed.*": 0}).read()
    wrong = [] if torch.equal(found["biases"], torch.cat([state["up.bias"], state["norm.bias"]]).bfloat16()) else ["b"]
    plain = {name: value for name, value in state.items() if name not in ("up.bias", "norm.bias")}
    for name, value in plain.items():
        expected = value.bfloat16() if value.is_floating_point() else value
        wrong += [name] * (not torch.equal(found[f"model.{name}"], expected))
    spmd.state_dict(run.model)
    return wrong


def test_parts_are_put_together_of_those_of_ranks(ranks: Ranks, to: str) -> None:
    assert ranks.run(2, parts_of_parts, to) == [[], []]


@pytest.mark.parametrize("options, message", [
    ({"names": {"*.nothing.*": "*.x.*"}}, r"names has '\*\.nothing\.\*', which matches no tensor of the model"),
    ({"names": {"blocks.0.qkv.weight": "blocks.1.qkv.weight"}}, r"gives blocks.1.qkv.weight to two tensors"),
    ({"names": {("embed.weight", "blocks.0.qkv.weight"): "x", "head.weight": "x"}}, "names gives x to two tensors"),
    ({"split": {"*.nothing": 0}}, r"split has '\*\.nothing', which matches none of embed.weight"),
    ({"split": {"*.qkv.weight": 2}, "ranks": 2}, r"split has dim 2 for '\*\.qkv\.weight', but blocks.0.qkv.weight has"),
    ({"split": {"*.qkv.weight": (0, (8, 4))}, "ranks": 2}, r"the sizes \[8, 4\] for blocks.0.qkv.weight, but dim 0"),
    ({"split": {"embed.weight": 0}, "ranks": 4}, "dim 0 of embed.weight over 4 ranks, but 10 is no multiple of that"),
    ({"split": {"embed.weight": "rows"}}, r"expected a dim, or \(dim, sizes\), for a pattern of names, got 'embed"),
    ({"rank": 2, "ranks": 2}, "expected rank to be less than ranks, got 2 of 2"),
    ({"rank": True}, "expected rank to be an int of at least 0, got True"),
    ({"timeout": "soon"}, "expected timeout to be a number of seconds"),
])  # fmt: skip
def test_tables_that_do_not_fit_are_one_sentence(options: Any, message: str, model: Model, to: str) -> None:
    with pytest.raises(ValueError, match=message):
        spmd.subscribe(to, **options)


@pytest.mark.parametrize("change, message", [
    (lambda state: state.pop("blocks.1.qkv.bias"), "blocks.1.qkv.bias: is published, and missing here"),
    (lambda state: state.update(extra=torch.zeros(2)), "extra: is not published"),
    (lambda state: state.update({"blocks.0.seen": torch.zeros(())}), "blocks.0.seen: torch.int64 is published"),
    (lambda state: state.update({"embed.weight": torch.zeros(10, 4)}), r"embed.weight: shape \[10, 8\] is published"),
    (lambda state: state.update({"embed.weight": torch.zeros(10, 8, device="meta")}), "embed.weight: is on the meta"),
    (
        lambda state: state.update({"blocks.0.o_proj.weight": state["blocks.1.o_proj.weight"]}),
        "blocks.1.o_proj.weight: is blocks.0.o_proj.weight here, too, but where they are published they differ",
    ),
    (lambda state: [state.pop(f"{name}.weight") for name in ("embed", "head")], "embed.weight: is published, and"),
])  # fmt: skip
def test_an_engine_that_does_not_fit_is_left_as_it_was(change: Any, message: str, model: Model, to: str) -> None:
    target = {name: torch.zeros_like(each) for name, each in model.state_dict().items()}
    change(target)
    with pytest.raises(ValueError, match=message):
        spmd.subscribe(to).load(target)
    assert not any(each.any() for each in target.values() if not each.is_meta)


@pytest.mark.parametrize("given, error, message", [
    ({"to": "tcp://host:1"}, ValueError, "in memory of this host, got 'tcp://host:1'"),
    ({"to": "/var/policy"}, ValueError, "expected to= to be in memory, but /var/policy is on "),
    ({"to": ""}, ValueError, "expected to= to be a name such as 'policy'"),
    ({"to": ".."}, ValueError, "expected to= to be a name such as 'policy'"),
    ({"to": 3}, TypeError, "expected to= to be a name or a path, got 3"),
    ({"every": 0}, ValueError, "expected every to be a number of calls from 1 on, got 0"),
    ({"dtype": torch.int8}, TypeError, "expected dtype to be a floating-point torch.dtype or None"),
    ({"wait": 1}, TypeError, "expected wait to be True or False, got 1"),
])  # fmt: skip
def test_wrong_arguments_are_one_sentence(given: Any, error: Any, message: str, alone: None, to: str) -> None:
    with pytest.raises(error, match=message):
        spmd.publish(nn.Linear(2, 2), **{"to": to, **given})


def test_what_cannot_be_published_is_named(alone: None, to: str) -> None:
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got \{\}"):
        spmd.publish({}, to=to)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight is on the meta device and has no values"):
        spmd.publish(nn.Linear(2, 2, device="meta"), to=to)
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    spmd.publish(model, to=to, wait=True)
    with pytest.raises(ValueError, match=r"has another model of this process: pass another name, or call withdraw\(\)"):
        spmd.publish(other, to=to)
    assert spmd.publish(model, to=to, wait=True).version == 2


def disagrees(rank: int, world: int, to: str) -> str:
    with pytest.raises(ValueError) as raised:
        spmd.publish(nn.Linear(2, 2), to=f"{to}-{rank}")
    return str(raised.value)


def test_ranks_that_disagree_all_raise(ranks: Ranks, to: str) -> None:
    one, other = ranks.run(2, disagrees, to)
    assert one == other and "expected the same to, every and dtype on all ranks" in one
