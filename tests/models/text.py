"""Models of text: decoders, encoders, encoder-decoders, mixtures of experts, state spaces."""

from __future__ import annotations

from typing import Any

from .zoo import VOCABULARY, Entry, MakeBatch, classes, masked_text, pairs, text

WIDTH, HEADS, LAYERS = 32, 4, 2
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2}  # two heads of queries to one of keys


def _decoder(name: str, **config: Any) -> Entry:
    return Entry(name, "decoder", f"{name}ForCausalLM", text, {**SIZES, **config})


def _encoder(name: str, model: str = "ForMaskedLM", batch: MakeBatch = masked_text, **config: Any) -> Entry:
    return Entry(name, "encoder", name + model, batch, {**SIZES, **config})


def _bart(name: str, model: str = "ForConditionalGeneration", **config: Any) -> Entry:
    sizes = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in _SIDE.items()}
    common = {"vocab_size": VOCABULARY, "d_model": WIDTH, "max_position_embeddings": 32, "pad_token_id": 0}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None}
    return Entry(name, "encoder-decoder", name + model, pairs, {**sizes, **common, **ends, **config})


_SIDE = {"layers": 1, "attention_heads": HEADS, "ffn_dim": 2 * WIDTH}
_GPT = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 32}
_T5 = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": HEADS}

ENTRIES = [
    Entry("GPT2", "decoder", "GPT2LMHeadModel", text, {**_GPT, "bos_token_id": 1, "eos_token_id": 2}),
    Entry("GPT2 classifier", "decoder", "GPT2ForSequenceClassification", classes, {**_GPT, "pad_token_id": 0}),
    _decoder("Llama", **GROUPED),
    _decoder("Qwen3", head_dim=8, **GROUPED),
    _decoder("Mistral", sliding_window=4, **GROUPED),
    _decoder("Gemma2", head_dim=8, sliding_window=4, **GROUPED),
    _decoder("Phi"),
    _decoder("GPTNeoX"),
    _decoder("OPT", ffn_dim=64, word_embed_proj_dim=WIDTH),
    _decoder("Falcon", alibi=False, new_decoder_architecture=False),
    _decoder("Bloom", n_layer=LAYERS, n_head=HEADS),
    _decoder("StableLm", **GROUPED),
    _decoder("Olmo2", **GROUPED),
    _decoder("Cohere", **GROUPED),
    _encoder("Bert"),
    _encoder("Roberta"),
    _encoder("DistilBert", dim=WIDTH, hidden_dim=64, n_layers=LAYERS, n_heads=HEADS),
    _encoder("Albert", embedding_size=16),
    _encoder("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8),
    _encoder("Electra", embedding_size=16),
    _encoder("ModernBert", local_attention=4, cls_token_id=1, sep_token_id=2),
    _encoder("MPNet"),
    Entry("Bert classifier", "encoder", "BertForSequenceClassification", classes, SIZES),
    Entry("T5", "encoder-decoder", "T5ForConditionalGeneration", pairs, {**_T5, "decoder_start_token_id": 0}),
    _bart("Bart"),
    _bart("Pegasus"),
    _bart("Marian", "MTModel"),
    _bart("MBart"),
]
