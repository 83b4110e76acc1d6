"""The families of decoders, as data: what sets each apart, and the values that its `config.json` may leave out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Literal

from slipstream.services.models import family_defaults

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
    """Values of fields that `config.json` leaves out."""
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
        defaults=family_defaults.LLAMA,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "MistralForCausalLM": Family(model_type="mistral", defaults=family_defaults.MISTRAL, windows=Windows.ALL),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2", defaults=family_defaults.QWEN2, qkv_bias=True, windows=Windows.BY_LAYER
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        defaults=family_defaults.QWEN2 | {"head_dim": 128},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        head_norms=HeadNorms.EACH,
        windows=Windows.BY_LAYER,
    ),
    "Phi3ForCausalLM": Family(
        model_type="phi3",
        defaults=family_defaults.PHI3,
        windows=Windows.ALL,
        rope_types=("default", "longrope"),
        may_rotate_partially=True,
        has_fused_qkv=True,
        has_fused_mlp=True,
    ),
    "MinistralForCausalLM": Family(
        model_type="ministral", defaults=family_defaults.MISTRAL, windows=Windows.ALL_BY_DEFAULT
    ),
    "Gemma2ForCausalLM": Family(
        model_type="gemma2",
        defaults=family_defaults.GEMMA2,
        score_cap="attn_logit_softcapping",
        refused=("use_bidirectional_attention",),
        **_GEMMA,
    ),
    "Gemma3ForCausalLM": Family(
        model_type="gemma3_text",
        defaults=family_defaults.GEMMA3,
        head_norms=HeadNorms.EACH,
        local_theta="rope_local_base_freq",
        refused=("use_bidirectional_attention", "attn_logit_softcapping"),
        **_GEMMA,
    ),
    "Olmo2ForCausalLM": Family(model_type="olmo2", defaults=family_defaults.OLMO2, **_OLMO),
    "Olmo3ForCausalLM": Family(
        model_type="olmo3", defaults=family_defaults.OLMO3, windows=Windows.PATTERN, local_theta="rope_theta", **_OLMO
    ),
    "SmolLM3ForCausalLM": Family(
        model_type="smollm3",
        defaults=family_defaults.SMOLLM3,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        windows=Windows.UNROTATED,
        has_unrotated_layers=True,
    ),
    "GraniteForCausalLM": Family(
        model_type="granite",
        defaults=family_defaults.GRANITE,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        has_multipliers=True,
    ),
    "Glm4ForCausalLM": Family(
        model_type="glm4",
        defaults=family_defaults.GLM4,
        qkv_bias="attention_bias",
        norms=_GLM_NORMS,
        may_rotate_partially=True,
        has_interleaved_pairs=True,
        has_fused_mlp=True,
    ),
    "GemmaForCausalLM": Family(
        model_type="gemma",
        defaults=family_defaults.GEMMA,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        has_offset_norms=True,
        activation=Activation.GELU,
        has_scaled_embeddings=True,
        refused=("use_bidirectional_attention",),
    ),
    "GlmForCausalLM": Family(
        model_type="glm",
        defaults=family_defaults.GLM4,
        qkv_bias="attention_bias",
        may_rotate_partially=True,
        has_interleaved_pairs=True,
        has_fused_mlp=True,
    ),
    "SeedOssForCausalLM": Family(
        model_type="seed_oss",
        defaults=family_defaults.SEED_OSS,
        qkv_bias="attention_bias",
        output_bias="attention_out_bias",
        mlp_bias="mlp_bias",
    ),
    "Ernie4_5ForCausalLM": Family(
        model_type="ernie4_5",
        defaults=family_defaults.ERNIE4_5,
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        has_interleaved_pairs=True,
    ),
    "MixtralForCausalLM": Family(
        model_type="mixtral",
        defaults=family_defaults.MIXTRAL,
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
        defaults=family_defaults.QWEN2_MOE,
        qkv_bias="qkv_bias",
        windows=Windows.BY_LAYER,
        refused=("use_sliding_window",),
        mixture=Mixture(shared="shared_expert", shared_width="shared_expert_intermediate_size", has_shared_gate=True),
    ),
    "Qwen3MoeForCausalLM": Family(
        model_type="qwen3_moe",
        defaults=family_defaults.QWEN3_MOE,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        head_norms=HeadNorms.EACH,
        windows=Windows.BY_LAYER,
        refused=("use_sliding_window",),
        mixture=Mixture(),
    ),
    "OlmoeForCausalLM": Family(
        model_type="olmoe",
        defaults=family_defaults.OLMOE,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        head_norms=HeadNorms.ALL,
        refused=("clip_qkv",),
        mixture=Mixture(width="intermediate_size"),
    ),
    "FlexOlmoForCausalLM": Family(
        model_type="flex_olmo",
        defaults=family_defaults.FLEX_OLMO,
        mixture=Mixture(width="intermediate_size"),
        **_OLMO,
    ),
    "Glm4MoeForCausalLM": Family(
        model_type="glm4_moe",
        defaults=family_defaults.GLM4_MOE,
        qkv_bias="attention_bias",
        head_norms=HeadNorms.EACH,
        head_norms_field="use_qk_norm",
        may_rotate_partially=True,
        mixture=_ROUTED,
    ),
    "Dots1ForCausalLM": Family(
        model_type="dots1",
        defaults=family_defaults.DOTS1,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        head_norms=HeadNorms.EACH,
        windows=Windows.BY_LAYER,
        mixture=_ROUTED,
    ),
    "GptOssForCausalLM": Family(
        model_type="gpt_oss",
        defaults=family_defaults.GPT_OSS,
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
