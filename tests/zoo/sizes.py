"""What a tiny configuration is made of: a value for every common name of a configuration field."""

from typing import Any

VOCABULARY = 96
WINDOW = 40
HEAD_DIM = 16
HIDDEN = 64
MAX_LENGTH = 1024
# Two layers; four where kinds of layers take turns.
LAYERS, MIXED_LAYERS = 2, 4
MAX_PARAMETERS = 20_000_000


def _same(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


LAYER_COUNTS = frozenset(
    _same("num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers", LAYERS)
    | _same("num_decoder_layers num_encoder_layers", LAYERS)
)

TINY: dict[str, Any] = {
    **_same("vocab_size output_vocab_size n_token n_words unpadded_vocab_size", VOCABULARY),
    **_same("hidden_size d_model n_embd emb_dim embed_dim embedding_size word_embed_proj_dim", HIDDEN),
    **_same("intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dff d_ff d_inner dim_ff", HIDDEN),
    **_same("ffn_hidden_size moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size", HIDDEN),
    **_same("shared_intermediate_size dense_intermediate_size shared_experts_intermediate_size", HIDDEN),
    **_same("prefix_dense_intermediate_size intermediate_size_mlp feed_forward_size", HIDDEN),
    **dict.fromkeys(LAYER_COUNTS, LAYERS),
    **_same(
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads",
        4,
    ),
    **_same("swa_num_attention_heads num_decoder_attention_heads num_encoder_attention_heads", 4),
    **_same("num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads", 2),
    **_same("head_dim swa_head_dim dim_head kv_channels attention_head_dim", HEAD_DIM),
    **_same("max_position_embeddings n_positions n_ctx max_seq_len model_max_length max_sequence_length", MAX_LENGTH),
    **_same("max_target_positions max_source_positions", MAX_LENGTH),
    # Every expert is chosen: which experts win must not hang on rounding.
    **_same("num_experts num_local_experts n_routed_experts moe_num_experts", 2),
    **_same("num_experts_per_tok moe_k moe_topk top_k_experts moe_top_k", 2),
    **_same("n_group topk_group n_groups n_shared_experts num_shared_experts moe_num_shared_experts", 1),
    **_same("zero_expert_num mamba_n_groups", 1),
    **_same("first_k_dense_replace num_dense_layers", 1),
    # Latent attention and its indexers.
    **_same("q_lora_rank kv_lora_rank o_lora_rank", 32),
    **_same("qk_rope_head_dim qk_nope_head_dim v_head_dim index_head_dim", HEAD_DIM),
    **_same("index_n_heads index_topk", 4),
    # Recurrent layers.
    **_same("linear_num_key_heads linear_num_value_heads mamba_n_heads mamba_num_heads linear_num_heads", 4),
    **_same("linear_key_head_dim linear_value_head_dim linear_head_dim mamba_head_dim", HEAD_DIM),
    **_same("mamba_d_state state_size ssm_state_size mamba_d_ssm lru_width", HIDDEN),
    **_same("mamba_d_head", 32),
    # No dropout in any spelling; eval mode would do, but a model may ask its configuration.
    **_same("attention_dropout hidden_dropout hidden_dropout_prob attention_probs_dropout_prob dropout", 0.0),
    **_same("activation_dropout resid_pdrop embd_pdrop attn_pdrop embedding_dropout dropout_p emb_pdrop", 0.0),
    **_same("decoder_layerdrop encoder_layerdrop layerdrop residual_dropout classifier_dropout", 0.0),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "is_decoder": True,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "tie_word_embeddings": False,
    "use_cache": True,
}
# Given only where the class uses a window.
WINDOW_NAMES = frozenset(_same("sliding_window sliding_window_size window_size attention_window_size", WINDOW))
