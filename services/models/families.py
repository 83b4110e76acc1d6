"""The supported families of decoders: where they differ, and the default values of their configurations, as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any


class Windows(Enum):
    """The layers that have a sliding window."""

    NONE = auto()
    ALL = auto()
    """All layers, where `sliding_window` is a number."""
    BY_LAYER = auto()
    """The layers that `layer_types` names; without it, with `use_sliding_window`, all from `max_window_layers` on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture. A bias is True, False, or the name of the field of `config.json` that says which."""

    model_type: str
    """The value that `model_type` of `config.json` must have."""
    defaults: dict[str, Any]
    """Values of fields that `config.json` leaves out, as in transformers; the rest have none."""
    qkv_bias: bool | str
    output_bias: bool | str
    """Bias of attention's last projection."""
    mlp_bias: bool | str
    has_qk_norms: bool = False
    """Each head's queries and keys are normalised before they are rotated."""
    windows: Windows = Windows.NONE


_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
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
    "bos_token_id": None,
    "eos_token_id": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
FAMILIES = {
    "LlamaForCausalLM": Family(
        model_type="llama",
        defaults=_LLAMA,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "MistralForCausalLM": Family(
        model_type="mistral", defaults=_MISTRAL, qkv_bias=False, output_bias=False, mlp_bias=False, windows=Windows.ALL
    ),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2", defaults=_QWEN2, qkv_bias=True, output_bias=False, mlp_bias=False, windows=Windows.BY_LAYER
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        defaults=_QWEN2 | {"head_dim": 128},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias=False,
        has_qk_norms=True,
        windows=Windows.BY_LAYER,
    ),
}
"""The architectures that the decoder can run, by their names in `architectures` of `config.json`."""
