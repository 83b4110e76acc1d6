"""A decoder-only transformer over paged keys and values: Llama, and its relatives by their configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.common.worker.step import FINAL_NORM
from slipstream.services.models.attention import torch_attention
from slipstream.services.models.quantization import FP8, PackedFp8, dequantised, keeps_fp8
from slipstream.services.models.rope import Rotation, rotation_table

if TYPE_CHECKING:
    from slipstream.services.models.attention import (
        ForwardBatch,
        JoinedBatch,
        PagedKV,
        SeparateAttention,
        TorchAttention,
    )
    from slipstream.services.models.config import ModelConfig

    Attend = TorchAttention | SeparateAttention
    """Attention of one forward: takes a layer's number and its queries, keys and values."""


_PACKED_FOR_TOKENS = 8
"""The number of tokens that a packed weight's layout is chosen for; it stays fast for many more."""


class Linear(nn.Module):
    """`x @ weight.T + bias`.

    oneDNN multiplies float32 on CPUs two to three times as fast as PyTorch's default when the weight is in a
    layout of its own (5 to 512 tokens, AMD with AVX-512), so `pack` replaces it by that after loading.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None = None, scales: nn.Parameter | None = None
    ) -> None:
        """`weight`: [out_features, in_features], which may be another module's. `bias`: [out_features].

        `scales`: of an FP8 weight, see `dequantised`. `forward` then makes the weight anew; the kernels, which need
        `pack_fp8` before, do not.
        """
        super().__init__()
        self.weight: nn.Parameter | None = weight
        self.bias = bias
        self.scales = scales
        self.packed_fp8: PackedFp8 | None = None
        self._packed: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        if self._packed is not None:
            rows = x.reshape(-1, x.shape[-1])
            num_rows = len(rows)
            if padding := padded_rows(num_rows) - num_rows:
                rows = F.pad(rows, (0, 0, 0, padding))
            packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
            return packed[:num_rows].view(*x.shape[:-1], packed.shape[-1])
        assert self.weight is not None, "a weight is only given up once it is packed"
        weight = self.weight if self.scales is None else dequantised(self.weight, self.scales).to(x.dtype)
        return F.linear(x, weight, self.bias)

    @property
    def plain_weight(self) -> torch.Tensor:
        """The weight, [out_features, in_features]; a copy if it is packed."""
        if self.weight is not None:
            return self.weight
        assert self._packed is not None, "a weight is only given up once it is packed"
        return self._packed.to_dense()

    def pack(self) -> None:
        """Rearranges the weight for the fastest product, where oneDNN has one; it cannot be read or set any more."""
        if self.weight is None or not len(self.weight) or not _can_pack(self.weight):
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACKED_FOR_TOKENS)
        self.weight = None

    def pack_fp8(self, dtype: torch.dtype) -> None:
        """Rearranges an FP8 weight for the kernels and rows of `dtype`; `forward` cannot be called any more."""
        if self.weight is not None and self.scales is not None:
            self.packed_fp8, self.weight = PackedFp8.of(self.weight, dtype), None


def pack_linears(model: nn.Module) -> None:
    """Packs every `Linear` of a model."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.pack()


def padded_rows(num_rows: int) -> int:
    """Rounds up to one of eight sizes between a power of two and the next, an eighth more at most.

    oneDNN makes and keeps a kernel of about half a MiB for every number of rows that it meets. Prompts have any number
    of rows, and a process would grow by gigabytes.
    """
    granule = 1 << max(0, num_rows.bit_length() - 4)
    return -(-num_rows // granule) * granule


def _can_pack(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderOutput:
    """The result of a forward, for the sampler and for draft heads."""

    hidden: torch.Tensor
    """[B, W, hidden_size], or [N, hidden_size] of a ragged or joined batch, in the model's dtype, after the final norm.

    [M, hidden_size] where the batch says which outputs are read.
    """
    aux: torch.Tensor | None
    """The same with len(aux_layers) * hidden_size, in the order of `aux_layers`; None when there are none."""

    def part(self, tokens: slice, shape: tuple[int, ...] = (-1,)) -> DecoderOutput:
        """That of some tokens of N, as tokens of a shape."""
        hidden, aux = self.hidden[tokens], None if self.aux is None else self.aux[tokens]
        return DecoderOutput(
            hidden=hidden.view(*shape, hidden.shape[-1]), aux=None if aux is None else aux.view(*shape, aux.shape[-1])
        )


def empty_parameter(*shape: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """A weight that a checkpoint fills in and that is not trained."""
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)


class RMSNorm(nn.Module):
    """Root mean square normalisation (Zhang and Sennrich, 2019)."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] to the same."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class DecoderLayer(nn.Module):
    """Attention, then a gated MLP; the projections that read the same input are one matrix each."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        input_size: int | None = None,
    ) -> None:
        """`input_size`: width of attention's input, where that is not the hidden size (see `mix`)."""
        super().__init__()
        self.index = index
        self._head_dim = config.head_dim
        self._num_heads = (config.num_heads, config.num_kv_heads)
        self._rotated_size = config.q_size + config.kv_size
        hidden, mlp_size = config.hidden_size, config.intermediate_size

        fp8 = config.fp8 if keeps_fp8(device, dtype, has_whole_blocks=config.has_whole_fp8_blocks) else None

        def linear(in_features: int, out_features: int, has_bias: bool) -> Linear:
            weight = empty_parameter(out_features, in_features, device=device, dtype=dtype if fp8 is None else FP8)
            bias = empty_parameter(out_features, device=device, dtype=dtype) if has_bias else None
            if fp8 is None:
                return Linear(weight, bias)
            num_scales = out_features // config.rows_per_scale, fp8.shape(out_features, in_features)[-1]
            return Linear(weight, bias, empty_parameter(*num_scales, device=device, dtype=torch.float32))

        def norm(size: int) -> RMSNorm:
            return RMSNorm(empty_parameter(size, device=device, dtype=dtype), config.rms_norm_eps)

        self.attention_norm = norm(hidden)
        self.qkv = linear(input_size or hidden, config.q_size + 2 * config.kv_size, config.has_qkv_bias)
        self.query_norm = norm(config.head_dim) if config.has_qk_norms else None
        self.key_norm = norm(config.head_dim) if config.has_qk_norms else None
        self.output = linear(config.q_size, hidden, config.has_output_bias)
        self.mlp_norm = norm(hidden)
        self.gate_up = linear(hidden, 2 * mlp_size, config.has_mlp_bias)
        self.down = linear(mlp_size, hidden, config.has_mlp_bias)

    @property
    def head_norms(self) -> tuple[RMSNorm, RMSNorm] | None:
        """The norms of each head's queries and keys, before they are rotated; None if the model has none."""
        return None if self.query_norm is None or self.key_norm is None else (self.query_norm, self.key_norm)

    def forward(self, x: torch.Tensor, rotation: Rotation, attend: Attend) -> torch.Tensor:
        """[N, hidden_size] to the same, [M, hidden_size] where M outputs are read; keeps keys and values on the way."""
        return self.mix(x, self.attention_norm(x), rotation, attend)

    def mix(self, x: torch.Tensor, attention_input: torch.Tensor, rotation: Rotation, attend: Attend) -> torch.Tensor:
        """Adds both branches to `x`, or to what is read of it: [N, hidden_size]. `attention_input`: [N, input_size]."""
        qkv = self.qkv(attention_input)
        heads = qkv[:, : self._rotated_size].view(len(x), sum(self._num_heads), self._head_dim)
        if self.head_norms is not None:
            for part, norm in zip(heads.split(self._num_heads, dim=1), self.head_norms, strict=True):
                part.copy_(norm(part))
        rotation.apply_(heads)
        attended = attend(self.index, qkv)
        x = attend.outputs.of(self.index, x)
        if not len(x):
            return x
        x = x + self.output(attended)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        output: torch.Tensor = self.down(F.silu(gate).mul_(up))
        return x + output


class Decoder(nn.Module):
    """The whole model. Its weights are left for a checkpoint to fill in (`load_decoder`).

    A forward reads nothing back from the device, so it can be captured in a CUDA graph.
    """

    _rotation_table: torch.Tensor
    is_batch_invariant = False
    """True if attention was changed to give a token the same bits in any batch; see `enable_batch_invariance`."""

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        vocab_shape = (config.vocab_size, config.hidden_size)
        self.embedding = empty_parameter(*vocab_shape, device=device, dtype=dtype)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, device=device, dtype=dtype) for index in range(config.num_layers)
        )
        self.norm = RMSNorm(empty_parameter(config.hidden_size, device=device, dtype=dtype), config.rms_norm_eps)
        is_tied = config.tie_word_embeddings
        self.head = Linear(self.embedding if is_tied else empty_parameter(*vocab_shape, device=device, dtype=dtype))
        table = rotation_table(config.rope, config.head_dim).to(device)
        self.register_buffer("_rotation_table", table, persistent=False)

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch | JoinedBatch, cache: PagedKV, *, aux_layers: tuple[int, ...] = ()
    ) -> DecoderOutput:
        """Runs the batch's tokens and keeps their keys and values in `cache`. The hidden states are of its outputs.

        `aux_layers`: numbers of layers whose *input* is wanted as well (`num_layers` is the last layer's
        output, before the final norm), or FINAL_NORM for that norm's output.
        """
        states_of_last = {self.config.num_layers, FINAL_NORM} & set(aux_layers)
        assert batch.outputs is None or not states_of_last, "an auxiliary state is of every token"
        normed, stream = self._run_layers(batch, cache, aux_layers)
        stream[FINAL_NORM] = normed
        aux = torch.cat([stream[index] for index in aux_layers], dim=-1) if aux_layers else None
        return DecoderOutput(
            hidden=normed if batch.outputs is not None else normed.view(*batch.tokens.shape, self.config.hidden_size),
            aux=aux.view(*batch.tokens.shape, aux.shape[1]) if aux is not None else None,
        )

    def _embedded(self, batch: ForwardBatch | JoinedBatch) -> torch.Tensor:
        """The first layer's input: [N, hidden_size]."""
        return F.embedding(batch.tokens.flatten().clamp(0, self.config.vocab_size - 1), self.embedding)

    def _run_layers(
        self, batch: ForwardBatch | JoinedBatch, cache: PagedKV, aux_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Returns the final norm's output, [N, hidden_size], and the inputs of `aux_layers` by their numbers."""
        x = self._embedded(batch)
        positions = batch.positions.flatten().clamp(0, self.config.max_position_embeddings - 1)
        rotation = Rotation(self._rotation_table, positions)
        attend = torch_attention(self.config, batch, cache)
        stream = {}
        for index, layer in enumerate(self.layers):
            if index in aux_layers:
                stream[index] = x
            x = layer(x, rotation, attend)
        stream[self.config.num_layers] = x
        return self.norm(x), stream

    def enable_batch_invariance(self) -> None:
        """Makes attention give a token the same bits in any batch; on a CPU it does so anyway."""

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] after the final norm to [..., vocab_size] float32."""
        logits: torch.Tensor = self.head(hidden)
        return logits.to(torch.float32)

    def pack(self) -> None:
        """Gives the weights their fastest layout; call it when they are complete."""
        pack_linears(self)
