"""The decoder and the EAGLE-3 head on a GPU: the same weights, computed by a few Triton kernels a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from slipstream.services.models.decoder import Decoder
from slipstream.services.models.eagle3 import Eagle3Head
from slipstream.services.models.kernels.block_ops import add_rms_norm, rms_norm, swiglu
from slipstream.services.models.kernels.paged_attention import PagedAttention, QueryKeyNorms
from slipstream.services.models.kernels.products import Scaled, add_product, has_few_rows, linear, product
from slipstream.services.models.kernels.rotation import rotation_of
from slipstream.services.models.kernels.step_ops import embed_and_norm

if TYPE_CHECKING:
    from slipstream.services.models.attention import ForwardBatch, PagedKV
    from slipstream.services.models.config import ModelConfig
    from slipstream.services.models.decoder import DecoderLayer, RMSNorm
    from slipstream.services.models.eagle3 import Eagle3Config
    from slipstream.services.models.kernels.paged_attention import PagedLayerAttention


class FusedDecoder(Decoder):
    """`Decoder` by kernels; the launches depend on shapes alone, so that it can be captured in a CUDA graph."""

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        self._paged = PagedAttention(config)
        super().__init__(config, attention=self._paged, device=device, dtype=dtype)
        self._stack = cast("list[DecoderLayer]", list(self.layers))
        self._norms = [query_key_norms(layer, config) for layer in self._stack]

    def enable_batch_invariance(self) -> None:
        self._paged.is_invariant = True

    def _run_layers(
        self, x: torch.Tensor, batch: ForwardBatch, cache: PagedKV, aux_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        rotation = rotation_of(batch.positions, self._inverse_frequencies, self.config.max_position_embeddings)
        attend = self._paged.prepare(batch, cache)
        run = self._run_few_rows if has_few_rows(x) else self._run_many_rows
        return run(x, rotation, attend, aux_layers)

    def _run_few_rows(
        self, x: torch.Tensor, rotation: torch.Tensor, attend: PagedLayerAttention, aux_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        following = [*(layer.attention_norm for layer in self._stack), self.norm]
        normed: torch.Tensor | Scaled = rms_norm(x, following[0].weight, following[0].eps)
        stream = {}
        for index, layer in enumerate(self._stack):
            if index in aux_layers:
                stream[index] = x
            mixed = attend.rotate_and_attend(index, product(normed, layer.qkv), rotation, self._norms[index])
            x, normed = finish_layer(layer, x, mixed, following[index + 1])
        stream[self.config.num_layers] = x
        return rms_norm(x, self.norm.weight, self.norm.eps), stream

    def _run_many_rows(
        self, x: torch.Tensor, rotation: torch.Tensor, attend: PagedLayerAttention, aux_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        eps = self.config.rms_norm_eps
        following = [*(layer.attention_norm for layer in self._stack), self.norm]
        normed = rms_norm(x, following[0].weight, eps)
        stream = {}
        for index, layer in enumerate(self._stack):
            if index in aux_layers:
                stream[index] = x
            x, delta = run_layer(layer, index, x, normed, rotation, attend, self._norms[index], eps)
            x, normed = add_rms_norm(x, delta, following[index + 1].weight, eps)
        stream[self.config.num_layers] = x
        return normed, stream

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Decoder.logits`, but for the dtype: the model's own, as the sampler's kernels read any."""
        return linear(hidden, self.head)


def run_layer(
    layer: DecoderLayer,
    index: int,
    x: torch.Tensor,
    attention_input: torch.Tensor,
    rotation: torch.Tensor,
    attend: PagedLayerAttention,
    norms: QueryKeyNorms | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs a layer of many rows. `x`: [N, hidden_size]. `attention_input`: [N, input_size], normed.

    Returns x with attention's branch added, and the branch of the MLP, which is still to be added.
    """
    mixed = attend.rotate_and_attend(index, layer.qkv(attention_input), rotation, norms)
    x, normed = add_rms_norm(x, layer.output(mixed), layer.mlp_norm.weight, eps)
    return x, layer.down(swiglu(layer.gate_up(normed)))


def finish_layer(
    layer: DecoderLayer, x: torch.Tensor, mixed: torch.Tensor, norm: RMSNorm
) -> tuple[torch.Tensor, Scaled]:
    """Finishes a layer of few rows. `x`: [N, hidden_size]. `mixed`: [N, q_size], attention's output.

    Returns x with both branches added, and its norm as the input of the next product.
    """
    x, normed = add_product(x, mixed, layer.output, layer.mlp_norm)
    return add_product(x, product(normed, layer.gate_up, is_gated=True), layer.down, norm)


def query_key_norms(layer: DecoderLayer, config: ModelConfig) -> QueryKeyNorms | None:
    """The norms of a layer's queries and keys, None if it has none."""
    if layer.query_norm is None or layer.key_norm is None:
        return None
    return QueryKeyNorms(query=layer.query_norm.weight, key=layer.key_norm.weight, eps=config.rms_norm_eps)


class FusedEagle3Head(Eagle3Head):
    """`Eagle3Head` by kernels; the launches depend on shapes alone, so that it can be captured in a CUDA graph."""

    def __init__(self, config: Eagle3Config, *, device: torch.device, dtype: torch.dtype) -> None:
        self._paged = PagedAttention(config.layer)
        super().__init__(config, attention=self._paged, device=device, dtype=dtype)
        self._norms = query_key_norms(self.layer, config.layer)

    def pack(self) -> None:
        super().pack()
        # Of equals the sampler takes the lower column, which has to be the lower of the target's ids.
        self.samples_own_ids = bool((self.token_ids[1:] > self.token_ids[:-1]).all())

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, states: torch.Tensor, cache: PagedKV) -> torch.Tensor:
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
        return linear(hidden, self.fc)

    @torch.inference_mode()
    def own_logits(self, states: torch.Tensor) -> torch.Tensor:
        normed = rms_norm(states.reshape(-1, states.shape[-1]), self.norm.weight, self.norm.eps)
        return linear(normed, self.head).view(*states.shape[:-1], -1)
