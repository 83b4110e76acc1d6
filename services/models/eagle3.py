"""An EAGLE-3 head (Li et al., "EAGLE-3: Scaling up inference acceleration", 2025): one layer over fused states.

Entry p pairs a state at position p with the token at p + 1, and tells the token at p + 2. The state is the target's,
fused of three of its layers, where that is known, and behind it what the head's own layer left for the entry before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.services.models.attention import TorchAttention
from slipstream.services.models.decoder import DecoderLayer, RMSNorm, empty_parameter
from slipstream.services.models.linear import Linear
from slipstream.services.models.rope import Rotation, inverse_frequencies

if TYPE_CHECKING:
    from slipstream.services.models.attention import Attention
    from slipstream.services.models.batch import ForwardBatch
    from slipstream.services.models.eagle3_config import Eagle3Config
    from slipstream.services.models.kv_cache import PagedKV


class Eagle3Head(nn.Module):
    """The head. Its weights are left for a checkpoint to fill in (`load_eagle3`)."""

    _inverse_frequencies: torch.Tensor
    token_ids: torch.Tensor
    """[draft_vocab_size] int64: the target's id of each token of the draft's vocabulary."""

    def __init__(
        self, config: Eagle3Config, *, attention: Attention | None = None, device: torch.device, dtype: torch.dtype
    ) -> None:
        """`attention` is PyTorch's unless given."""
        super().__init__()
        self.config = config
        layer = config.layer
        self._attention = attention if attention is not None else TorchAttention(layer)
        hidden = layer.hidden_size

        def parameter(*shape: int) -> nn.Parameter:
            return empty_parameter(*shape, device=device, dtype=dtype)

        self.embedding = parameter(layer.vocab_size, hidden)
        self.fc = Linear(parameter(hidden, config.fused_width))
        self.hidden_norm = RMSNorm(parameter(hidden), layer.rms_norm_eps)
        self.layer = DecoderLayer(layer, 0, device=device, dtype=dtype, input_size=2 * hidden)
        self.norm = RMSNorm(parameter(hidden), layer.rms_norm_eps)
        self.head = Linear(parameter(config.draft_vocab_size, hidden))
        frequencies = inverse_frequencies(layer.rope, layer.head_dim).to(device)
        self.register_buffer("_inverse_frequencies", frequencies, persistent=False)
        self.register_buffer("token_ids", torch.arange(config.draft_vocab_size, device=device), persistent=False)

    @property
    def samples_own_ids(self) -> bool:
        """Whether tokens may be chosen from `own_logits`, of the draft's own vocabulary."""
        return False

    @torch.inference_mode()
    def own_logits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] to [..., draft_vocab_size], by the draft's own ids."""
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

        `batch` has the position of each entry's state and the token behind it; `states`: [B, W, hidden_size]. Returns
        the layer's own states, [B, W, hidden_size], before the norm.
        """
        layer = self.config.layer
        tokens = batch.tokens.flatten().clamp(0, layer.vocab_size - 1)
        positions = batch.positions.flatten().clamp(0, layer.max_position_embeddings - 1)
        rotation = Rotation(self._inverse_frequencies, positions)
        x = states.flatten(0, 1)
        normed = self.hidden_norm(x)
        embedded = self.layer.attention_norm(F.embedding(tokens, self.embedding))
        both = torch.cat((embedded, normed), dim=-1)
        attend = self._attention.prepare(batch, cache)
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
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
