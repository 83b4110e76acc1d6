"""What an EAGLE-3 head is, as read from its `config.json`: the layout of the paper's authors, or of `speculators`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.common.errors import CheckpointError
from slipstream.services.models.config import ModelConfig, read_json

if TYPE_CHECKING:
    import torch

NUM_FUSED = 3
"""Hidden states of the target that are fused into one."""

_AUTHORS_ARCHITECTURE = "LlamaForCausalLMEagle3"
_LAYER_ARCHITECTURE = "LlamaForCausalLM"
_REFUSED = ("norm_before_fc", "fc_norm", "norm_output")
"""Variants of the head that some packages can write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """The shape of a head."""

    layer: ModelConfig
    """Its one layer; `vocab_size` is the target's."""
    layer_name: str
    """What the layer's tensors are called: `midlayer` or `layers.0`."""
    draft_vocab_size: int
    target_hidden_size: int
    fused_layers: tuple[int, ...]
    """The target's layers whose inputs are fused; empty for those of the paper."""
    has_normed_residual: bool
    """Whether the layer adds to the fused state after its norm (`norm_before_residual`)."""

    @classmethod
    def from_directory(cls, path: str | Path) -> Eagle3Config:
        """Raises `CheckpointError` when the directory is no head of a supported layout."""
        path = Path(path)
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path}: config.json is missing; supported: an EAGLE-3 head's directory")
        raw = read_json(path / "config.json")
        is_speculators = raw.get("speculators_model_type") is not None
        _check_layout(path, raw, is_speculators=is_speculators)
        for name in _REFUSED:
            if raw.get(name):
                raise _error(path, name, raw[name], "none, or false")
        values = raw["transformer_layer_config"] if is_speculators else raw
        layer = ModelConfig.from_values(path, values, _LAYER_ARCHITECTURE)
        if layer.num_layers != 1:
            raise _error(path, "num_hidden_layers", layer.num_layers, "1")
        return cls(
            layer=layer,
            layer_name="layers.0" if is_speculators else "midlayer",
            draft_vocab_size=_count(path, raw, "draft_vocab_size", layer.vocab_size),
            target_hidden_size=_count(path, raw, "target_hidden_size", layer.hidden_size),
            fused_layers=_fused_layers(path, raw),
            has_normed_residual=bool(raw.get("norm_before_residual")),
        )

    @property
    def fused_width(self) -> int:
        """Width of what the head reads of the target at each position."""
        return NUM_FUSED * self.target_hidden_size

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values that one token takes."""
        return self.layer.kv_bytes_per_token(dtype)


def _check_layout(path: Path, raw: dict[str, Any], *, is_speculators: bool) -> None:
    if is_speculators:
        if raw["speculators_model_type"] != "eagle3":
            raise _error(path, "speculators_model_type", raw["speculators_model_type"], "'eagle3'")
        if not isinstance(raw.get("transformer_layer_config"), dict):
            raise _error(path, "transformer_layer_config", raw.get("transformer_layer_config"), "the layer's fields")
    elif raw.get("architectures") != [_AUTHORS_ARCHITECTURE]:
        accepted = f"{_AUTHORS_ARCHITECTURE}, or a speculators_model_type"
        raise _error(path, "architectures", raw.get("architectures"), accepted)


def _fused_layers(path: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """Layers by their input, as vLLM and `speculators` number them; `eagle_config` numbers outputs, as SGLang does."""
    name, first = "eagle_aux_hidden_state_layer_ids", 0
    given = raw.get(name)
    if given is None:
        given, first = (raw.get("eagle_config") or {}).get(name), 1
    if given is None:
        return ()
    is_list = isinstance(given, list) and len(given) == NUM_FUSED
    if not is_list or any(isinstance(layer, bool) or not isinstance(layer, int) or layer < 0 for layer in given):
        raise _error(path, name, given, f"{NUM_FUSED} numbers of layers")
    return tuple(layer + first for layer in given)


def _count(path: Path, raw: dict[str, Any], name: str, default: int) -> int:
    given = raw.get(name)
    if given is None:
        return default
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise _error(path, name, given, "a positive integer")
    return given


def _error(path: Path, name: str, given: object, accepted: str) -> CheckpointError:
    return CheckpointError(f"{path}: config.json: {name}: got {given!r}, supported: {accepted}")
