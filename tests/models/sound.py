"""Models of sound and of other series: speech encoders and recognition, spectrograms, forecasts."""

from __future__ import annotations

from typing import Any

import torch

from .zoo import ROWS, VOCABULARY, Batch, Entry

CLASSES, SAMPLES, MELS, FRAMES = 4, 312, 16, 32
ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
SPEECH = {
    **{"conv_dim": [8, 8], "conv_kernel": [8, 3], "conv_stride": [4, 2], "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16},
    **{"vocab_size": 12, "num_labels": CLASSES, "mask_time_prob": 0.0},
}
_SIDE = {"layers": 1, "attention_heads": 4, "ffn_dim": 64}
PAIR = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in _SIDE.items()}
TOKENS = {
    **{"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3},
    "max_target_positions": 16,
}
FORECAST = {
    **{"prediction_length": 4, "context_length": 12, "lags_sequence": [1, 2], "num_time_features": 2, "d_model": 16},
    **{f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in (("layers", 1), ("attention_heads", 2))},
    **{"encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
}
CHANNELS = {"num_input_channels": 3, "context_length": 32, "patch_length": 4, "patch_stride": 4, "prediction_length": 8}


def draw(random: torch.Generator, *shape: int) -> torch.Tensor:
    """(rows, ...) numbers."""
    return torch.randn(ROWS, *shape, generator=random, dtype=torch.float64)


def waves(random: torch.Generator) -> Batch:
    """Samples, and a class for each row."""
    return {"input_values": draw(random, SAMPLES), "labels": torch.randint(CLASSES, (ROWS,), generator=random)}


def spectra(random: torch.Generator) -> Batch:
    """(row, frame, mel), and a class."""
    return {**waves(random), "input_values": draw(random, FRAMES, MELS)}


def features(random: torch.Generator) -> Batch:
    """The same under another name."""
    batch = spectra(random)
    return {"input_features": batch["input_values"], "labels": batch["labels"]}


def heard(random: torch.Generator, turned: bool = True) -> Batch:
    """Spectra, and transcripts of unequal length."""
    labels = torch.randint(8, VOCABULARY, (ROWS, 7), generator=random)
    labels = labels.masked_fill(torch.arange(7) >= torch.randint(3, 8, (ROWS, 1), generator=random), -100)
    return {"input_features": draw(random, *((MELS, FRAMES) if turned else (FRAMES, MELS))), "labels": labels}


def heard_by_frame(random: torch.Generator) -> Batch:
    """With the frames in front."""
    return heard(random, turned=False)


def forecasts(random: torch.Generator) -> Batch:
    """A series, features of its times, and its continuation."""
    return {
        "past_values": draw(random, 14),
        "past_time_features": draw(random, 14, 2),
        "past_observed_mask": torch.ones(ROWS, 14),
        "future_values": draw(random, 4),
        "future_time_features": draw(random, 4, 2),
    }


def channels(random: torch.Generator) -> Batch:
    """Three series at once."""
    return {"past_values": draw(random, 32, 3), "future_values": draw(random, 8, 3)}


def _speech(name: str, **config: Any) -> Entry:
    return Entry(name, "speech", f"{name}ForSequenceClassification", waves, {**ENCODER, **SPEECH, **config})


ENTRIES = [
    _speech("Wav2Vec2"),
    _speech("Hubert"),
    _speech("WavLM", num_buckets=64),
    _speech("UniSpeech"),
    _speech("UniSpeechSat"),
    _speech("SEW", squeeze_factor=2),
    _speech("SEWD", squeeze_factor=2),
    _speech("Wav2Vec2Conformer", position_embeddings_type="rotary"),
    _speech("Data2VecAudio"),
    Entry(
        "Wav2Vec2Bert",
        "speech",
        "Wav2Vec2BertForSequenceClassification",
        features,
        {
            **ENCODER,
            "feature_projection_input_dim": MELS,
            "conv_depthwise_kernel_size": 3,
            "mask_time_prob": 0.0,
            "vocab_size": 12,
            "num_labels": CLASSES,
            "classifier_proj_size": 16,
        },
    ),
    Entry(
        "AST",
        "spectrograms",
        "ASTForAudioClassification",
        spectra,
        {
            **ENCODER,
            "patch_size": 8,
            "frequency_stride": 4,
            "time_stride": 8,
            "num_mel_bins": MELS,
            "max_length": FRAMES,
            "num_labels": CLASSES,
        },
    ),
    Entry(
        "Whisper",
        "speech to text",
        "WhisperForConditionalGeneration",
        heard,
        {
            **PAIR,
            **TOKENS,
            "d_model": 32,
            "num_mel_bins": MELS,
            "max_source_positions": FRAMES // 2,
        },
    ),
    Entry(
        "Speech2Text",
        "speech to text",
        "Speech2TextForConditionalGeneration",
        heard_by_frame,
        {
            **PAIR,
            **TOKENS,
            "d_model": 32,
            "input_feat_per_channel": MELS,
            "conv_channels": 16,
            "conv_kernel_sizes": [3, 3],
            "pad_token_id": 1,
        },
    ),
    Entry(
        "PatchTST",
        "forecast",
        "PatchTSTForPrediction",
        channels,
        {
            **CHANNELS,
            "d_model": 16,
            "num_attention_heads": 2,
            "ffn_dim": 32,
            "num_hidden_layers": 1,
        },
    ),
    Entry(
        "PatchTSMixer", "forecast", "PatchTSMixerForPrediction", channels, {**CHANNELS, "d_model": 16, "num_layers": 1}
    ),
    Entry("TimeSeriesTransformer", "forecast", "TimeSeriesTransformerForPrediction", forecasts, FORECAST),
    Entry("Informer", "forecast", "InformerForPrediction", forecasts, FORECAST),
]
