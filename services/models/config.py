"""What a decoder is, as read from a checkpoint's `config.json` and `generation_config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig

from slipstream.common.errors import CheckpointError
from slipstream.services.models.config_fields import ConfigFields
from slipstream.services.models.families import FAMILIES, Windows

ARCHITECTURES = tuple(FAMILIES)
"""Names in `architectures` of `config.json` that the decoder can run."""

RopeType = Literal["default", "linear", "llama3"]
ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding over the whole head size."""

    rope_type: RopeType = "default"
    theta: float = 10000.0
    """Base of the wavelengths."""
    factor: float = 1.0
    """`linear` divides positions by this, `llama3` only those of long wavelengths."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    """`llama3`: positions the model was first trained for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder and the token ids that end its text."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    """Whether attention's last projection has a bias."""
    has_mlp_bias: bool = False
    """Whether the three projections of the MLP have a bias."""
    has_qk_norms: bool = False
    """Whether each head's queries and keys are normalised before they are rotated."""
    sliding_windows: tuple[int | None, ...] = ()
    """By layer, how many tokens a query sees, its own included; None is all. Empty where no layer has a window."""
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    dtype: torch.dtype | None = None
    """What the checkpoint says it was saved in; a backend may compute in another."""

    @classmethod
    def from_directory(cls, path: str | Path) -> ModelConfig:
        """Reads a Hugging Face directory; nothing is downloaded and no code of the checkpoint runs.

        Raises `CheckpointError` when the directory is no checkpoint of a supported decoder.
        """
        path = Path(path)
        fields = ConfigFields(path, _read_config(path))
        return cls._of(fields, _architecture(fields))

    @classmethod
    def from_values(cls, path: Path, values: dict[str, Any], architecture: str) -> ModelConfig:
        """A decoder that a part of some other `config.json` describes, such as a draft head's; as `from_directory`."""
        fields = ConfigFields(path, values)
        model_type = FAMILIES[architecture].model_type
        if values.get("model_type") != model_type:
            raise fields.error("model_type", repr(model_type))
        _check_values(fields)
        others = {name: value for name, value in values.items() if name != "model_type"}
        try:
            config = AutoConfig.for_model(model_type, **others)
        except Exception as error:  # what it raises depends on what is wrong with the values
            raise CheckpointError(f"{path}: config.json is not valid: {_one_line(error)}") from error
        return cls._of(ConfigFields(path, config), architecture)

    @classmethod
    def _of(cls, fields: ConfigFields, architecture: str) -> ModelConfig:
        family = FAMILIES[architecture]
        config = cls(
            architecture=architecture,
            vocab_size=fields.count("vocab_size"),
            hidden_size=fields.count("hidden_size"),
            num_layers=fields.count("num_hidden_layers"),
            num_heads=fields.count("num_attention_heads"),
            num_kv_heads=fields.count("num_key_value_heads"),
            head_dim=_head_dim(fields),
            intermediate_size=fields.count("intermediate_size"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            max_position_embeddings=fields.count("max_position_embeddings"),
            rope=_rope(fields),
            tie_word_embeddings=bool(fields.get("tie_word_embeddings")),
            has_qkv_bias=fields.flag(family.qkv_bias),
            has_output_bias=fields.flag(family.output_bias),
            has_mlp_bias=fields.flag(family.mlp_bias),
            has_qk_norms=family.has_qk_norms,
            sliding_windows=_sliding_windows(fields, family.windows),
            bos_token_id=fields.get("bos_token_id"),
            eos_token_ids=_eos_token_ids(fields.path, fields),
            dtype=_dtype(fields),
        )
        if config.num_heads % config.num_kv_heads:
            raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads = {config.num_heads}")
        if config.head_dim % 2:
            raise fields.error("head_dim", "an even number")
        if fields.get("hidden_act") != "silu":
            raise fields.error("hidden_act", "'silu'")
        return config

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads, together."""
        return self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values that one token takes in all layers."""
        return 2 * self.num_layers * self.kv_size * dtype.itemsize

    def sliding_window(self, layer: int) -> int | None:
        """How many tokens a query of the layer sees, its own included; None is all."""
        return self.sliding_windows[layer] if self.sliding_windows else None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint; raises `CheckpointError` when it holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.parent}: cannot read {path.name}: {_one_line(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.parent}: {path.name}: got a {type(value).__name__}, supported: a JSON object")
    return value


def _read_config(path: Path) -> object:
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory; supported: a local Hugging Face checkpoint directory")
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path}: config.json is missing; supported: a Hugging Face checkpoint directory")
    raw = read_json(path / "config.json")
    fields = ConfigFields(path, raw)
    model_type = FAMILIES[_architecture(fields)].model_type
    if raw.get("model_type") != model_type:
        raise fields.error("model_type", f"{model_type!r}, as architectures says")
    _check_values(fields)
    try:
        return AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what it raises depends on what is wrong with the file
        raise CheckpointError(f"{path}: config.json is not valid: {_one_line(error)}") from error


def _check_values(fields: ConfigFields) -> None:
    """What is to be refused by its own name, before transformers looks at it."""
    if fields.get("quantization_config") is not None:
        raise fields.error("quantization_config", "checkpoints that are not quantised")
    _rope_type(fields.sub("rope_parameters" if fields.get("rope_parameters") else "rope_scaling"))


def _architecture(fields: ConfigFields) -> str:
    given = fields.get("architectures")
    if isinstance(given, list) and len(given) == 1 and given[0] in ARCHITECTURES:
        return str(given[0])
    raise fields.error("architectures", f"{', '.join(ARCHITECTURES)} (no mixtures of experts)")


def _head_dim(fields: ConfigFields) -> int:
    if fields.get("head_dim") is not None:
        return fields.count("head_dim")
    num_heads = fields.count("num_attention_heads")
    if fields.count("hidden_size") % num_heads:
        raise fields.error("hidden_size", f"a multiple of num_attention_heads = {num_heads}")
    return fields.count("hidden_size") // num_heads


def _sliding_windows(fields: ConfigFields, windows: Windows) -> tuple[int | None, ...]:
    layer_types = fields.get("layer_types")
    if windows is Windows.BY_LAYER:
        # transformers derives them from max_window_layers where the file does not have them.
        if not set(layer_types) <= {"full_attention", "sliding_attention"}:
            raise fields.error("layer_types", "full_attention, sliding_attention")
        if "sliding_attention" not in layer_types:
            return ()
        if not fields.get("use_sliding_window"):
            raise fields.error("use_sliding_window", "true, as layer_types has sliding_attention")
        window = fields.count("sliding_window")
        return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)
    has_window = fields.get("sliding_window") is not None
    if has_window and windows is Windows.NONE:
        raise fields.error("sliding_window", "none with this architecture")
    kind = "sliding_attention" if has_window else "full_attention"
    if layer_types is not None and set(layer_types) != {kind}:
        raise fields.error("layer_types", f"{kind}, the same for all layers of this architecture")
    return (fields.count("sliding_window"),) * fields.count("num_hidden_layers") if has_window else ()


def _rope_type(fields: ConfigFields) -> RopeType:
    name = "rope_type" if fields.get("rope_type") is not None else "type"
    given = fields.get(name)
    if given is None:
        return "default"
    for rope_type in ROPE_TYPES:
        if given == rope_type:
            return rope_type
    raise fields.error(name, ", ".join(ROPE_TYPES))


def _rope(fields: ConfigFields) -> RopeConfig:
    rope = fields.sub("rope_parameters")
    rope_type = _rope_type(rope)
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise rope.error("partial_rotary_factor", "1")
    if rope_type == "default":
        return RopeConfig(theta=rope.number("rope_theta"))
    if rope_type == "linear":
        return RopeConfig(rope_type="linear", theta=rope.number("rope_theta"), factor=rope.number("factor"))
    low_freq_factor = rope.number("low_freq_factor")
    if rope.number("high_freq_factor") <= low_freq_factor:
        raise rope.error("high_freq_factor", f"more than low_freq_factor = {low_freq_factor:g}")
    return RopeConfig(
        rope_type="llama3",
        theta=rope.number("rope_theta"),
        factor=rope.number("factor"),
        low_freq_factor=low_freq_factor,
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.count("original_max_position_embeddings"),
    )


def _eos_token_ids(path: Path, fields: ConfigFields) -> frozenset[int]:
    # As in transformers' generate: generation_config.json has the last word, where it is there and says anything.
    name, given = "config.json", fields.get("eos_token_id")
    if (path / "generation_config.json").is_file():
        generation = read_json(path / "generation_config.json")
        if generation.get("eos_token_id") is not None:
            name, given = "generation_config.json", generation["eos_token_id"]
    if given is None:
        return frozenset()
    ids = given if isinstance(given, list) else [given]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
        raise CheckpointError(f"{path}: {name}: eos_token_id: got {given!r}, supported: a token id or a list of them")
    return frozenset(ids)


def _dtype(fields: ConfigFields) -> torch.dtype | None:
    given = fields.get("dtype")
    return given if isinstance(given, torch.dtype) else None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
