"""What the supported families of decoders do not leave to `config.json`, as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Windows(Enum):
    """Which layers have a sliding window."""

    NONE = auto()
    ALL = auto()
    """All of them, where `sliding_window` is a number."""
    BY_LAYER = auto()
    """Those that `layer_types` names; without it, with `use_sliding_window`, those from `max_window_layers` on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture; a bias is there, is not, or the field of `config.json` named here says whether."""

    model_type: str
    """What `model_type` of `config.json` must be."""
    qkv_bias: bool | str
    output_bias: bool | str
    """Of attention's last projection."""
    mlp_bias: bool | str
    has_qk_norms: bool = False
    """Whether each head's queries and keys are normalised before they are rotated."""
    windows: Windows = Windows.NONE


FAMILIES = {
    "LlamaForCausalLM": Family(
        model_type="llama", qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"
    ),
    "MistralForCausalLM": Family(
        model_type="mistral", qkv_bias=False, output_bias=False, mlp_bias=False, windows=Windows.ALL
    ),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2", qkv_bias=True, output_bias=False, mlp_bias=False, windows=Windows.BY_LAYER
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias=False,
        has_qk_norms=True,
        windows=Windows.BY_LAYER,
    ),
}
"""By the name in `architectures` of `config.json`."""
