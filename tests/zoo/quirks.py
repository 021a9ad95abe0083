"""The classes whose tiny configuration needs a word of its own, and why."""

import dataclasses
from typing import Any

from tests.zoo.sizes import HEAD_DIM, HIDDEN, VOCABULARY, WINDOW


@dataclasses.dataclass(frozen=True)
class Quirk:
    """What one class needs beside ``sizes.TINY``.

    Attributes:
        values: fields of the configuration; a dict holds those of a sub-configuration.
        eager: run the stock model's own eager attention: sdpa drops its softcap.
        cannot: why there can be no model of this class alone.
    """

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    eager: bool = False
    cannot: str | None = None


def _values(**values: Any) -> Quirk:
    return Quirk(values)


_TURNS = ["sliding_attention", "full_attention"] * 2
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Gemma's later families: small tables per layer, and global layers with another head size than sliding ones.
_GEMMA3N = {
    "layer_types": _TURNS,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
}
_GEMMA4 = {
    "layer_types": _TURNS,
    "global_head_dim": 2 * HEAD_DIM,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
}
_DRAFT_HEAD = Quirk(cannot="a draft head, which reads the keys and values of the model it drafts for")

QUIRKS: dict[str, Quirk] = {
    # One layer with attention among recurrent ones, which is where the class's masks come from.
    "BambaForCausalLM": _values(attn_layer_indices=[1]),
    "GraniteMoeHybridForCausalLM": _values(layer_types=["linear_attention", "full_attention"]),
    "JambaForCausalLM": _values(attn_layer_period=2, attn_layer_offset=1),
    "Lfm2ForCausalLM": _values(layer_types=["conv", "full_attention"]),
    "Lfm2MoeForCausalLM": _values(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "Zamba2ForCausalLM": _values(layers_block_type=["linear_attention", "hybrid"] * 2),
    # Tables of hashes.
    "BltForCausalLM": _values(encoder_hash_byte_group_vocab=64, encoder_hash_byte_group_nb_functions=1),
    # The rotated part must fit into a head.
    "CodeGenForCausalLM": _values(rotary_dim=HEAD_DIM),
    "GPTJForCausalLM": _values(rotary_dim=HEAD_DIM),
    "CohereCompassForCausalLM": _values(
        layer_types=_TURNS,
        num_hidden_layers=4,
        sliding_window=WINDOW,
        rope_parameters={kind: _ROPE | {"mrope_section": [3, 3, 2]} for kind in _TURNS},
    ),
    # Its attention reads the base from a field that its configuration does not set.
    "DbrxForCausalLM": _values(attn_config={"rope_theta": 10000.0, "clip_qkv": 8}),
    # Layers that run in loops, between some that do not.
    "DoryForCausalLM": _values(n_input_layers=1, n_output_layers=1),
    "Dots3NoteForCausalLM": _values(
        num_key_value_heads=4,
        head_dim=2 * HEAD_DIM,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        swa_q_lora_rank=32,
        swa_kv_lora_rank=32,
        swa_head_dim=2 * HEAD_DIM,
        swa_qk_nope_head_dim=HEAD_DIM,
        swa_v_head_dim=HEAD_DIM,
    ),
    "FalconH1ForCausalLM": _values(mamba_d_ssm=2 * HIDDEN),
    "Gemma2ForCausalLM": Quirk({"attn_logit_softcapping": 5.0}, eager=True),
    "Gemma3nForCausalLM": _values(**_GEMMA3N),
    "Gemma3nForConditionalGeneration": _values(text_config=_GEMMA3N),
    "Gemma4ForCausalLM": _values(**_GEMMA4),
    "Gemma4ForConditionalGeneration": _values(text_config=_GEMMA4),
    "Gemma4UnifiedForCausalLM": _values(**_GEMMA4),
    "Gemma4UnifiedForConditionalGeneration": _values(text_config=_GEMMA4),
    "Gemma4AssistantForCausalLM": _DRAFT_HEAD,
    "Gemma4UnifiedAssistantForCausalLM": _DRAFT_HEAD,
    "GPTNeoForCausalLM": _values(attention_types=[[["global", "local"], 1]]),
    "LongcatFlashForCausalLM": _values(num_key_value_heads=4),
    "Mamba2ForCausalLM": _values(num_heads=8),
    "MiMoV2FlashForCausalLM": _values(head_dim=2 * HEAD_DIM, v_head_dim=HEAD_DIM),
    # A window is twice the columns that its cache layers hold.
    "ModernBertDecoderForCausalLM": _values(local_attention=2 * WINDOW),
    # It has no layer without a window.
    "MoshiForCausalLM": _values(
        sliding_window=WINDOW,
        depth_decoder_config={"sliding_window": WINDOW},
        audio_encoder_config={"sliding_window": WINDOW},
    ),
    "MptForCausalLM": _values(attn_config={"attn_pdrop": 0}),
    # One codebook, so that token ids are [batch, tokens].
    "MusicgenForCausalLM": _values(num_codebooks=1),
    "MusicgenMelodyForCausalLM": _values(num_codebooks=1),
    "Qwen4ExpForCausalLM": _values(
        indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=HEAD_DIM, indexer_budget=64, indexer_compress_ratio=4
    ),
    "RecurrentGemmaForCausalLM": _values(attention_window_size=WINDOW),
    "ReformerModelWithLMHead": _values(axial_pos_embds=False, attn_layers=["local", "lsh"], num_buckets=4),
    "VaultGemmaForCausalLM": Quirk({"attn_logit_softcapping": 5.0}, eager=True),
    "xLSTMForCausalLM": _values(qk_dim_factor=1.0),
    "XmodForCausalLM": _values(default_language="en_XX"),
    "ZayaForCausalLM": _values(num_experts_per_tok=1),
}
