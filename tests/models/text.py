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


def _experts(name: str, **config: Any) -> Entry:
    return Entry(name, "mixture of experts", f"{name}ForCausalLM", text, {**SIZES, **GROUPED, **_EXPERTS, **config})


def _state_space(name: str, **config: Any) -> Entry:
    return Entry(name, "state space", f"{name}ForCausalLM", text, {**SIZES, **config})


def _bart(name: str, model: str = "ForConditionalGeneration", **config: Any) -> Entry:
    sizes = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in _SIDE.items()}
    common = {"vocab_size": VOCABULARY, "d_model": WIDTH, "max_position_embeddings": 32, "pad_token_id": 0}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None}
    return Entry(name, "encoder-decoder", name + model, pairs, {**sizes, **common, **ends, **config})


_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDTH,
    "experts_implementation": "batched_mm",  # the one of transformers that runs in fp64 and looks at no value
    "output_router_logits": True,  # so that the loss has the part that balances the experts' load
}
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_DEEPSEEK = {**_MLA, "num_key_value_heads": HEADS, "head_dim": 8, "first_k_dense_replace": 1, "n_shared_experts": 1}
_DELTA = {
    "head_dim": 8,
    "linear_num_value_heads": HEADS,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_XL = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_inner": 64, "n_head": HEADS, "n_layer": LAYERS}
_MAMBA = {"state_size": 4, "conv_kernel": 3, "expand": 2, "time_step_rank": 4}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 4}
_ONE_KEY = {"num_key_value_heads": 1, "attention_window_size": 8}
_SIDE = {"layers": 1, "attention_heads": HEADS, "ffn_dim": 2 * WIDTH}
_GPT = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 32}
_T5 = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": HEADS}
_LFM2 = {"block_dim": WIDTH, "conv_L_cache": 3}
_LLAMA4 = {"head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 4, "num_experts_per_tok": 1}

ENTRIES = [
    Entry("GPT2", "decoder", "GPT2LMHeadModel", text, {**_GPT, "bos_token_id": 1, "eos_token_id": 2}),
    Entry("GPT2 classifier", "decoder", "GPT2ForSequenceClassification", classes, {**_GPT, "pad_token_id": 0}),
    _decoder("Llama", **GROUPED),
    _decoder("Qwen3", head_dim=8, **GROUPED),
    _decoder("Mistral", sliding_window=4, **GROUPED),
    _decoder("Gemma2", head_dim=8, sliding_window=8, **GROUPED),
    _decoder("Phi"),
    _decoder("GPTNeoX"),
    _decoder("OPT", ffn_dim=64, word_embed_proj_dim=WIDTH),
    _decoder("Falcon", alibi=False, new_decoder_architecture=False),
    _decoder("Bloom", n_layer=LAYERS, n_head=HEADS),
    _decoder("StableLm", **GROUPED),
    _decoder("Olmo2", **GROUPED),
    _decoder("Cohere", **GROUPED),
    _decoder("Phi3", **GROUPED),
    _decoder("Starcoder2", sliding_window=4, **GROUPED),
    _decoder("Nemotron", **GROUPED),
    _decoder("Mpt", d_model=WIDTH, n_heads=HEADS, n_layers=LAYERS, max_seq_len=32),
    Entry("GPTJ", "decoder", "GPTJForCausalLM", text, {**_GPT, "rotary_dim": 4, "bos_token_id": 1, "eos_token_id": 2}),
    Entry("XLNet", "decoder", "XLNetLMHeadModel", text, _XL),
    _experts("Mixtral"),
    _experts("Qwen3Moe", head_dim=8),
    _experts("Olmoe"),
    _experts("GptOss", head_dim=8, sliding_window=4),
    _experts("DeepseekV3", n_group=2, topk_group=1, **_DEEPSEEK),
    _experts("GraniteMoe"),
    _experts("Qwen3Next", output_router_logits=False, shared_expert_intermediate_size=WIDTH, **_DELTA),
    _state_space("Mamba", **_MAMBA),
    _state_space("FalconMamba", **_MAMBA),
    _state_space("Mamba2", state_size=4, conv_kernel=3, n_groups=1, num_heads=8, head_dim=8, chunk_size=4),
    _state_space("Rwkv", context_length=32, attention_hidden_size=WIDTH),
    _state_space("RecurrentGemma", lru_width=WIDTH, head_dim=8, block_types=["recurrent", "attention"], **_ONE_KEY),
    _state_space("Bamba", attn_layer_indices=[1], **GROUPED, **_MAMBA2),
    _encoder("Bert"),
    _encoder("Roberta"),
    _encoder("DistilBert", dim=WIDTH, hidden_dim=64, n_layers=LAYERS, n_heads=HEADS),
    _encoder("Albert", embedding_size=16),
    _encoder("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8),
    _encoder("Electra", embedding_size=16),
    _encoder("ModernBert", local_attention=4, cls_token_id=1, sep_token_id=2),
    _encoder("MPNet"),
    _encoder("ConvBert", embedding_size=16, head_ratio=2),
    _encoder("MobileBert", embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16),
    _encoder("FNet"),
    Entry("Bert classifier", "encoder", "BertForSequenceClassification", classes, SIZES),
    Entry("T5", "encoder-decoder", "T5ForConditionalGeneration", pairs, {**_T5, "decoder_start_token_id": 0}),
    Entry("UMT5", "encoder-decoder", "UMT5ForConditionalGeneration", pairs, {**_T5, "decoder_start_token_id": 0}),
    _bart("Bart"),
    _bart("Pegasus"),
    _bart("Marian", "MTModel"),
    _bart("MBart"),
    # Not on any list when the compiler was written.
    _decoder("BioGpt"),
    _decoder("Glm", head_dim=8, **GROUPED),
    _decoder("DiffLlama", **GROUPED),
    _decoder("Doge", **GROUPED),
    _decoder("BitNet", **GROUPED),
    _decoder("NanoChat", **GROUPED),
    _decoder("SmolLM3", **GROUPED),
    _decoder("Exaone4", sliding_window=4, **GROUPED),
    _decoder("GPTNeo", attention_types=[[["global", "local"], 1]], num_layers=2, num_heads=HEADS, window_size=4),
    _decoder("Lfm2", block_auto_adjust_ff_dim=False, layer_types=["conv", "full_attention"], **_LFM2, **GROUPED),
    _experts("Qwen2Moe", shared_expert_intermediate_size=WIDTH),
    _decoder("Llama4", attention_chunk_size=4, interleave_moe_layer_step=1, **_LLAMA4, **GROUPED),
    _state_space("FalconH1", mamba_d_ssm=64, **GROUPED, **_MAMBA2),
    _encoder("BigBird", attention_type="block_sparse", block_size=2, num_random_blocks=1),
    _encoder("Yoso"),
    _encoder("RoFormer"),
    _encoder("SqueezeBert", embedding_size=WIDTH),
    _encoder("Esm", mask_token_id=4, token_dropout=True),
    _encoder("Luke", entity_vocab_size=10, entity_emb_size=8),
    _encoder("NomicBert"),
    _encoder("Deberta", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    _encoder("EuroBert", **GROUPED),
    _encoder("Tapas", type_vocab_sizes=[3, 8, 8, 2, 8, 8, 8]),
    _bart("PegasusX", block_size=4, num_global_tokens=2),
    _bart("M2M100"),
    _bart("Mvp"),
]
