"""LLaVA with a picture in each row: features take the place of tokens in ranks, micro-batches and stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import spmd

PICTURE, PATCHES, LENGTH = 39, 4, 7


def build(layers: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of one layer for pictures, and some for text."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**sizes, num_hidden_layers=1, image_size=8, patch_size=4, projection_dim=8),
        text_config=LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=40, use_cache=False),
        image_token_id=PICTURE,
        image_seq_length=PATCHES,
        vision_feature_layer=-1,
    )
    model = LlavaForConditionalGeneration(config).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batch(*tokens_of_pictures: int) -> dict[str, Tensor]:
    """A row for each number of tokens in the place of its picture."""
    random = torch.Generator().manual_seed(0)
    rows = len(tokens_of_pictures)
    ids = torch.randint(30, (rows, LENGTH), generator=random)
    for k, (row, count) in enumerate(zip(ids, tokens_of_pictures, strict=True)):
        row[k % 3 : k % 3 + count] = PICTURE
    pictures = torch.randn(rows, 3, 8, 8, generator=random, dtype=torch.float64)
    return {"input_ids": ids, "pixel_values": pictures, "labels": torch.where(ids > 25, -100, ids)}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> Tensor:
    """Forward, backward, update."""
    loss: Tensor = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("world", "options"),
    [(1, {"micro_batches": 4}), (2, {"axes": {"stages": "dp"}, "micro_batches": 2}), (2, {})],
    ids=["micro-batches", "stages", "ranks"],
)
def test_a_picture_in_each_row(world: int, options: dict[str, Any]) -> None:
    layers, passes = (2, None) if "axes" in options else (1, ())
    compiled = spmd.compile(step, parallel_mode=spmd.DataParallel(**options), passes=passes)
    verdict = spmd.verify(compiled, *build(layers), batch(*[PATCHES] * 8), world=world, steps=1)
    assert verdict, verdict


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_features_that_do_not_fit_their_tokens_cost_the_call_alone() -> None:
    """The model checks their numbers over the whole batch, and each part those of its own rows."""
    compiled = spmd.compile(step, parallel_mode=spmd.DataParallel(micro_batches=2), passes=())
    model, optimizer = build()
    compiled(model, optimizer, batch(*[PATCHES] * 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"Image features and image tokens do not match.*modeling_llava\.py"):
        compiled(model, optimizer, batch(4, 4, 4, 3))
    with pytest.raises(ValueError, match="all 8 rows of their own source, but one takes 9"):
        compiled(model, optimizer, batch(4, 5, 3, 4))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
