"""Makes small Hugging Face checkpoints with random weights, and a byte-level tokenizer for them.

Weights have a standard deviation of 0.2: with the usual 0.02 greedy output soon repeats one token.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from slipstream.common.errors import CheckpointError
from slipstream.services.models.checkpoint import load_decoder

BOS_ID = 256
EOS_ID = 257
_MERGES = (("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("e", "r"))
VOCAB_SIZE = 272
"""The 256 bytes (token id = byte), two special tokens, the merges, and ids that the tokenizer does not use."""

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "dtype": "float32",
}
"""`config.json` of a small Llama with grouped-query attention."""

_SHARED = {name: value for name, value in LLAMA.items() if name not in ("attention_bias", "mlp_bias")}
_NO_WINDOW: dict[str, Any] = {"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": _SHARED
    | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": 24, "sliding_window": None},
    "qwen2": {name: value for name, value in _SHARED.items() if name != "head_dim"}
    | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **_NO_WINDOW},
    "qwen3": _SHARED
    | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32, "attention_bias": False}
    | _NO_WINDOW,
    "phi3": {name: value for name, value in _SHARED.items() if name != "head_dim"}
    | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "sliding_window": None}
    | {"original_max_position_embeddings": 512, "pad_token_id": 0},
}
"""`config.json` of a small model of each family, by its `model_type`."""


def write_checkpoint(
    path: Path,
    *,
    family: str = "llama",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    num_files: int = 1,
    has_tokenizer: bool = True,
    **changes: Any,
) -> Path:
    """Writes a checkpoint into `path`, which it makes; `changes` go into `config.json`. Returns `path`."""
    path.mkdir(parents=True, exist_ok=True)
    config = FAMILIES[family] | {"dtype": str(dtype).removeprefix("torch.")} | changes
    write_json(path / "config.json", config)
    write_json(path / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID]})
    write_weights(path, random_weights(config, seed=seed, dtype=dtype), num_files=num_files)
    if has_tokenizer:
        write_tokenizer(path)
    return path


def write_guesser(path: Path, target: Path, *, seed: int) -> Path:
    """Writes a draft for `target`, the same with some noise: it guesses right now and then. Returns `path`."""
    shutil.copytree(target, path)
    weights, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(seed)
    noisy = {name: value + 0.02 * torch.randn(value.shape, generator=generator) for name, value in weights.items()}
    write_weights(path, noisy)
    return path


def random_weights(config: dict[str, Any], *, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint by name."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in _shapes(config).items():
        tensor = torch.randn(shape, generator=generator) * 0.2
        weights[name] = (1 + tensor if "norm" in name else tensor).to(dtype)
    return weights


def write_weights(path: Path, weights: dict[str, torch.Tensor], *, num_files: int = 1) -> None:
    """Writes one safetensors file, or several with an index."""
    if num_files == 1:
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return
    locations: dict[str, str] = {}
    for index in range(num_files):
        file = f"model-{index + 1:05d}-of-{num_files:05d}.safetensors"
        part = dict(list(weights.items())[index::num_files])
        save_file(part, path / file, metadata={"format": "pt"})
        locations |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in weights.values())
    write_json(path / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": locations})


def write_tokenizer(path: Path) -> None:
    """Writes a byte-level BPE tokenizer whose first 256 tokens are the bytes."""
    tokens = [*_byte_characters(), "<|bos|>", "<|eos|>", *("".join(merge) for merge in _MERGES)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(_MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|bos|>", special=True), AddedToken("<|eos|>", special=True)])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    write_json(path / "tokenizer_config.json", settings)


def write_json(path: Path, value: object) -> None:
    """Writes `value` as JSON."""
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def refusal(path: Path, read: Callable[[Path], object] | None = None) -> str:
    """The message of a `CheckpointError`, without the directory that it begins with: one printable line.

    `read` gets `path`; it loads a decoder by default.
    """
    with pytest.raises(CheckpointError) as caught:
        (read or _load)(path)
    message = str(caught.value)
    assert message.isprintable()
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def _load(path: Path) -> object:
    return load_decoder(path, device=torch.device("cpu"), dtype=torch.float32)


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    gated = {"gate_proj": (mlp, hidden), "up_proj": (mlp, hidden), "down_proj": (hidden, mlp)}
    if config["model_type"] == "phi3":
        attention = {"qkv_proj": (q + 2 * kv, hidden), "o_proj": (hidden, q)}
        gated = {"gate_up_proj": (2 * mlp, hidden), "down_proj": (hidden, mlp)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        for block, projections in (("self_attn", attention), ("mlp", gated)):
            for name, shape in projections.items():
                shapes[f"{layer}.{block}.{name}.weight"] = shape
                if name in _biased(config):
                    shapes[f"{layer}.{block}.{name}.bias"] = shape[:1]
        if config["model_type"] == "qwen3":
            shapes |= {f"{layer}.self_attn.{name}.weight": (head_dim,) for name in ("q_norm", "k_norm")}
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _biased(config: dict[str, Any]) -> tuple[str, ...]:
    """The projections with a bias."""
    if config["model_type"] == "qwen2":
        return ("q_proj", "k_proj", "v_proj")
    attention = ("q_proj", "k_proj", "v_proj", "o_proj") if config.get("attention_bias") else ()
    return attention + (("gate_proj", "up_proj", "down_proj") if config.get("mlp_bias") else ())


def _byte_characters() -> list[str]:
    """The character that byte-level BPE (Radford et al., GPT-2, 2019) writes for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
