"""Small checkpoints with random weights of further families, made and written by transformers, and its outputs.

Weights have a standard deviation of 0.2, as those of `write_checkpoint`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.harness.checkpoints import BOS_ID, EOS_ID, VOCAB_SIZE, write_json, write_tokenizer

WINDOW = 7
"""Less than a chunk, and no multiple of a page."""
_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
}
_YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 24}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
_PERIODS = ["sliding_attention", "full_attention"] * 2
_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
_GEMMA = _SHARED | {"head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}
_GEMMA3 = _GEMMA | {
    "model_type": "gemma3_text",
    "layer_types": _PERIODS,
    "rope_parameters": {"sliding_attention": _DEFAULT, "full_attention": _LINEAR},
}
_MISTRAL = _SHARED | {"model_type": "mistral", "head_dim": 24, "sliding_window": None}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_ROUTED = _SHARED | {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
_QWEN_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [1],
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": _SHARED
    | {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "qwen2-moe": _SHARED
    | _QWEN_EXPERTS
    | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 40, "tie_word_embeddings": True},
    "qwen3-moe": _SHARED
    | _QWEN_EXPERTS
    | {"model_type": "qwen3_moe", "head_dim": 24, "norm_topk_prob": True, "decoder_sparse_step": 2},
    "olmoe": _SHARED | {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 3},
    "flex-olmo": _SHARED | {"model_type": "flex_olmo", "num_experts": 4, "num_experts_per_tok": 2},
    "glm4-moe": _ROUTED | {"model_type": "glm4_moe", "head_dim": 16, "attention_bias": True},
    "glm4-moe-norms": _ROUTED
    | {"model_type": "glm4_moe", "head_dim": 16, "use_qk_norm": True, "n_group": 1}
    | {"topk_group": 1},
    "dots1": _ROUTED
    | {"model_type": "dots1", "head_dim": 16, "sliding_window": WINDOW, "layer_types": _PERIODS}
    | {"norm_topk_prob": False, "n_shared_experts": 1},
    "gpt-oss": _SHARED
    | {"model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2}
    | {"sliding_window": WINDOW, "rope_parameters": _YARN | {"truncate": False}, "swiglu_limit": 7.0},
}
"""Families with experts."""
VARIANTS: dict[str, dict[str, Any]] = {
    "gemma2": _GEMMA | {"model_type": "gemma2", "attn_logit_softcapping": 4.0, "final_logit_softcapping": 1.0},
    "gemma2-no-caps": _GEMMA
    | {"model_type": "gemma2", "attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3": _GEMMA3,
    "gemma3-biases": _GEMMA3 | {"attention_bias": True, "final_logit_softcapping": 6.0, "rope_parameters": None},
    "gemma3-multimodal": {
        "model_type": "gemma3",
        "text_config": _GEMMA3,
        "vision_config": _VISION | {"model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
    "mistral3-multimodal": {
        "model_type": "mistral3",
        "text_config": _MISTRAL,
        "vision_config": _VISION | {"model_type": "pixtral", "head_dim": 8},
        "tie_word_embeddings": False,
    },
    "ministral": _MISTRAL | {"model_type": "ministral", "sliding_window": WINDOW, "layer_types": _PERIODS},
    "ministral-windows": _MISTRAL | {"model_type": "ministral", "sliding_window": WINDOW},
    "olmo2": _SHARED | {"model_type": "olmo2"},
    "olmo3": _SHARED
    | {"model_type": "olmo3", "sliding_window": WINDOW}
    | {"rope_parameters": {"sliding_attention": _DEFAULT, "full_attention": _YARN}},
    "smollm3": _SHARED | {"model_type": "smollm3"},
    "smollm3-windows": _SHARED
    | {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": WINDOW, "no_rope_layers": [1, 0, 1, 0]},
    "granite": _SHARED
    | {"model_type": "granite", "embedding_multiplier": 3.0, "logits_scaling": 2.0}
    | {"residual_multiplier": 0.7, "attention_multiplier": 0.11, "attention_bias": True},
    "glm4": _SHARED | {"model_type": "glm4", "head_dim": 16},
    "gemma": _SHARED | {"model_type": "gemma", "head_dim": 32},
    "glm": _SHARED | {"model_type": "glm", "head_dim": 16},
    "seed-oss": _SHARED | {"model_type": "seed_oss", "head_dim": 24, "attention_out_bias": True, "mlp_bias": True},
    "ernie4.5": _SHARED | {"model_type": "ernie4_5", "head_dim": 16, "use_bias": True},
    **MIXTURES,
}


def write_by_transformers(path: Path, name: str, *, seed: int = 0, has_tokenizer: bool = True, **changes: Any) -> Path:
    """Writes a checkpoint of VARIANTS into `path`; `changes` go into its configuration. Returns `path`."""
    values = VARIANTS[name] | changes
    config = AutoConfig.for_model(**values)
    of_text = "text_config" not in values
    model: Any = (AutoModelForCausalLM if of_text else AutoModelForImageTextToText).from_config(config)
    generator = torch.Generator().manual_seed(seed)
    is_gemma = "gemma" in name
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
            if "embed_tokens" in parameter_name and is_gemma:
                parameter.mul_(0.1)  # scaled and tied, it would only repeat its input
            if "norm" in parameter_name and not is_gemma:
                parameter.add_(1.0)
            if "sinks" in parameter_name:
                parameter.mul_(10.0)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2, generator=generator)
            if "sinks" in parameter_name:
                parameter.mul_(10.0)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2, generator=generator)
            if "sinks" in parameter_name:
                parameter.mul_(10.0)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2, generator=generator)
            if "sinks" in parameter_name:
                parameter.mul_(10.0)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2, generator=generator)
    model.save_pretrained(path)
    write_json(path / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID]})
    if has_tokenizer:
        write_tokenizer(path)
    return path


def load_reference(path: Path) -> Any:
    """The checkpoint's model in float32; of a multimodal one, all of it."""
    is_text = "text_config" not in json.loads((path / "config.json").read_text(encoding="utf-8"))
    kind = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
    # By plain products: the fused ones have no bounds of scores.
    return kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def greedy_tokens(path: Path, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """The next `num_tokens` token ids of each prompt, in float32, by the checkpoint in `path`; no token ends them."""
    model = load_reference(path)
    outputs = []
    for prompt in prompts:
        tokens = torch.tensor([list(prompt)])
        # Without a mask every token that equals the padding's would be hidden.
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs
