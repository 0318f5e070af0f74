"""``spmd.generate``: text of models whose parameters are split, that of one device that has all ranks' prompts."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import spmd
from spmd.generation.generate import _generators, next_token
from spmd.state.split_tensor import SplitTensor
from tests.harness.pool import Ranks

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 5,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2},
    "GPT2": {},
    "Mistral": {"num_key_value_heads": 2, "sliding_window": 8},  # shorter than the text
    "Mixtral": {"num_key_value_heads": 4, "num_local_experts": 4, "experts_implementation": "batched_mm"},
}
COLUMNS, ROWS = {"tp": Shard(0)}, {"tp": Shard(1)}
BY_HEADS = {f"*.{name}_proj.weight": COLUMNS for name in ("q", "k", "v", "gate", "up")} | {
    f"*.{name}_proj.weight": ROWS for name in ("o", "down")
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 3.0, "top_k": 20},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "scores": {"do_sample": False, "return_dict_in_generate": True, "output_scores": True},
}


def built(family: str) -> Any:
    """A small decoder in fp64."""
    import transformers

    config = transformers.AutoConfig.for_model(family.lower(), **SIZES, **FAMILIES[family])
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).double().eval()


def prompts() -> tuple[Tensor, Tensor]:
    """Five prompts of up to 7 tokens, padded on the left, and their mask."""
    ids = torch.randint(6, 40, (5, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[3, :1] = 0
    return ids * mask, mask


def train(model: Any, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    """A step, after which parameters are split."""
    optimizer.zero_grad()
    loss: Tensor = model(tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    return loss.detach()


def trained(model: Any, step: Callable[..., Any], rows: slice) -> Any:
    """The model after a step on some rows of a batch."""
    tokens = torch.randint(6, 40, (4, 8), generator=torch.Generator().manual_seed(2))
    step(model, torch.optim.SGD(model.parameters(), 0.1), tokens[rows])
    return model


def mode_of(kind: str, world: int) -> spmd.DataParallel:
    """A mode, whose parameters are split, or parts of their matrices."""
    if kind != "tensor":
        return spmd.DataParallel("fully_shard", micro_batches=2 if kind == "micro-batches" else 1)
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    return spmd.DataParallel("replicate", mesh=mesh, axes={"batch": "dp", "tensor": "tp"}, params=BY_HEADS)


def differences(rank: int, world: int, family: str, kind: str, ways: list[str], new_tokens: int) -> list[str]:
    """What is other text than that of one device, or other random numbers afterwards."""
    plain, mode = built(family), mode_of(kind, world)
    model = copy.deepcopy(plain)
    own = slice(None) if kind == "tensor" else slice(0, 2) if rank == 0 else slice(2, 5)  # unequal numbers of prompts
    trained(plain, train, slice(None))
    trained(
        model,
        spmd.compile(train, parallel_mode=mode),
        slice(None) if kind == "tensor" else slice(2 * rank, 2 * rank + 2),
    )
    assert any(isinstance(p, SplitTensor) for p in model.parameters())
    found, (ids, mask) = [], prompts()
    for way in ways:
        options = {"max_new_tokens": new_tokens, **WAYS[way]}
        torch.manual_seed(3)
        want = plain.generate(ids, attention_mask=mask, **options)
        drawn = torch.rand(1)
        torch.manual_seed(3 + rank)
        got = spmd.generate(model, ids[own], attention_mask=mask[own], parallel_mode=mode, **options)
        if way == "scores":
            for one, other in zip(want.scores, got.scores, strict=True):
                torch.testing.assert_close(one[own], other, rtol=1e-9, atol=1e-9)
            want, got = want.sequences, got.sequences
        each = options.get("num_return_sequences", 1)
        if not torch.equal(want.unflatten(0, (-1, each))[own].flatten(0, 1), got):
            found.append(f"rank {rank}, {way}: {got.tolist()}")
        if rank == 0 and torch.rand(1) != drawn:
            found.append(f"{way}: other random numbers follow")
    assert any(isinstance(p, SplitTensor) for p in model.parameters()), "parameters were made whole"
    return found


@pytest.mark.parametrize("family, kind, ways, new_tokens", [
    ("Llama", "rows", ["greedy", "sampled", "scores"], 6),
    ("Llama", "tensor", ["sampled"], 6),
    ("Mistral", "micro-batches", ["beams"], 9),
    pytest.param("Llama", "rows", [*WAYS], 6, marks=pytest.mark.exhaustive),
    pytest.param("Llama", "tensor", [*WAYS], 6, marks=pytest.mark.exhaustive),
    pytest.param("GPT2", "rows", ["sampled"], 6, marks=pytest.mark.exhaustive),
    pytest.param("Mixtral", "rows", ["greedy", "sampled"], 6, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_text_is_that_of_one_device(ranks: Ranks, family: str, kind: str, ways: list[str], new_tokens: int) -> None:
    assert not [line for lines in ranks.run(2, differences, family, kind, ways, new_tokens) for line in lines]


@pytest.mark.usefixtures("alone")
def test_programs_and_caches_serve_later_calls_and_have_no_memory_between_them() -> None:
    model, (ids, mask) = built("Llama"), prompts()
    first = spmd.generate(model, ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    (compiled,) = _generators[model].kept.values()
    assert len(compiled.forward.programs) == 2
    assert torch.equal(spmd.generate(model, ids, attention_mask=mask, max_new_tokens=4, do_sample=False), first)
    assert _generators[model].kept == {5: compiled} and len(compiled.forward.programs) == 2
    assert all(not part.untyped_storage().nbytes() for part in compiled.cache._parts())
    assert "forward" not in vars(model)
    model.generation_config.use_cache = False  # as a model may have it that was trained with checkpoints
    most = {"max_length": 10, "do_sample": False}
    assert torch.equal(
        spmd.generate(model, ids, attention_mask=mask, **most), model.generate(ids, attention_mask=mask, **most)
    )
    longer = spmd.generate(model, ids, attention_mask=mask, max_new_tokens=70, do_sample=False)
    assert torch.equal(longer, model.generate(ids, attention_mask=mask, max_new_tokens=70, do_sample=False))


@pytest.mark.usefixtures("alone")
def test_the_forward_is_verified_and_certified_with_whole_caches() -> None:
    """Simulated ranks have no part of what a step keeps, so that the caches are whole here."""
    from transformers import StaticCache

    model, ids = built("Llama"), prompts()[0][:4]
    cache = StaticCache(config=model.config, max_cache_len=64)
    cache.early_initialization(4, 2, 4, torch.float64, torch.device("cpu"))
    step = spmd.compile(next_token, parallel_mode=spmd.DataParallel("fully_shard", inputs={"rows": Shard(0)}))
    arguments = model, cache, {"input_ids": ids}, {"use_cache": True}
    assert spmd.verify(step, *arguments, world=2)
    assert spmd.certify(step, *arguments, world=2)


def disagreement(rank: int, world: int, options: dict[str, Any], lengths: list[int], masked: list[bool]) -> str:
    """The error of ranks that would generate other texts, or wait for each other."""
    model = built("Llama")
    ids = torch.full((1, lengths[rank]), 7)
    mask = {"attention_mask": torch.ones_like(ids)} if masked[rank] else {}
    try:
        spmd.generate(model, ids, **mask, **{name: values[rank] for name, values in options.items()})
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("options, lengths, masked, message", [
    ({"max_new_tokens": [2, 3]}, [4, 4], [True, True], "equal options on all ranks of .*, got other max_new_tokens"),
    ({"max_new_tokens": [2, 2]}, [4, 5], [False, False], r"prompts of \[4, 5\] tokens: pass an attention_mask"),
    ({"eos_token_id": [[3, 4], [3]]}, [4, 4], [True, True], "got other eos_token_id"),
    ({"max_new_tokens": [2, 2]}, [4, 4], [True, False], "expected an attention_mask on all ranks .* or on none"),
])  # fmt: skip
def test_ranks_that_disagree_are_named(
    ranks: Ranks, options: dict[str, Any], lengths: list[int], masked: list[bool], message: str
) -> None:
    assert all(re.search(message, found) for found in ranks.run(2, disagreement, options, lengths, masked))


@pytest.mark.usefixtures("alone")
def test_what_it_cannot_do_is_refused_before_anything_is_compiled() -> None:
    import transformers

    model, (ids, mask) = built("Llama"), prompts()
    with pytest.raises(ValueError, match="leave out past_key_values"):
        spmd.generate(model, ids, past_key_values=None)
    with pytest.raises(ValueError, match="cannot generate with output_hidden_states, max_time"):
        spmd.generate(model, ids, max_time=1.0, output_hidden_states=True)
    with pytest.raises(TypeError, match="expected a model of transformers that can generate, got Linear"):
        spmd.generate(torch.nn.Linear(2, 2), ids)
    with pytest.raises(ValueError, match="expected prompts on some rank"):
        spmd.generate(model, ids[:0])
    with pytest.raises(ValueError, match="not by assisted_generation"):
        spmd.generate(model, ids, prompt_lookup_num_tokens=3)
    with pytest.raises(ValueError, match=r"shape of input_ids, \[5, 7\], got \[1, 7\]"):
        spmd.generate(model, ids, attention_mask=mask[:1])
    encoder = transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=2, d_kv=4)
    )
    with pytest.raises(ValueError, match="T5ForConditionalGeneration has an encoder"):
        spmd.generate(encoder, ids)
    neo = transformers.GPTNeoConfig(hidden_size=8, num_layers=1, num_heads=2, attention_types=[[["global"], 1]])
    with pytest.raises(ValueError, match="which GPTNeoForCausalLM cannot read"):
        spmd.generate(transformers.GPTNeoForCausalLM(neo), ids)
    assert model not in _generators or not _generators[model].kept
