"""A decoder-only transformer over paged keys and values: Llama, and its relatives by their configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.common.wire.step import FINAL_NORM
from slipstream.services.models.attention import Attention, Rotation, TorchAttention
from slipstream.services.models.experts import Experts, sigmoid
from slipstream.services.models.families import Activation, HeadNorms
from slipstream.services.models.linear import FP8, Linear, empty_parameter, keeps_fp8, pack_linears
from slipstream.services.models.packed_ints import PackedInts, keeps_packed

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.services.models.attention import ForwardBatch, JoinedBatch
    from slipstream.services.models.config import ModelConfig, RopeConfig
    from slipstream.services.models.paged_kv import PagedKV
    from slipstream.services.models.quantization import PackedWeights
    from slipstream.services.models.ranks import Ranks


Rotating = TypeVar("Rotating")
"""What rotates queries and keys, as `Attention` takes it."""


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
        if self.weight.dtype != x.dtype:
            return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class SplitNorm(RMSNorm):
    """The norm of all heads together, of which each rank has some."""

    ranks: Ranks | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] to the same."""
        if self.ranks is None:
            return super().forward(x)
        # Heads that several ranks have count as often in both sums.
        squares = self.ranks.sum(x.to(torch.float32).square().mean(dim=-1, keepdim=True)) / self.ranks.rank.size
        return (x * torch.rsqrt(squares + self.eps)).to(x.dtype) * self.weight


class DecoderLayer(nn.Module):
    """Attention, then a gated MLP or experts; the projections that read the same input are one matrix each.

    Each branch is normed at its beginning, at its end, or both. Beside experts the MLP is the one of all tokens.
    """

    ranks: Ranks | None = None
    """The ranks that have the model together; each branch then ends with the sum of their parts. None: one has all."""

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
        self._rotated_sizes = (config.q_size, config.kv_size)
        self._activation, self._branch_scale = config.activation, config.branch_scale
        hidden, experts = config.hidden_size, config.experts_of(index)
        mlp_size = config.intermediate_size if experts is None else experts.shared_width

        # Layers of other kinds are computed by PyTorch's products, which know no packed FP8 weights, and rows that get
        # another order would part from their scales.
        has_kernels = config.has_whole_blocks and config.has_llama_layers
        is_in_order = not config.rope.reorders(config.head_dim)
        fp8 = config.fp8 if is_in_order and keeps_fp8(device, dtype, has_whole_blocks=has_kernels) else None
        kept = partial(kept_packing, config, device, dtype)

        def linear(name: str, in_features: int, out_features: int, has_bias: bool) -> Linear:
            bias = empty_parameter(out_features, device=device, dtype=dtype) if has_bias else None
            packed = kept({f"layers.{index}.{name}.weight"}) if has_kernels and is_in_order else None
            if packed is not None:
                ints = PackedInts(packed, out_features, in_features, device=device, dtype=dtype)
                return Linear(None, bias, ints=ints)
            weight = empty_parameter(out_features, in_features, device=device, dtype=dtype if fp8 is None else FP8)
            if fp8 is None:
                return Linear(weight, bias)
            num_scales = out_features // config.rows_per_scale, fp8.shape(out_features, in_features)[-1]
            return Linear(weight, bias, empty_parameter(*num_scales, device=device, dtype=torch.float32))

        def norm(size: int) -> RMSNorm:
            return make_norm(config, size, device=device, dtype=dtype)

        def norm_of_branch(name: str) -> RMSNorm:
            return norm(hidden) if name in config.norms else cast("RMSNorm", nn.Identity())

        self.attention_norm = norm_of_branch("attention_norm")
        self.qkv = linear("qkv", input_size or hidden, config.q_size + 2 * config.kv_size, config.has_qkv_bias)
        self._are_heads_normed_together = config.head_norms is HeadNorms.ALL
        sizes = {HeadNorms.EACH: (config.head_dim, config.head_dim), HeadNorms.ALL: self._rotated_sizes}
        query_size, key_size = sizes.get(config.head_norms, (0, 0))
        make_head_norm = partial(make_norm, kind=SplitNorm) if self._are_heads_normed_together else make_norm
        self.query_norm = make_head_norm(config, query_size, device=device, dtype=dtype) if query_size else None
        self.key_norm = make_head_norm(config, key_size, device=device, dtype=dtype) if key_size else None
        self.sinks = empty_parameter(config.num_heads, device=device, dtype=torch.float32) if config.has_sinks else None
        self.output = linear("output", config.q_size, hidden, config.has_output_bias)
        self.attention_post_norm = norm_of_branch("attention_post_norm")
        self.mlp_norm = norm_of_branch("mlp_norm")
        self.has_mlp = mlp_size > 0
        """True if the layer has an MLP: a dense one, or a shared expert."""
        none = cast("Linear", nn.Identity())
        self.gate_up = linear("gate_up", hidden, 2 * mlp_size, config.has_mlp_bias) if mlp_size else none
        self.down = linear("down", mlp_size, hidden, config.has_mlp_bias) if mlp_size else none
        self.experts = None
        if experts is not None:
            packed = kept({f"layers.{index}.experts.{name}" for name in ("gate_up", "down")}, hidden, experts.width)
            self.experts = Experts(experts, hidden, device=device, dtype=dtype, packed=packed)
        has_gate = experts is not None and experts.mixture.has_shared_gate
        self.shared_gate = Linear(empty_parameter(1, hidden, device=device, dtype=dtype)) if has_gate else None
        self.mlp_post_norm = norm_of_branch("mlp_post_norm")

    @property
    def head_norms(self) -> tuple[RMSNorm, RMSNorm] | None:
        """The norms of each head's queries and keys, before they are rotated; None if the model has none."""
        return None if self._are_heads_normed_together else self._norms_of_heads

    @property
    def _norms_of_heads(self) -> tuple[RMSNorm, RMSNorm] | None:
        return None if self.query_norm is None or self.key_norm is None else (self.query_norm, self.key_norm)

    def forward(self, x: torch.Tensor, rotation: Rotating, attend: Attention[Rotating]) -> torch.Tensor:
        """[N, hidden_size] to the same, [M, hidden_size] where M outputs are read; keeps keys and values on the way."""
        return self.mix(x, self.attention_norm(x), rotation, attend)

    def mix(
        self, x: torch.Tensor, attention_input: torch.Tensor, rotation: Rotating, attend: Attention[Rotating]
    ) -> torch.Tensor:
        """Adds both branches to `x`, or to what is read of it: [N, hidden_size]. `attention_input`: [N, input_size]."""
        qkv = self.qkv(attention_input)
        if self._are_heads_normed_together and self._norms_of_heads is not None:
            parts = qkv[:, : sum(self._rotated_sizes)].split(self._rotated_sizes, dim=1)
            for part, norm in zip(parts, self._norms_of_heads, strict=True):
                part.copy_(norm(part))
        attended = attend(self.index, qkv, rotation, self.head_norms, self.sinks)
        x = attend.outputs.of(self.index, x)
        if not len(x):
            return x
        x = x + self._scaled(self.attention_post_norm(self.whole(self.output(attended))))
        return x + self._scaled(self.mlp_post_norm(self.whole(self._mlp(self.mlp_norm(x)))))

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """A branch's output, of which this rank has a part: the sum of all ranks'."""
        return part if self.ranks is None else self.ranks.sum(part)

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        if not self.has_mlp:
            assert self.experts is not None, "a layer has one or the other"
            return cast("torch.Tensor", self.experts(x))
        output = self.shared(x)
        return output if self.experts is None else output + self.experts(x)

    def shared(self, x: torch.Tensor) -> torch.Tensor:
        """The output of the MLP, or of the shared expert beside others: [N, hidden_size] to the same."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        gated = F.silu(gate) if self._activation is Activation.SILU else F.gelu(gate, approximate="tanh")
        output: torch.Tensor = self.down(gated.mul_(up))
        return output if self.shared_gate is None else output * sigmoid(self.shared_gate(x))

    def _scaled(self, branch: torch.Tensor) -> torch.Tensor:
        return branch if self._branch_scale == 1.0 else branch * self._branch_scale


def kept_packing(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, parameters: set[str], *sizes: int
) -> PackedWeights | None:
    """Returns the layout in which parameters stay packed, all of them; None: they are made plain.

    `sizes`: of their rows and columns, where these need not be whole blocks.
    """
    packed = config.packed
    if packed is None or config.rank.size > 1 or packed.plain & parameters:
        return None
    has_kernels = keeps_fp8(device, dtype, has_whole_blocks=True) and keeps_packed(packed, device, *sizes)
    return packed if has_kernels else None


def as_kept(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> ModelConfig:
    """The model without a quantisation that its weights lose on a device: to count their memory on one without any."""
    has_kernels = config.has_whole_blocks and config.has_llama_layers
    fp8 = config.fp8 if keeps_fp8(device, dtype, has_whole_blocks=has_kernels) else None
    packed = config.packed if keeps_fp8(device, dtype, has_whole_blocks=True) else None
    return replace(config, fp8=fp8, packed=packed)


def make_norm(
    config: ModelConfig, size: int, *, device: torch.device, dtype: torch.dtype, kind: type[RMSNorm] = RMSNorm
) -> RMSNorm:
    """Makes a norm without its weight."""
    dtype = torch.float32 if config.has_offset_norms else dtype
    return kind(empty_parameter(size, device=device, dtype=dtype), config.rms_norm_eps)


class Decoder(nn.Module):
    """The whole model. Its weights are left for a checkpoint to fill in (`load_decoder`).

    A forward reads nothing back from the device, so it can be captured in a CUDA graph.
    """

    _rotation_tables: torch.Tensor
    is_batch_invariant = False
    """True if attention was changed to give a token the same bits in any batch; see `enable_batch_invariance`."""

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.ranks: Ranks | None = None
        """The ranks that have the model together, see `join`; None: one has all."""
        vocab_shape = (config.vocab_rows, config.hidden_size)
        self.embedding = empty_parameter(*vocab_shape, device=device, dtype=dtype)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, device=device, dtype=dtype) for index in range(config.num_layers)
        )
        self.norm = make_norm(config, config.hidden_size, device=device, dtype=dtype)
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype, device="cpu").item()
        is_tied = config.tie_word_embeddings
        self.head = Linear(self.embedding if is_tied else empty_parameter(*vocab_shape, device=device, dtype=dtype))
        ropes = [config.rope_of(layer) for layer in range(config.num_layers)]
        different = list(dict.fromkeys(ropes))
        self._table_of_layer = [different.index(rope) for rope in ropes]
        tables = torch.stack([rotation_table(rope, config.head_dim) for rope in different]).to(device)
        self.register_buffer("_rotation_tables", tables, persistent=False)

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch | JoinedBatch, cache: PagedKV, *, aux_layers: tuple[int, ...] = ()
    ) -> DecoderOutput:
        """Runs the batch's tokens and keeps their keys and values in `cache`. The hidden states are of its outputs.

        `aux_layers`: numbers of layers whose *input* is wanted as well (`num_layers` is the last layer's
        output, before the final norm), or FINAL_NORM for that norm's output.
        """
        if self.ranks is not None:
            self.ranks.share_batch(batch, aux_layers)
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
        tokens = batch.tokens.flatten().clamp(0, self.config.vocab_size - 1)
        if self.ranks is None:
            x = F.embedding(tokens, self.embedding)
        else:
            own = tokens - self.config.rank.number * self.config.vocab_rows
            x = F.embedding(own.clamp(0, self.config.vocab_rows - 1), self.embedding)
            x = self.ranks.sum(x.masked_fill_((own < 0)[:, None] | (own >= self.config.vocab_rows)[:, None], 0.0))
        return x if self._embedding_scale == 1.0 else x.mul_(self._embedding_scale)

    def _by_layer(self, rotations: list[Rotating]) -> list[Rotating]:
        """Returns the rotation of each layer. `rotations`: by the different tables."""
        return [rotations[table] for table in self._table_of_layer]

    def _prepared(self, batch: ForwardBatch | JoinedBatch, cache: PagedKV) -> tuple[list[Any], Attention[Any]]:
        """Makes what layers share: the rotation by each table, and attention."""
        positions = batch.positions.flatten().clamp(0, self.config.max_position_embeddings - 1)
        rotations = [Rotation(table, positions) for table in self._rotation_tables]
        return rotations, TorchAttention(self.config, batch, cache)

    def _run_layers(
        self, batch: ForwardBatch | JoinedBatch, cache: PagedKV, aux_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Returns the final norm's output, [N, hidden_size], and the inputs of `aux_layers` by their numbers."""
        rotations, attend = self._prepared(batch, cache)
        x = self._embedded(batch)
        stream = {}
        for index, (layer, rotation) in enumerate(zip(self.layers, self._by_layer(rotations), strict=True)):
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
        return self._bounded(self._whole_logits(hidden, self.head)).to(torch.float32)

    def _whole_logits(self, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The head's output for the whole vocabulary."""
        if self.ranks is None:
            return head(hidden)
        own = head(self.ranks.share_hidden(hidden))
        return self.ranks.joined(own)[..., : self.config.vocab_size].contiguous()

    def _bounded(self, logits: torch.Tensor) -> torch.Tensor:
        """Scales logits and bounds them, in float32, where the model does so."""
        config = self.config
        if config.logits_scale != 1.0:
            logits = logits.to(torch.float32) / config.logits_scale
        if config.logit_cap is not None:
            logits = logits.to(torch.float32).div(config.logit_cap).tanh_().mul_(config.logit_cap)
        return logits

    def join(self, ranks: Ranks | None) -> None:
        """Makes this a part of the model that these ranks have together, as its configuration says; None: all of it."""
        self.ranks = ranks
        for module in self.modules():
            if isinstance(module, (DecoderLayer, SplitNorm)):
                module.ranks = ranks

    def pack(self) -> None:
        """Gives the weights their fastest layout; call it when they are complete."""
        pack_linears(self)
        for module in self.modules():
            if isinstance(module, Experts):
                module.pack()


def rotation_table(config: RopeConfig | None, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair, and the factor of its cosine and sine: [2, head_dim / 2] float32.

    None: nothing is rotated.
    """
    if config is None:
        return torch.stack((torch.zeros(head_dim // 2), torch.ones(head_dim // 2)))
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

    Checkpoints pair i with i + rotary_dim / 2, or 2i with 2i + 1. Scores do not depend on the order, as queries and
    keys have the same.
    """
    rotary_dim = config.rotary_dim(head_dim)
    dims = torch.arange(head_dim)
    pairs = dims[:rotary_dim].view(-1, 2).T if config.is_interleaved else dims[:rotary_dim].view(2, -1)
    return torch.cat((pairs, dims[rotary_dim:].view(2, -1)), dim=1).flatten()


def _llama3(config: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    # Long wavelengths are scaled, short ones not, and those between interpolated.
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
