"""The decoder and draft heads on a GPU: the same weights, computed by a few Triton kernels a layer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F

from slipstream.services.models.decoder import Decoder, RMSNorm, Rotating
from slipstream.services.models.head_config import DFlashConfig, EagleConfig
from slipstream.services.models.heads import DFlashHead, DraftHead, Eagle3Head, EagleHead, HeadModule
from slipstream.services.models.kernels.block_ops import add_rms_norm, embed_and_norm, rms_norm, rotation_of, swiglu
from slipstream.services.models.kernels.grouped import outputs_of_choices, run_experts
from slipstream.services.models.kernels.paged_attention import JoinedAttention, PagedAttention, paged_attention
from slipstream.services.models.kernels.products import (
    Scaled,
    add_product,
    has_few_rows,
    linear,
    most_rows_of,
    product,
    suits_tiles,
    sum_product,
    tiled_product,
)
from slipstream.services.models.kernels.routing import route
from slipstream.services.models.linear import Linear
from slipstream.services.models.packed_ints import PackedInts

if TYPE_CHECKING:
    from slipstream.services.models.attention import Attention, ForwardBatch, JoinedBatch
    from slipstream.services.models.config import ModelConfig
    from slipstream.services.models.decoder import DecoderLayer
    from slipstream.services.models.head_config import HeadConfig
    from slipstream.services.models.paged_kv import PagedKV


class FusedDecoder(Decoder):
    """`Decoder` by kernels; the launches depend only on shapes, so that it can be captured in a CUDA graph.

    Of layers whose branches are not as Llama's, only attention and experts are by kernels, and the rest by PyTorch.
    """

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(config, device=device, dtype=dtype)
        self._stack = cast("list[DecoderLayer]", list(self.layers))
        self._most_rows: int | None = None
        for layer in self._stack:
            if layer.experts is not None:
                layer.experts.by_kernels = run_experts

    def pack(self) -> None:
        super().pack()
        linears = [module for module in self.layers.modules() if isinstance(module, Linear)]
        for each in linears:
            each.pack_fp8(self.embedding.dtype)
        for module in self.modules():
            if isinstance(module, PackedInts):
                module.complete()
        self._most_rows = most_rows_of(*linears)

    def enable_batch_invariance(self) -> None:
        self.is_batch_invariant = True

    def _run_layers(
        self, batch: ForwardBatch | JoinedBatch, cache: PagedKV, aux_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        if not self.config.has_llama_branches:
            return super()._run_layers(batch, cache, aux_layers)
        rotations, attend = self._prepared(batch, cache)
        # Behind attention's plan, which kernels that overlap read before they wait, has to be one that does not.
        x = self._embedded(batch)
        first, *following = *(layer.attention_norm for layer in self._stack), self.norm
        normed: torch.Tensor | Scaled = rms_norm(x, first.weight, first.eps)
        stream = {}
        for layer, rotation, norm in zip(self._stack, self._by_layer(rotations), following, strict=True):
            if layer.index in aux_layers:
                stream[layer.index] = x
            x, normed = run_layer(layer, x, normed, rotation, attend, norm, self._most_rows)
        stream[self.config.num_layers] = x
        return rms_norm(x, self.norm.weight, self.norm.eps) if isinstance(normed, Scaled) else normed, stream

    def _prepared(
        self, batch: ForwardBatch | JoinedBatch, cache: PagedKV
    ) -> tuple[list[torch.Tensor], PagedAttention | JoinedAttention]:
        most = self.config.max_position_embeddings
        rotations = [rotation_of(batch.positions, table, most) for table in self._rotation_tables]
        return rotations, paged_attention(self.config, batch, cache, is_invariant=self.is_batch_invariant)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Decoder.logits`, but for the dtype: the model's own, as the sampler's kernels read any."""
        return self._bounded(self._whole_logits(hidden, partial(linear, layer=self.head)))


def run_layer(
    layer: DecoderLayer,
    x: torch.Tensor,
    attention_input: torch.Tensor | Scaled,
    rotation: Rotating,
    attend: Attention[Rotating],
    norm: RMSNorm,
    most_rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | Scaled]:
    """Runs a layer. `x`: [N, hidden_size]. `norm`: the next one.

    `attention_input`: [N, input_size], normed; for `ContextAttention` after the context's rows, and no `Scaled`.
    `most_rows`: see `has_few_rows`, the same for all layers.

    Returns x with both branches added, and its norm as the input of the next layer: of the last layer, of what is read,
    which may be more rows than went in: padding makes them a size whose kernels are loaded.
    """
    if isinstance(attention_input, Scaled):
        qkv = product(attention_input, layer.qkv)
    else:
        qkv = linear(attention_input, layer.qkv)
    mixed = attend(layer.index, qkv, rotation, layer.head_norms, layer.sinks)
    x = attend.outputs.of(layer.index, x)
    if not len(x):
        return x, x
    if layer.ranks is not None:
        x, normed = add_rms_norm(x, layer.whole(linear(mixed, layer.output)), layer.mlp_norm.weight, layer.mlp_norm.eps)
        return add_rms_norm(x, layer.whole(_mlp(layer, normed)), norm.weight, norm.eps)
    if layer.experts is not None:
        return _add_experts(layer, _sum(x, mixed, layer.output), norm)
    if has_few_rows(x, most_rows):
        x, scaled = add_product(x, mixed, layer.output, layer.mlp_norm)
        return add_product(x, product(scaled, layer.gate_up, is_gated=True), layer.down, norm)
    x, normed = _add_and_norm(x, mixed, layer.output, layer.mlp_norm)
    return _add_and_norm(x, _gated(normed, layer.gate_up), layer.down, norm)


def _add_experts(layer: DecoderLayer, x: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds what experts make of x's norm, the shared one included. Returns the sum and its norm."""
    assert layer.experts is not None, "the layer has experts"
    routed = route(layer.experts, x, layer.mlp_norm)
    if layer.shared_gate is not None:
        x = x + layer.shared(routed.x)
    elif layer.has_mlp:
        x = _sum(x, _gated(routed.x, layer.gate_up), layer.down)
    return add_rms_norm(x, outputs_of_choices(layer.experts, routed), norm.weight, norm.eps)


def _mlp(layer: DecoderLayer, x: torch.Tensor) -> torch.Tensor:
    """Computes a layer's MLP or experts: [N, hidden_size] to the same."""
    if layer.experts is None:
        return linear(_gated(x, layer.gate_up), layer.down)
    return layer.shared(x) + layer.experts(x) if layer.has_mlp else cast("torch.Tensor", layer.experts(x))


def _sum(residual: torch.Tensor, x: torch.Tensor, layer: Linear) -> torch.Tensor:
    """Computes `residual + layer(x)`: [N, columns]."""
    if has_few_rows(x, most_rows_of(layer)):
        return sum_product(residual, x, layer)
    return tiled_product(x, layer, residual) if suits_tiles(x, layer) else residual + linear(x, layer)


def _gated(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    """Computes `silu(gate) * up` of the halves of `layer(x)`: [N, size]."""
    if has_few_rows(x):
        return product(x, layer, is_gated=True)
    return tiled_product(x, layer) if suits_tiles(x, layer, is_gated=True) else swiglu(linear(x, layer))


def _add_and_norm(
    residual: torch.Tensor, x: torch.Tensor, layer: Linear, norm: RMSNorm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `residual + layer(x)`, [N, hidden_size], above `most_rows_of`, and its norm."""
    if suits_tiles(x, layer):
        summed = tiled_product(x, layer, residual)
        return summed, rms_norm(summed, norm.weight, norm.eps)
    return add_rms_norm(residual, linear(x, layer), norm.weight, norm.eps)


class FusedHead(DraftHead):
    """A head by kernels; the launches depend only on shapes, so that it can be captured in a CUDA graph."""

    def pack(self) -> None:
        super().pack()
        # Of equals the sampler takes the lower column, which has to be the lower of the target's ids.
        self.samples_own_ids = bool((self.token_ids[1:] > self.token_ids[:-1]).all())

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, states: torch.Tensor, cache: PagedKV, module: int = 0) -> torch.Tensor:
        layer = self.config.layer
        rotation = rotation_of(batch.positions, self._rotation_table, layer.max_position_embeddings)
        x = states.reshape(-1, layer.hidden_size).contiguous()
        output = self._run(module, x, batch.tokens.reshape(-1), rotation, PagedAttention(layer, batch, cache))
        return output.view(states.shape) if batch.outputs is None else output

    def _run(
        self, module: int, states: torch.Tensor, tokens: torch.Tensor, rotation: torch.Tensor, attend: PagedAttention
    ) -> torch.Tensor:
        """Runs the layer on N states ([N, hidden_size]) and the tokens after them, [N], to states."""
        raise NotImplementedError


class FusedEagle3Head(FusedHead, Eagle3Head):
    """`Eagle3Head` by kernels."""

    def _run(
        self, module: int, states: torch.Tensor, tokens: torch.Tensor, rotation: torch.Tensor, attend: PagedAttention
    ) -> torch.Tensor:
        norms = self.layer.attention_norm.weight, self.hidden_norm.weight
        both = embed_and_norm(tokens, self.embedding, states, *norms, self.config.layer.rms_norm_eps)
        residual = both[:, states.shape[1] :].contiguous() if self.config.has_normed_residual else states
        return run_layer(self.layer, residual, both, rotation, attend, self.norm)[0]

    @torch.inference_mode()
    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self.fc)

    @torch.inference_mode()
    def own_logits(self, states: torch.Tensor) -> torch.Tensor:
        normed = rms_norm(states.reshape(-1, states.shape[-1]), self.norm.weight, self.norm.eps)
        return linear(normed, self.head).view(*states.shape[:-1], -1)


class FusedEagleHead(FusedHead, EagleHead):
    """`EagleHead` by kernels."""

    def _run(
        self, module: int, states: torch.Tensor, tokens: torch.Tensor, rotation: torch.Tensor, attend: PagedAttention
    ) -> torch.Tensor:
        step = self.steps[module]
        assert isinstance(step, HeadModule), "a head consists of its own modules"
        embedding_norm, state_norm, norm = step.embedding_norm, step.state_norm, step.norm
        if not self.config.has_norms:
            embedded = F.embedding(tokens.clamp(0, len(self.embedding) - 1), self.embedding)
            x = linear(torch.cat((embedded, states), dim=-1), step.fc)
            # What follows is not normed: of the branches' sum, and of its norm, only the sum is used.
            return run_layer(step.layer, x, x, rotation, attend, step.layer.mlp_norm)[0]
        assert isinstance(embedding_norm, RMSNorm), "the configuration says so"
        assert isinstance(state_norm, RMSNorm), "the configuration says so"
        assert isinstance(norm, RMSNorm), "the configuration says so"
        weights = embedding_norm.weight, state_norm.weight
        x = linear(embed_and_norm(tokens, self.embedding, states, *weights, norm.eps), step.fc)
        normed = rms_norm(x, step.layer.attention_norm.weight, norm.eps)
        x, output = run_layer(step.layer, x, normed, rotation, attend, norm)
        return rms_norm(x, norm.weight, norm.eps) if isinstance(output, Scaled) else output

    @torch.inference_mode()
    def own_logits(self, states: torch.Tensor) -> torch.Tensor:
        return linear(states, self.head)


class FusedDFlashHead(FusedHead, DFlashHead):
    """`DFlashHead` by kernels."""

    def _prepared(self, batch: ForwardBatch, cache: PagedKV) -> tuple[torch.Tensor, PagedAttention]:
        layer = self.config.layer
        rotation = rotation_of(batch.positions, self._rotation_table, layer.max_position_embeddings)
        return rotation, PagedAttention(layer, batch, cache)

    def _qkv(self, layer: DecoderLayer, states: torch.Tensor) -> torch.Tensor:
        return linear(states, layer.qkv)

    def _run_layers(
        self, x: torch.Tensor, states: torch.Tensor, rotations: tuple[Any, Any], attend: Attention[Any]
    ) -> torch.Tensor:
        first, *following = *(layer.attention_norm for layer in self._stack), self.norm
        normed = rms_norm(x, first.weight, first.eps)
        for layer, norm in zip(self._stack, following, strict=True):
            x, output = run_layer(layer, x, torch.cat((states, normed)), rotations, attend, norm)
            normed = rms_norm(x, norm.weight, norm.eps) if isinstance(output, Scaled) else output
        return normed

    @torch.inference_mode()
    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        fused = linear(hidden, self.fc)
        normed = rms_norm(fused.reshape(-1, fused.shape[-1]), self.hidden_norm.weight, self.hidden_norm.eps)
        return normed.view(fused.shape)

    @torch.inference_mode()
    def own_logits(self, states: torch.Tensor) -> torch.Tensor:
        return linear(states, self.head)


def make_fused_head(config: HeadConfig, *, device: torch.device, dtype: torch.dtype) -> DraftHead:
    """Makes a head without its weights."""
    if isinstance(config, DFlashConfig):
        return FusedDFlashHead(config, device=device, dtype=dtype)
    head_class: type[FusedHead] = FusedEagleHead if isinstance(config, EagleConfig) else FusedEagle3Head
    return head_class(config, device=device, dtype=dtype)
