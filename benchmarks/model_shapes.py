"""Directories of models that have a shape and no weights, for `--load-format dummy`.

Each has `config.json` as it is published, and a byte-level tokenizer with as many tokens as the model has, made up but
for the first 256.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from pathlib import Path

_LLAMA3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 131072,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "dtype": "bfloat16",
}
_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "tie_word_embeddings": False,
    "rope_parameters": _ROPE,
}
_LLAMA_1B: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "tie_word_embeddings": True,
    "rope_parameters": _ROPE | {"factor": 32.0},
}
_FP8: dict[str, Any] = {
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
}
_HEAD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
    "tie_word_embeddings": False,
}
_MODULES: dict[str, Any] = {"num_nextn_predict_layers": 3}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA3 | _LLAMA_8B,
    "llama-3.1-8b-fp8": _LLAMA3 | _LLAMA_8B | _FP8,
    "llama-3.2-1b": _LLAMA3 | _LLAMA_1B,
    "eagle3-llama-3.1-8b": _LLAMA3 | _LLAMA_8B | _HEAD,
    "eagle3-llama-3.1-8b-fp8": _LLAMA3 | _LLAMA_8B | _HEAD,
    "eagle3-llama-3.2-1b": _LLAMA3 | _LLAMA_1B | _HEAD,
    "eagle-llama-3.1-8b": _LLAMA3 | _LLAMA_8B | {"num_hidden_layers": 1},
    "standalone-llama-3.1-8b": _LLAMA3 | _LLAMA_1B,
    "mtp-llama-3.1-8b": _LLAMA3 | _LLAMA_8B | _MODULES,
    "mtp-llama-3.2-1b": _LLAMA3 | _LLAMA_1B | _MODULES,
}
"""`config.json` by the name of the directory. The EAGLE-3 heads are of the shape that the paper's authors publish."""


def write_shape(folder: Path, name: str) -> Path:
    """Writes the directory of one shape into `folder`, unless it is there; returns it."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    if not (path / "tokenizer.json").is_file():
        _write_tokenizer(path, SHAPES[name]["vocab_size"])
    (path / "config.json").write_text(json.dumps(SHAPES[name], indent=2) + "\n", encoding="utf-8")
    return path


def _write_tokenizer(path: Path, vocab_size: int) -> None:
    """A token for each byte, and others that decode to words and that no text is encoded to."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = alphabet + [f"Ġt{number}" for number in range(len(alphabet), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings) + "\n", encoding="utf-8")
    tokenizer.save(str(path / "tokenizer.json"), pretty=False)
