"""Models on disk: folders of the Hugging Face layout, weights as bfloat16 safetensors."""

import json
import shutil
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from slipstream.training.llama import Llama, LlamaShape

END_OF_TEXT_ID = 0
CONTEXT_TOKENS = 1024
_TOKEN_IDS: dict[str, Any] = {
    "bos_token_id": END_OF_TEXT_ID,
    "eos_token_id": END_OF_TEXT_ID,
    "pad_token_id": END_OF_TEXT_ID,
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


TARGET = LlamaShape(
    hidden_size=288, intermediate_size=896, num_hidden_layers=6, num_attention_heads=9, num_key_value_heads=3
)
STANDALONE = LlamaShape(
    hidden_size=192, intermediate_size=416, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2
)


def _to_config(shape: LlamaShape) -> LlamaConfig:
    values: dict[str, Any] = asdict(shape)
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
    return LlamaConfig(
        **values,
        **_TOKEN_IDS,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )


def _to_shape(config: Any) -> LlamaShape:
    names = {field.name for field in fields(LlamaShape)} - {"rope_theta"}
    return LlamaShape(
        rope_theta=config.rope_parameters["rope_theta"], **{name: getattr(config, name) for name in names}
    )


def num_parameters(model: torch.nn.Module) -> int:
    """Parameters, tied ones once."""
    return sum(weight.numel() for weight in model.parameters())


def rounded(module: torch.nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """A module's weights as files have them: in bfloat16, under names that begin with ``prefix``."""
    return {
        f"{prefix}{name}": weight.detach().to("cpu", torch.bfloat16).contiguous()
        for name, weight in module.state_dict().items()
    }


def _write_weights(weights: dict[str, Tensor], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def save(model: Llama, folder: Path, tokenizer: Path) -> None:
    """Write the model, rounded to bfloat16, with the tokenizer found in the folder ``tokenizer``."""
    _write_weights(rounded(model), folder)
    _to_config(model.shape).save_pretrained(folder)
    make_generation_config: Any = GenerationConfig
    make_generation_config(**{**_TOKEN_IDS, "eos_token_id": [END_OF_TEXT_ID]}).save_pretrained(folder)
    for name in _TOKENIZER_FILES:
        if folder.resolve() != tokenizer.resolve():
            shutil.copyfile(tokenizer / name, folder / name)


def save_head(weights: dict[str, Tensor], shape: LlamaShape, folder: Path, **config: Any) -> None:
    """Write the weights of a head for a target of this shape. ``config``: the fields of its own."""
    _write_weights(weights, folder)
    values = asdict(shape)
    theta = values.pop("rope_theta")
    values |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": END_OF_TEXT_ID,
        "dtype": "bfloat16",
        "eos_token_id": END_OF_TEXT_ID,
        "hidden_act": "silu",
        "mlp_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }
    (folder / "config.json").write_text(json.dumps(values | config, indent=2, sort_keys=True) + "\n")


def load(folder: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Load for evaluation: the stored bfloat16 weights, computed with in ``dtype``."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    loaded: LlamaForCausalLM = model.to(device).eval()
    return loaded


def load_for_training(folder: Path) -> Llama:
    """Load a Llama folder into the training module (float32, no dropout)."""
    source = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = Llama(_to_shape(source.config))
    weights = {name: weight for name, weight in source.state_dict().items() if name != "lm_head.weight"}
    model.load_state_dict(weights)
    return model
