"""Models of images: transformers, convolution nets with batch norms, both at once, segmentation and video."""

from __future__ import annotations

from typing import Any

import torch

from .zoo import ROWS, Batch, Entry, MakeBatch

SIZE, CLASSES = 32, 4
ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
PATCHES = {"image_size": SIZE, "patch_size": 8}
WINDOWS = {
    "image_size": SIZE,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
PYRAMID = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}


def images(random: torch.Generator, size: int = SIZE) -> Batch:
    """Pictures, and a class for each."""
    pixels = torch.randn(ROWS, 3, size, size, generator=random, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(CLASSES, (ROWS,), generator=random)}


def large_images(random: torch.Generator) -> Batch:
    """Twice as large."""
    return images(random, 2 * SIZE)


def maps(random: torch.Generator) -> Batch:
    """Pictures, and a class for each pixel; some do not count."""
    labels = torch.randint(CLASSES + 1, (ROWS, SIZE, SIZE), generator=random)
    return {**images(random), "labels": labels.masked_fill(labels == CLASSES, 255)}


def clips(random: torch.Generator) -> Batch:
    """Four small pictures in a row, and a class."""
    pixels = torch.randn(ROWS, 4, 3, 16, 16, generator=random, dtype=torch.float64)
    return {**images(random), "pixel_values": pixels}


def masked_images(random: torch.Generator) -> Batch:
    """Pictures, and the noise that says which patches are hidden."""
    return {
        "pixel_values": images(random)["pixel_values"],
        "noise": torch.rand(ROWS, 16, generator=random, dtype=torch.float64),
    }


def _model(
    name: str, kind: str, make: MakeBatch = images, task: str = "ForImageClassification", **config: Any
) -> Entry:
    return Entry(name, kind, name + task, make, {"num_labels": CLASSES, "drop_path_rate": 0.0, **config})


def _transformer(name: str, **config: Any) -> Entry:
    return _model(name, "vision transformer", **{**ENCODER, **PATCHES, **config})


def _convolutions(name: str, **config: Any) -> Entry:
    return _model(name, "convolution net", **config)


ENTRIES = [
    _transformer("ViT"),
    _transformer("DeiT"),
    _transformer("Beit", use_relative_position_bias=True),
    _transformer("Data2VecVision"),
    _transformer("Dinov2"),
    _transformer("Dinov2WithRegisters"),
    _transformer("ViTMSN"),
    _transformer("IJepa"),
    _model("Swin", "vision transformer", **WINDOWS),
    _model("Swinv2", "vision transformer", **WINDOWS),
    _model("DonutSwin", "vision transformer", **WINDOWS),
    _model("Pvt", "vision transformer", image_size=SIZE, sequence_reduction_ratios=[4, 2, 1, 1], **PYRAMID),
    _model("PvtV2", "vision transformer", image_size=SIZE, sr_ratios=[4, 2, 1, 1], **PYRAMID),
    _model(
        *("Hiera", "vision transformer", large_images),
        **{"image_size": [64, 64], "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2]},
    ),
    _model(
        *("MobileViT", "vision transformer"),
        **{"image_size": SIZE, "hidden_sizes": [8, 12, 16], "neck_hidden_sizes": [4, 8, 8, 8, 8, 8, 16]},
        **{"num_attention_heads": 2, "expand_ratio": 2.0},
    ),
    Entry(
        "ViTMAE",
        "vision transformer",
        "ViTMAEForPreTraining",
        masked_images,
        {
            **ENCODER,
            **PATCHES,
            "decoder_hidden_size": 32,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 4,
            "decoder_intermediate_size": 64,
        },
    ),
    _convolutions("ResNet", embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic"),
    _convolutions("RegNet", embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], groups_width=8),
    _convolutions("Bit", embedding_size=8, num_groups=4, hidden_sizes=[16, 32], depths=[1, 1]),
    _convolutions("ConvNext", **STAGES),
    _convolutions("ConvNextV2", **STAGES),
    _convolutions("MobileNetV1", image_size=SIZE, depth_multiplier=0.25),
    _convolutions("MobileNetV2", image_size=SIZE, depth_multiplier=0.3, finegrained_output=False),
    _convolutions(
        "EfficientNet",
        image_size=SIZE,
        width_coefficient=0.1,
        depth_coefficient=0.1,
        hidden_dim=128,
        kernel_sizes=[3] * 7,
    ),
    _convolutions("PoolFormer", hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1]),
    _convolutions("SwiftFormer", image_size=SIZE, depths=[1, 1, 1, 1], embed_dims=[8, 16, 16, 32], mlp_ratio=2),
    _convolutions("FocalNet", image_size=SIZE, embed_dim=8, depths=[1, 1], focal_levels=[1, 1], focal_windows=[3, 3]),
    _convolutions(
        "TextNet",
        image_size=[SIZE, SIZE],
        stem_out_channels=8,
        hidden_sizes=[8, 8, 16, 16, 16],
        conv_layer_kernel_sizes=[[[3, 3]], [[3, 1]], [[1, 3]], [[3, 3]]],
        conv_layer_strides=[[2], [2], [2], [2]],
    ),
    _model(
        *("Segformer", "segmentation", maps, "ForSemanticSegmentation"),
        **{"num_encoder_blocks": 2, "hidden_sizes": [8, 16], "depths": [1, 1], "sr_ratios": [2, 1]},
        **{"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]},
        decoder_hidden_size=16,
    ),
    _model(
        "Vivit",
        "video",
        clips,
        "ForVideoClassification",
        image_size=16,
        tubelet_size=[2, 8, 8],
        num_frames=4,
        **ENCODER,
    ),
    _model("VideoMAE", "video", clips, "ForVideoClassification", image_size=16, patch_size=8, num_frames=4, **ENCODER),
]
