"""A decoder-only transformer over paged keys and values: Llama, and its relatives by their configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.common.wire.step import FINAL_NORM
from slipstream.services.models.attention import TorchAttention
from slipstream.services.models.linear import FP8, Linear, empty_parameter, keeps_fp8, pack_linears

if TYPE_CHECKING:
    from slipstream.services.models.attention import ForwardBatch, JoinedBatch, PagedKV
    from slipstream.services.models.config import ModelConfig, RopeConfig


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

    def forward(self, x: torch.Tensor, rotation: Rotation, attend: TorchAttention) -> torch.Tensor:
        """[N, hidden_size] to the same, [M, hidden_size] where M outputs are read; keeps keys and values on the way."""
        return self.mix(x, self.attention_norm(x), rotation, attend)

    def mix(
        self, x: torch.Tensor, attention_input: torch.Tensor, rotation: Rotation, attend: TorchAttention
    ) -> torch.Tensor:
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
        attend = TorchAttention(self.config, batch, cache)
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


def rotation_table(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair, and the factor of its cosine and sine: [2, head_dim / 2] float32."""
    rotary_dim = config.rotary_dim(head_dim)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).to(torch.float32) / rotary_dim
    frequencies = torch.reciprocal(config.theta**exponents)
    match config.rope_type:
        case "linear":
            frequencies = frequencies / config.factor
        case "llama3":
            frequencies = _llama3(config, frequencies)
        case "yarn":
            frequencies = _yarn(config, frequencies)
        case "longrope":
            frequencies = frequencies / torch.tensor(config.short_factors)
    factors = torch.full_like(frequencies, config.attention_factor)
    num_fixed = (head_dim - rotary_dim) // 2
    return torch.stack((F.pad(frequencies, (0, num_fixed)), F.pad(factors, (0, num_fixed), value=1.0)))


def paired_dimensions(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """The dimension of a checkpoint's head that belongs at each place: [head_dim] int64.

    Checkpoints pair i with i + rotary_dim / 2. Scores do not depend on the order, as queries and keys have the same.
    """
    rotary_dim = config.rotary_dim(head_dim)
    dims = torch.arange(head_dim)
    return torch.cat((dims[:rotary_dim].view(2, -1), dims[rotary_dim:].view(2, -1)), dim=1).flatten()


class Rotation:
    """The rotation of one forward's tokens, the same for all layers."""

    def __init__(self, table: torch.Tensor, positions: torch.Tensor) -> None:
        """`table`: of `rotation_table`. `positions`: [N] int64."""
        frequencies, factors = table
        angles = positions[:, None].to(torch.float32) * frequencies
        sine = (angles.sin() * factors)[:, None, None]
        self._cosine = (angles.cos() * factors)[:, None, None]
        self._signed_sine = torch.cat((-sine, sine), dim=2)

    def apply_(self, heads: torch.Tensor) -> None:
        """Rotates [N, heads, head_dim] in place."""
        halves = heads.view(*heads.shape[:2], 2, heads.shape[2] // 2)
        swapped = halves.flip(2)
        halves.mul_(self._cosine).addcmul_(swapped, self._signed_sine)


def _llama3(config: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    # Long wavelengths are scaled, short ones left alone, and those between interpolated.
    wavelengths = 2 * math.pi / frequencies
    low_freq_wavelength = config.original_max_position_embeddings / config.low_freq_factor
    high_freq_wavelength = config.original_max_position_embeddings / config.high_freq_factor
    smooth = (config.original_max_position_embeddings / wavelengths - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    between = (1 - smooth) * frequencies / config.factor + smooth * frequencies
    scaled = torch.where(wavelengths > low_freq_wavelength, frequencies / config.factor, between)
    return torch.where(wavelengths < high_freq_wavelength, frequencies, scaled)


def _yarn(config: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Peng et al., "YaRN: Efficient context window extension of large language models", 2023."""
    num_pairs = len(frequencies)

    def pair_that_turns(num_turns: float) -> float:
        # In the original positions; a fraction lies between two pairs.
        longest = config.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return num_pairs * math.log(longest) / math.log(config.theta)

    low, high = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    if low == high:
        high += 0.001
    scaled = ((torch.arange(num_pairs, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / config.factor * scaled + frequencies * (1 - scaled)
