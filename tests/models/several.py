"""Models of images and text at once: contrastive ones, whose loss compares all rows of the batch, and others."""

from __future__ import annotations

from typing import Any

import torch

from .zoo import LENGTH, ROWS, VOCABULARY, Batch, Entry, tokens

ENCODER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
EYES = {**ENCODER, "image_size": 32, "patch_size": 8}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
READS = {**ENCODER, **ENDS, "vocab_size": VOCABULARY, "max_position_embeddings": 32}


def pictures(random: torch.Generator, size: int = 32) -> torch.Tensor:
    """(rows, 3, size, size)."""
    return torch.randn(ROWS, 3, size, size, generator=random, dtype=torch.float64)


def captions(random: torch.Generator) -> dict[str, Any]:
    """Pictures and captions, each to be matched among those of all rows."""
    ids = tokens(random)
    ids[:, -1] = 2
    return {"pixel_values": pictures(random), "input_ids": ids, "return_loss": True}


def described(random: torch.Generator) -> Batch:
    """Pictures and the captions to generate."""
    ids = tokens(random)
    return {"pixel_values": pictures(random), "input_ids": ids, "labels": ids}


def forms(random: torch.Generator) -> Batch:
    """Words with their boxes on a page, the page, and a class for each word."""
    corner = torch.randint(0, 24, (ROWS, LENGTH, 2), generator=random)
    size = torch.randint(1, 24, (ROWS, LENGTH, 2), generator=random)
    labels = torch.randint(4, (ROWS, LENGTH), generator=random)
    box = torch.cat([corner, corner + size], dim=-1)
    return {"input_ids": tokens(random), "bbox": box, "pixel_values": pictures(random), "labels": labels}


def _contrastive(name: str, **config: Any) -> Entry:
    sides = {"vision_config": EYES, "text_config": READS}
    return Entry(name, "image and text", f"{name}Model", captions, {**sides, **config}, compares=True)


ENTRIES = [
    _contrastive("CLIP", projection_dim=16),
    _contrastive("ChineseCLIP", projection_dim=16),
    _contrastive("Siglip"),
    Entry(
        "Blip",
        "image and text",
        "BlipForConditionalGeneration",
        described,
        {"vision_config": EYES, "text_config": {**READS, "encoder_hidden_size": 32, "sep_token_id": 3}},
    ),
    Entry("Git", "image and text", "GitForCausalLM", described, {**READS, "vision_config": EYES}),
    Entry(
        "LayoutLMv3",
        "image and text",
        "LayoutLMv3ForTokenClassification",
        forms,
        {
            **{
                **READS,
                "num_hidden_layers": 1,
                "max_2d_position_embeddings": 64,
                "coordinate_size": 4,
                "shape_size": 8,
            },
            **{"input_size": 32, "patch_size": 8, "num_labels": 4, "rel_pos_bins": 8, "rel_2d_pos_bins": 8},
        },
    ),
]
