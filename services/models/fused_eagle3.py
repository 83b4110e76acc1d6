"""An EAGLE-3 head on a GPU: the same weights, and a few kernels for what PyTorch does in many."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slipstream.services.models.eagle3 import Eagle3Head
from slipstream.services.models.fused_decoder import finish_layer, query_key_norms, run_layer
from slipstream.services.models.kernels.block_ops import rms_norm
from slipstream.services.models.kernels.paged_attention import PagedAttention
from slipstream.services.models.kernels.products import has_few_rows, linear, product
from slipstream.services.models.kernels.rotation import rotation_of
from slipstream.services.models.kernels.step_ops import embed_and_norm

if TYPE_CHECKING:
    from slipstream.services.models.batch import ForwardBatch
    from slipstream.services.models.eagle3_config import Eagle3Config
    from slipstream.services.models.kv_cache import PagedKV


class FusedEagle3Head(Eagle3Head):
    """As `Eagle3Head`; what it launches depends on shapes alone, so that it can be captured in a CUDA graph."""

    def __init__(self, config: Eagle3Config, *, device: torch.device, dtype: torch.dtype) -> None:
        self._paged = PagedAttention(config.layer)
        super().__init__(config, attention=self._paged, device=device, dtype=dtype)
        self._has_ordered_ids = False
        self._norms = query_key_norms(self.layer, config.layer)

    @property
    def samples_own_ids(self) -> bool:
        """See `Eagle3Head.samples_own_ids`. Equals go to the lower of the target's ids, so that their order counts."""
        return self._has_ordered_ids

    def pack(self) -> None:
        """See `Eagle3Head.pack`."""
        super().pack()
        self._has_ordered_ids = bool((self.token_ids[1:] > self.token_ids[:-1]).all())

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, states: torch.Tensor, cache: PagedKV) -> torch.Tensor:
        """See `Eagle3Head.forward`."""
        layer, eps = self.config.layer, self.config.layer.rms_norm_eps
        rotation = rotation_of(batch.positions, self._inverse_frequencies, layer.max_position_embeddings)
        attend = self._paged.prepare(batch, cache)
        x = states.flatten(0, 1).contiguous()
        norms = self.layer.attention_norm.weight, self.hidden_norm.weight
        both = embed_and_norm(batch.tokens.reshape(-1), self.embedding, x, *norms, eps)
        residual = both[:, x.shape[1] :].contiguous() if self.config.has_normed_residual else x
        if has_few_rows(both):
            mixed = attend.rotate_and_attend(0, product(both, self.layer.qkv), rotation, self._norms)
            return finish_layer(self.layer, residual, mixed, self.norm)[0].view(states.shape)
        x, delta = run_layer(self.layer, 0, residual, both, rotation, attend, self._norms, eps)
        return (x + delta).view(states.shape)

    @torch.inference_mode()
    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Eagle3Head.fuse`."""
        return linear(hidden, self.fc)

    @torch.inference_mode()
    def own_logits(self, states: torch.Tensor) -> torch.Tensor:
        """See `Eagle3Head.own_logits`."""
        normed = rms_norm(states.reshape(-1, states.shape[-1]), self.norm.weight, self.norm.eps)
        return linear(normed, self.head).view(*states.shape[:-1], -1)
