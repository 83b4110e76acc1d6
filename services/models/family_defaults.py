"""The values of fields that the `config.json` of each family may leave out, as in transformers; the rest have none."""

from __future__ import annotations

from typing import Any

LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
MISTRAL = LLAMA | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
QWEN2 = LLAMA | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "eos_token_id": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
PHI3 = LLAMA | {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 32000,
}
GEMMA2 = LLAMA | {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
GEMMA3 = GEMMA2 | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
OLMO2 = LLAMA | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "eos_token_id": 50279}
OLMO3 = OLMO2 | {"sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 5e5}
SMOLLM3 = LLAMA | {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "eos_token_id": 128001,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "no_rope_layer_interval": 4,
    "rope_theta": 2e6,
}
GRANITE = LLAMA | {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
GLM4 = LLAMA | {
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "eos_token_id": [151329, 151336, 151338],
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
MIXTRAL = MISTRAL | {
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN2_MOE = QWEN2 | {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "qkv_bias": True,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "norm_topk_prob": False,
}
QWEN3_MOE = QWEN2_MOE | {
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
OLMOE = LLAMA | {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50279,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}
DEEPSEEK = {"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 1408}
GLM4_MOE = (
    LLAMA
    | DEEPSEEK
    | {
        "vocab_size": 151552,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "eos_token_id": None,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": False,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    }
)
DOTS1 = (
    LLAMA
    | DEEPSEEK
    | {
        "vocab_size": 152064,
        "hidden_size": 4608,
        "intermediate_size": 10944,
        "num_hidden_layers": 62,
        "num_key_value_heads": 32,
        "eos_token_id": None,
        "norm_topk_prob": False,
        "use_sliding_window": True,
        "sliding_window": 4096,
        "max_window_layers": 62,
    }
)
GPT_OSS = LLAMA | {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "eos_token_id": None,
    "attention_bias": True,
    "sliding_window": 128,
    "sliding_window_pattern": 2,
    "rope_theta": 150000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
}
GEMMA = GEMMA2 | {
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "sliding_window": None,
}
SEED_OSS = LLAMA | {
    "vocab_size": 155136,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "attention_bias": True,
    "attention_out_bias": False,
}
ERNIE4_5 = LLAMA | {
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 5e5,
    "use_bias": False,
}
FLEX_OLMO = LLAMA | {
    "vocab_size": 100352,
    "max_position_embeddings": 4096,
    "eos_token_id": 100257,
    "rope_theta": 5e5,
    "num_experts": 7,
    "num_experts_per_tok": 5,
    "norm_topk_prob": False,
}
