"""An EAGLE-3 head (Li et al., "EAGLE-3: Scaling up inference acceleration", 2025): one layer over fused states.

Entry p pairs a state at position p with the token at p + 1, and predicts the token at p + 2. The state is the target's,
fused of three of its layers, where that is known, and behind it what the head's own layer left for the entry before.
Its `config.json` has the layout of the paper's authors, or of the `speculators` package.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.common.errors import CheckpointError
from slipstream.services.models.attention import torch_attention
from slipstream.services.models.config import MAX_HIDDEN_SIZE, MAX_LAYERS, ModelConfig
from slipstream.services.models.config_fields import ConfigFields, is_integer
from slipstream.services.models.decoder import DecoderLayer, Linear, RMSNorm, empty_parameter, pack_linears
from slipstream.services.models.rope import Rotation, rotation_table

if TYPE_CHECKING:
    from slipstream.services.models.attention import ForwardBatch, PagedKV


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
    """Prefix of the layer's tensors: `midlayer` or `layers.0`."""
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
        fields = ConfigFields.of_file(path / "config.json")
        is_speculators = fields.get("speculators_model_type") is not None
        _check_layout(fields, is_speculators=is_speculators)
        layer_fields = fields.sub("transformer_layer_config") if is_speculators else fields
        layer = ModelConfig.from_fields(layer_fields, _LAYER_ARCHITECTURE)
        if layer.num_layers != 1:
            raise layer_fields.error("num_hidden_layers", "1")
        return cls(
            layer=layer,
            layer_name="layers.0" if is_speculators else "midlayer",
            draft_vocab_size=fields.count("draft_vocab_size", layer.vocab_size, high=layer.vocab_size),
            target_hidden_size=fields.count("target_hidden_size", layer.hidden_size, high=MAX_HIDDEN_SIZE),
            fused_layers=_fused_layers(fields),
            has_normed_residual=bool(fields.get("norm_before_residual")),
        )

    @property
    def fused_width(self) -> int:
        """Width of what the head reads of the target at each position."""
        return NUM_FUSED * self.target_hidden_size


def _check_layout(fields: ConfigFields, *, is_speculators: bool) -> None:
    if is_speculators:
        if fields.get("speculators_model_type") != "eagle3":
            raise fields.error("speculators_model_type", "'eagle3'")
        if not isinstance(fields.get("transformer_layer_config"), dict):
            raise fields.error("transformer_layer_config", "the layer's fields")
    elif fields.get("architectures") != [_AUTHORS_ARCHITECTURE]:
        raise fields.error("architectures", f"{_AUTHORS_ARCHITECTURE}, or a speculators_model_type")
    for name in _REFUSED:
        if fields.get(name):
            raise fields.error(name, "none, or false")


def _fused_layers(fields: ConfigFields) -> tuple[int, ...]:
    """Layers by their input, as vLLM and `speculators` number them; `eagle_config` numbers outputs, as SGLang does."""
    name, first = "eagle_aux_hidden_state_layer_ids", 0
    if fields.get(name) is None:
        fields, first = fields.sub("eagle_config"), 1
    given = fields.get(name)
    if given is None:
        return ()
    is_list = isinstance(given, list) and len(given) == NUM_FUSED
    if not is_list or any(not is_integer(layer) or not 0 <= layer <= MAX_LAYERS for layer in given):
        raise fields.error(name, f"{NUM_FUSED} numbers of layers")
    return tuple(layer + first for layer in given)


class Eagle3Head(nn.Module):
    """The head. Its weights are left for a checkpoint to fill in (`load_eagle3`)."""

    _rotation_table: torch.Tensor
    token_ids: torch.Tensor
    """[draft_vocab_size] int64: the target's id of each token of the draft's vocabulary."""
    samples_own_ids = False
    """True if tokens may be sampled from `own_logits`, over the draft's own vocabulary."""

    def __init__(self, config: Eagle3Config, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        layer = config.layer
        hidden = layer.hidden_size

        def parameter(*shape: int) -> nn.Parameter:
            return empty_parameter(*shape, device=device, dtype=dtype)

        self.embedding = parameter(layer.vocab_size, hidden)
        self.fc = Linear(parameter(hidden, config.fused_width))
        self.hidden_norm = RMSNorm(parameter(hidden), layer.rms_norm_eps)
        self.layer = DecoderLayer(layer, 0, device=device, dtype=dtype, input_size=2 * hidden)
        self.norm = RMSNorm(parameter(hidden), layer.rms_norm_eps)
        self.head = Linear(parameter(config.draft_vocab_size, hidden))
        table = rotation_table(layer.rope, layer.head_dim).to(device)
        self.register_buffer("_rotation_table", table, persistent=False)
        self.register_buffer("token_ids", torch.arange(config.draft_vocab_size, device=device), persistent=False)

    @torch.inference_mode()
    def own_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Computes logits by the draft's own ids: [..., hidden_size] to [..., draft_vocab_size]."""
        logits: torch.Tensor = self.head(self.norm(states))
        return logits

    @torch.inference_mode()
    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's states, [..., 3 * target_hidden_size], to states of the head, [..., hidden_size]."""
        fused: torch.Tensor = self.fc(hidden)
        return fused

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, states: torch.Tensor, cache: PagedKV) -> torch.Tensor:
        """Runs a batch's entries and keeps their keys and values.

        `batch` has the position of each entry's state and the token behind it; `states`: [B, W, hidden_size], or
        [N, hidden_size] if it is ragged. Returns the layer's own states, the same shape, before the norm.
        """
        layer = self.config.layer
        tokens = batch.tokens.flatten().clamp(0, layer.vocab_size - 1)
        positions = batch.positions.flatten().clamp(0, layer.max_position_embeddings - 1)
        rotation = Rotation(self._rotation_table, positions)
        x = states.reshape(-1, layer.hidden_size)
        normed = self.hidden_norm(x)
        embedded = self.layer.attention_norm(F.embedding(tokens, self.embedding))
        both = torch.cat((embedded, normed), dim=-1)
        attend = torch_attention(layer, batch, cache)
        output = self.layer.mix(normed if self.config.has_normed_residual else x, both, rotation, attend)
        return output.view_as(states)

    @torch.inference_mode()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] to [..., vocab_size] float32, by the target's ids; -inf where the draft has no token."""
        own = self.own_logits(states)
        logits = own.new_full((*own.shape[:-1], self.config.layer.vocab_size), float("-inf"), dtype=torch.float32)
        logits[..., self.token_ids] = own.to(torch.float32)
        return logits

    def pack(self) -> None:
        """Gives the weights their fastest layout; call it when they are complete."""
        pack_linears(self)
