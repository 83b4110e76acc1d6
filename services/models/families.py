"""The families of decoders, as data: what sets each apart, and the values that its `config.json` may leave out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Literal

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope"]


class Windows(Enum):
    """The layers that have a sliding window."""

    NONE = auto()
    ALL = auto()
    """All layers, where `sliding_window` is a number."""
    ALL_BY_DEFAULT = auto()
    """The layers that `layer_types` names; without it all, where `sliding_window` is a number."""
    BY_LAYER = auto()
    """The layers that `layer_types` names; without it, with `use_sliding_window`, all from `max_window_layers` on."""
    UNROTATED = auto()
    """The layers that `layer_types` names; without it, with `use_sliding_window`, those without RoPE."""
    PATTERN = auto()
    """The layers that `layer_types` names; without it all but each `sliding_window_pattern`-th."""


class Activation(Enum):
    """The function of the MLP's gate, by its name in `config.json`."""

    SILU = "silu"
    GELU = "gelu_pytorch_tanh"
    """GELU by its approximation with tanh."""


class HeadNorms(Enum):
    """The norms of queries and keys, before they are rotated."""

    NONE = auto()
    EACH = auto()
    """Each head by itself."""
    ALL = auto()
    """All heads together."""


class Scoring(Enum):
    """What a router's logits say of experts."""

    SOFTMAX = auto()
    """Their weights: softmax of the logits of all experts."""
    SOFTMAX_OF_CHOSEN = auto()
    """Their weights: softmax of the logits of those that a token takes."""
    SIGMOID = auto()
    """Their weights: sigmoid of each logit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The experts of a family: fields of `config.json`, and names of a layer's tensors."""

    num_experts: str = "num_experts"
    width: str = "moe_intermediate_size"
    """The field with the intermediate size of an expert."""
    scoring: Scoring = Scoring.SOFTMAX
    normalises: bool | str = "norm_topk_prob"
    """The weights of a token's experts are divided by their sum."""
    has_groups: bool = False
    """A token takes experts of some groups only (`n_group`, `topk_group`); weights have a factor."""
    limit: str | None = None
    """The field with the bound of gates and ups, whose gate is x * sigmoid(1.702 x), and whose up has 1 added."""
    is_stacked: bool = False
    """Checkpoints have one tensor of all experts, [experts, in, out], gates and ups in turns; all have biases."""
    block: str = "mlp"
    """Beginning of the names of all these tensors."""
    router: str = "gate"
    choice_bias: str | None = None
    """The tensor that is added to the scores for the choice, and not to the weights; None: there is none."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str | None = None
    """The expert that all tokens take; None: there is none."""
    shared_width: str | None = None
    """The field with its intermediate size; None: `shared_count` has how many times it is as wide as the others."""
    shared_count: str = "n_shared_experts"
    has_shared_gate: bool = False
    """The shared expert's output is multiplied by the sigmoid of a product."""


LLAMA_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_OLMO_NORMS = {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
_GLM_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An architecture. A bias is True, False, or the name of the field of `config.json` that says which."""

    model_type: str
    """The value that `model_type` of `config.json` must have."""
    defaults: dict[str, Any]
    """Values of fields that `config.json` leaves out, as in transformers; the rest have none."""
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    """Bias of attention's last projection."""
    mlp_bias: bool | str = False
    head_norms: HeadNorms = HeadNorms.NONE
    head_norms_field: str | None = None
    """The field that says whether there are norms of heads; None: there are."""
    has_sinks: bool = False
    """Attention's weights are relative to a sum with one more term for each head, which is learnt."""
    mixture: Mixture | None = None
    """None: all layers are dense."""
    norms: dict[str, str] = field(default_factory=lambda: LLAMA_NORMS)
    """The names in checkpoints of a layer's norms, by those of `DecoderLayer`."""
    has_offset_norms: bool = False
    """Checkpoints have the weights of norms less 1."""
    activation: Activation = Activation.SILU
    activation_field: str = "hidden_act"
    has_scaled_embeddings: bool = False
    """Embeddings are multiplied by the root of the hidden size."""
    has_multipliers: bool = False
    """`config.json` has the factors of embeddings, scores, branches and logits."""
    score_scalar: str | None = None
    """The field with the number by whose root scores are divided; None: the size of a head."""
    score_cap: str | None = None
    logit_cap: str | None = None
    """The fields with the bounds of scores and of logits; None: there are none."""
    windows: Windows = Windows.NONE
    rope_types: tuple[RopeType, ...] = ("default", "linear", "llama3", "yarn")
    local_theta: str | None = None
    """The field with RoPE's base in layers with a window, which are not scaled; None: all layers have one RoPE."""
    has_unrotated_layers: bool = False
    """`no_rope_layers` or `no_rope_layer_interval` say which layers have no RoPE."""
    may_rotate_partially: bool = False
    """`partial_rotary_factor` may be less than 1."""
    has_interleaved_pairs: bool = False
    """Dimension 2i of a head is rotated with 2i + 1, and not i with i + half of what is rotated."""
    has_fused_qkv: bool = False
    """Checkpoints have one tensor for queries, keys and values."""
    has_fused_mlp: bool = False
    """Checkpoints have one tensor for the MLP's gate and up."""
    refused: tuple[str, ...] = ()
    """Fields that must be absent, null or false."""


_LLAMA: dict[str, Any] = {
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
_MISTRAL = _LLAMA | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN2 = _LLAMA | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "eos_token_id": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_PHI3 = _LLAMA | {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 32000,
}
_GEMMA2 = _LLAMA | {
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
_GEMMA3 = _GEMMA2 | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
_OLMO2 = _LLAMA | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "eos_token_id": 50279}
_OLMO3 = _OLMO2 | {"sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 5e5}
_SMOLLM3 = _LLAMA | {
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
_GRANITE = _LLAMA | {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
_GLM4 = _LLAMA | {
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
_MIXTRAL = _MISTRAL | {
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_QWEN2_MOE = _QWEN2 | {
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
_QWEN3_MOE = _QWEN2_MOE | {
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
_OLMOE = _LLAMA | {
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
_DEEPSEEK = {"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 1408}
_GLM4_MOE = (
    _LLAMA
    | _DEEPSEEK
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
_DOTS1 = (
    _LLAMA
    | _DEEPSEEK
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
_GPT_OSS = _LLAMA | {
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
_ROUTED = Mixture(
    num_experts="n_routed_experts",
    scoring=Scoring.SIGMOID,
    has_groups=True,
    choice_bias="gate.e_score_correction_bias",
    shared="shared_experts",
)
"""As in DeepSeek-V3."""
_GEMMA: dict[str, Any] = {
    "qkv_bias": "attention_bias",
    "output_bias": "attention_bias",
    "norms": _GEMMA_NORMS,
    "has_offset_norms": True,
    "activation": Activation.GELU,
    "activation_field": "hidden_activation",
    "has_scaled_embeddings": True,
    "score_scalar": "query_pre_attn_scalar",
    "logit_cap": "final_logit_softcapping",
    "windows": Windows.PATTERN,
}
_OLMO: dict[str, Any] = {
    "qkv_bias": "attention_bias",
    "output_bias": "attention_bias",
    "head_norms": HeadNorms.ALL,
    "norms": _OLMO_NORMS,
}
FAMILIES = {
    "LlamaForCausalLM": Family(
        model_type="llama",
        defaults=_LLAMA,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "MistralForCausalLM": Family(model_type="mistral", defaults=_MISTRAL, windows=Windows.ALL),
    "Qwen2ForCausalLM": Family(model_type="qwen2", defaults=_QWEN2, qkv_bias=True, windows=Windows.BY_LAYER),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        defaults=_QWEN2 | {"head_dim": 128},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        head_norms=HeadNorms.EACH,
        windows=Windows.BY_LAYER,
    ),
    "Phi3ForCausalLM": Family(
        model_type="phi3",
        defaults=_PHI3,
        windows=Windows.ALL,
        rope_types=("default", "longrope"),
        may_rotate_partially=True,
        has_fused_qkv=True,
        has_fused_mlp=True,
    ),
    "MinistralForCausalLM": Family(model_type="ministral", defaults=_MISTRAL, windows=Windows.ALL_BY_DEFAULT),
    "Gemma2ForCausalLM": Family(
        model_type="gemma2",
        defaults=_GEMMA2,
        score_cap="attn_logit_softcapping",
        refused=("use_bidirectional_attention",),
        **_GEMMA,
    ),
    "Gemma3ForCausalLM": Family(
        model_type="gemma3_text",
        defaults=_GEMMA3,
        head_norms=HeadNorms.EACH,
        local_theta="rope_local_base_freq",
        refused=("use_bidirectional_attention", "attn_logit_softcapping"),
        **_GEMMA,
    ),
    "Olmo2ForCausalLM": Family(model_type="olmo2", defaults=_OLMO2, **_OLMO),
    "Olmo3ForCausalLM": Family(
        model_type="olmo3", defaults=_OLMO3, windows=Windows.PATTERN, local_theta="rope_theta", **_OLMO
    ),
    "SmolLM3ForCausalLM": Family(
        model_type="smollm3",
        defaults=_SMOLLM3,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        windows=Windows.UNROTATED,
        has_unrotated_layers=True,
    ),
    "GraniteForCausalLM": Family(
        model_type="granite",
        defaults=_GRANITE,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        has_multipliers=True,
    ),
    "Glm4ForCausalLM": Family(
        model_type="glm4",
        defaults=_GLM4,
        qkv_bias="attention_bias",
        norms=_GLM_NORMS,
        may_rotate_partially=True,
        has_interleaved_pairs=True,
        has_fused_mlp=True,
    ),
    "MixtralForCausalLM": Family(
        model_type="mixtral",
        defaults=_MIXTRAL,
        windows=Windows.ALL,
        mixture=Mixture(
            num_experts="num_local_experts",
            width="intermediate_size",
            normalises=True,
            block="block_sparse_moe",
            projections=("w1", "w3", "w2"),
        ),
    ),
    "Qwen2MoeForCausalLM": Family(
        model_type="qwen2_moe",
        defaults=_QWEN2_MOE,
        qkv_bias="qkv_bias",
        windows=Windows.BY_LAYER,
        refused=("use_sliding_window",),
        mixture=Mixture(shared="shared_expert", shared_width="shared_expert_intermediate_size", has_shared_gate=True),
    ),
    "Qwen3MoeForCausalLM": Family(
        model_type="qwen3_moe",
        defaults=_QWEN3_MOE,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        head_norms=HeadNorms.EACH,
        windows=Windows.BY_LAYER,
        refused=("use_sliding_window",),
        mixture=Mixture(),
    ),
    "OlmoeForCausalLM": Family(
        model_type="olmoe",
        defaults=_OLMOE,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        head_norms=HeadNorms.ALL,
        refused=("clip_qkv",),
        mixture=Mixture(width="intermediate_size"),
    ),
    "Glm4MoeForCausalLM": Family(
        model_type="glm4_moe",
        defaults=_GLM4_MOE,
        qkv_bias="attention_bias",
        head_norms=HeadNorms.EACH,
        head_norms_field="use_qk_norm",
        may_rotate_partially=True,
        mixture=_ROUTED,
    ),
    "Dots1ForCausalLM": Family(
        model_type="dots1",
        defaults=_DOTS1,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        head_norms=HeadNorms.EACH,
        windows=Windows.BY_LAYER,
        mixture=_ROUTED,
    ),
    "GptOssForCausalLM": Family(
        model_type="gpt_oss",
        defaults=_GPT_OSS,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        has_sinks=True,
        windows=Windows.PATTERN,
        mixture=Mixture(
            num_experts="num_local_experts",
            width="intermediate_size",
            scoring=Scoring.SOFTMAX_OF_CHOSEN,
            normalises=False,
            limit="swiglu_limit",
            is_stacked=True,
            router="router",
        ),
    ),
}
"""The architectures that the decoder can run, by their names in `architectures` of `config.json`."""
TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
}
"""The architectures of multimodal models whose text part the decoder can run, each with that of its text part."""
