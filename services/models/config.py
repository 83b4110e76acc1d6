"""The shape of a decoder, as read from a checkpoint's `config.json` and `generation_config.json`.

transformers is not imported, as that takes a second: `FAMILIES` has the default values of its configurations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.common.errors import CheckpointError
from slipstream.services.models.experts_config import ExpertsConfig
from slipstream.services.models.families import (
    FAMILIES,
    LLAMA_NORMS,
    TEXT_PARTS,
    Activation,
    Family,
    HeadNorms,
    RopeType,
    Windows,
)
from slipstream.services.models.json_files import ConfigFields, is_integer
from slipstream.services.models.quantization import (
    BLOCK,
    Fp8Weights,
    PackedWeights,
    Packing,
    Scaling,
    read_quantization,
)

if TYPE_CHECKING:
    import torch

MAX_LAYERS = 1024
MAX_HIDDEN_SIZE = 2**17
_MAX_INTERMEDIATE_SIZE = 2**20
_MAX_HEADS = _MAX_HEAD_DIM = 2**12
MAX_VOCAB_SIZE = 2**24
"""Several times what the largest models have; what is derived of these sizes fits the messages between services."""
_OLDER_NAMES = {"su": "longrope"}
_DEFAULT_THETA = 10000.0
_FULL, _SLIDING = "full_attention", "sliding_attention"
_NEXTN = "num_nextn_predict_layers"
_OF_WHOLE_MODEL = ("tie_word_embeddings", "eos_token_id", "quantization_config")
"""Fields of a multimodal model that its text part may leave to it."""
_ORIGINAL = "original_max_position_embeddings"
MAX_CONTEXT_TOKENS = 2**24
"""Rotation is computed from positions in float32, which has no larger integers without gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of the first dimensions of each head, which are all of them in most models."""

    rope_type: RopeType = "default"
    theta: float = _DEFAULT_THETA
    """Base of the wavelengths."""
    partial_rotary_factor: float = 1.0
    """The part of a head's dimensions that is rotated."""
    factor: float = 1.0
    """`linear` divides positions by this, `llama3` and `yarn` only those of long wavelengths."""
    original_max_position_embeddings: int = 8192
    """`llama3`, `yarn` and `longrope`: positions the model was first trained for."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    """`yarn`: wavelengths that go this often into the original positions, or more often, are not scaled."""
    beta_slow: float = 1.0
    """`yarn`: wavelengths that go this often into the original positions, or less often, are scaled in full."""
    truncate: bool = True
    """`yarn`: the bounds between which it interpolates are whole numbers of dimensions."""
    short_factors: tuple[float, ...] = ()
    """`longrope`: a factor of each wavelength, for texts up to `original_max_position_embeddings`."""
    attention_factor: float = 1.0
    """Factor of the rotated queries and keys."""
    is_interleaved: bool = False
    """In checkpoints dimension 2i is rotated with 2i + 1, and not i with i + `rotary_dim` / 2."""

    @classmethod
    def from_fields(
        cls, fields: ConfigFields, family: Family, *, head_dim: int, layer_type: str | None = None
    ) -> RopeConfig:
        """Reads it from `config.json`. Raises `CheckpointError` for what the family does not have, and bad values.

        `layer_type`: for these layers only, whose fields `rope_parameters` has under this name.
        """
        # Older files have `rope_scaling`, which goes first in transformers, too, and the other fields beside it.
        source = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
        given = fields.sub(source)
        if layer_type is not None and (given.get(_FULL) or given.get(_SLIDING)):
            given = given.sub(layer_type)
        for name in given.names:
            if isinstance(given.get(name), dict):
                raise given.error(name, "the same fields for all layers")
        name = "rope_type" if given.get("rope_type") is not None else "type"
        rope_type = "default" if given.get(name) is None else given.get(name)
        if isinstance(rope_type, str):
            rope_type = _OLDER_NAMES.get(rope_type, rope_type)
        if rope_type not in family.rope_types:
            raise given.error(name, ", ".join(family.rope_types))
        outside = {
            "rope_theta": fields.get("rope_theta") or _DEFAULT_THETA,
            "partial_rotary_factor": fields.get("partial_rotary_factor"),
        }
        rope = given.over(outside)
        config = cls(
            rope_type=rope_type,
            theta=rope.number("rope_theta"),
            partial_rotary_factor=_partial_rotary_factor(rope, head_dim, may_be_partial=family.may_rotate_partially),
            is_interleaved=family.has_interleaved_pairs,
        )
        match rope_type:
            case "linear":
                return replace(config, factor=rope.number("factor"))
            case "llama3":
                return _llama3(config, fields, rope)
            case "yarn":
                return _yarn(config, fields, rope)
            case "longrope":
                return _longrope(config, fields, rope, config.rotary_dim(head_dim) // 2)
        return config

    def rotary_dim(self, head_dim: int) -> int:
        """Dimensions of a head that are rotated, an even number."""
        return int(head_dim * self.partial_rotary_factor)

    def reorders(self, head_dim: int) -> bool:
        """Returns whether a head's dimensions have another order here than in the checkpoint (`paired_dimensions`)."""
        return self.is_interleaved or self.rotary_dim(head_dim) < head_dim

    def context_tokens(self, max_position_embeddings: int) -> int:
        """Positions that a model may use which says `max_position_embeddings`.

        `yarn` is often added to a model whose `max_position_embeddings` is still the original. `longrope` has other
        wavelengths for longer texts, so that all keys of a text would change when it gets longer: such texts are out.
        """
        if self.rope_type == "yarn":
            return max(max_position_embeddings, int(self.original_max_position_embeddings * self.factor))
        if self.rope_type == "longrope":
            return min(max_position_embeddings, self.original_max_position_embeddings)
        return max_position_embeddings


def _partial_rotary_factor(rope: ConfigFields, head_dim: int, *, may_be_partial: bool) -> float:
    name = "partial_rotary_factor"
    if rope.get(name) is None:
        return 1.0
    if not may_be_partial:
        if rope.get(name) != 1:
            raise rope.error(name, "1")
        return 1.0
    factor = rope.number(name)
    rotary_dim = int(head_dim * min(factor, 2))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise rope.error(name, f"a part of head_dim = {head_dim} that has an even number of dimensions")
    return factor


def _llama3(config: RopeConfig, fields: ConfigFields, rope: ConfigFields) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", f"more than low_freq_factor = {low:g}")
    return replace(
        config,
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=_original(
            fields, rope.over({_ORIGINAL: fields.get("max_position_embeddings")})
        ),
    )


def _yarn(config: RopeConfig, fields: ConfigFields, rope: ConfigFields) -> RopeConfig:
    if config.theta <= 1:
        raise rope.error("rope_theta", "more than 1")
    factor, original = rope.number("factor"), _original(fields, rope)
    if factor * original > MAX_CONTEXT_TOKENS:
        raise rope.error("factor", f"at most {MAX_CONTEXT_TOKENS / original:g} with {_ORIGINAL} = {original}")
    beta_fast, beta_slow = _optional_number(rope, "beta_fast", 32.0), _optional_number(rope, "beta_slow", 1.0)
    if beta_fast < beta_slow:
        raise rope.error("beta_fast", f"at least beta_slow = {beta_slow:g}")
    inferred = _mscale(factor)
    if rope.get("mscale") is not None and rope.get("mscale_all_dim") is not None:
        inferred = _mscale(factor, rope.number("mscale")) / _mscale(factor, rope.number("mscale_all_dim"))
    # transformers leaves `attn_factor` out; the checkpoints that have it are meant, and served elsewhere, with it.
    inferred *= _optional_number(rope, "attn_factor", 1.0)
    return replace(
        config,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=rope.over({"truncate": True}).flag("truncate"),
        attention_factor=_optional_number(rope, "attention_factor", inferred),
    )


def _longrope(config: RopeConfig, fields: ConfigFields, rope: ConfigFields, num_pairs: int) -> RopeConfig:
    original = _original(fields, rope)
    if original == 1:
        raise fields.error(_ORIGINAL, "2 or more")
    factor = _optional_number(
        rope, "factor", fields.count("max_position_embeddings", high=MAX_CONTEXT_TOKENS) / original
    )
    inferred = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return replace(
        config,
        original_max_position_embeddings=original,
        short_factors=rope.numbers("short_factor", num_pairs),
        attention_factor=_optional_number(rope, "attention_factor", inferred),
    )


def _original(fields: ConfigFields, rope: ConfigFields) -> int:
    # Beside the other fields it goes first, as in transformers.
    return (rope if fields.get(_ORIGINAL) is None else fields).count(_ORIGINAL, high=MAX_CONTEXT_TOKENS)


def _optional_number(rope: ConfigFields, name: str, default: float) -> float:
    return default if rope.get(name) is None else rope.number(name)


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class Rank:
    """The place of a process among those that have a model together."""

    number: int
    size: int
    """How many they are."""


ALONE = Rank(0, 1)


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
    """Positions that may be used; see `RopeConfig.context_tokens`."""
    rope: RopeConfig
    tie_word_embeddings: bool
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    """Attention's last projection has a bias."""
    has_mlp_bias: bool = False
    """The three projections of the MLP have a bias."""
    head_norms: HeadNorms = HeadNorms.NONE
    sliding_windows: tuple[int | None, ...] = ()
    """Tokens that a query sees in each layer, its own included; None: all. Empty where no layer has a window."""
    eos_token_ids: frozenset[int] = frozenset()
    num_nextn_layers: int = 0
    """Modules for multi-token prediction after the layers, which only a draft runs."""
    fp8: Fp8Weights | None = None
    """Set if the checkpoint's projections are FP8."""
    packed: PackedWeights | None = None
    """Set if they are packed."""
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    """The RoPE of each layer, None for a layer without; empty where all layers have `rope`."""
    norms: tuple[str, ...] = tuple(LLAMA_NORMS)
    """Names of the norms that a `DecoderLayer` has."""
    has_offset_norms: bool = False
    """Checkpoints have the weights of norms less 1; they are float32, as their sum with 1 needs the digits."""
    activation: Activation = Activation.SILU
    embedding_scale: float = 1.0
    """Factor of embeddings, rounded to the dtype that is computed in."""
    branch_scale: float = 1.0
    """Factor of attention's and the MLP's outputs."""
    score_scale: float
    """Factor of the products of queries and keys."""
    score_cap: float | None = None
    """Scores are cap * tanh(score / cap)."""
    logits_scale: float = 1.0
    """Logits are divided by this."""
    logit_cap: float | None = None
    """Logits are cap * tanh(logit / cap)."""
    experts: ExpertsConfig | None = None
    has_sinks: bool = False
    """Attention's weights are relative to a sum with one more term for each head."""
    text_of: str | None = None
    """The architecture of the multimodal model that this is the text part of."""
    rank: Rank = ALONE
    """The rank whose part of the model this is: heads and widths are that rank's (`sharding.py`)."""

    @classmethod
    def from_directory(cls, path: str | Path) -> ModelConfig:
        """Reads a Hugging Face directory; nothing is downloaded and no code of the checkpoint runs.

        Raises `CheckpointError` when the directory is no checkpoint of a supported decoder.
        """
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such directory; supported: a local Hugging Face checkpoint directory")
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path}: config.json is missing; supported: a Hugging Face checkpoint directory")
        fields = ConfigFields.of_file(path / "config.json")
        given = fields.get("architectures")
        if given not in [[name] for name in (*FAMILIES, *TEXT_PARTS)]:
            heads = {"Eagle3": "an EAGLE-3 head is a draft, with --algorithm eagle3"}
            heads |= {"DFlash": "a DFlash drafter is a draft, with --algorithm dflash"}
            of_head = "".join(f"; {text}" for name, text in heads.items() if name in str(given))
            accepted = f"{', '.join(FAMILIES)}, the text part of {', '.join(TEXT_PARTS)}"
            raise fields.error("architectures", f"{accepted}{of_head}")
        if given[0] in FAMILIES:
            return cls.from_fields(fields, given[0])
        whole = {name: fields.get(name) for name in _OF_WHOLE_MODEL if fields.get(name) is not None}
        text = fields.sub("text_config").with_values(whole)
        return replace(cls.from_fields(text, TEXT_PARTS[given[0]]), text_of=given[0])

    @classmethod
    def from_fields(cls, given: ConfigFields, architecture: str) -> ModelConfig:
        """Reads a decoder from a part of a `config.json`, such as a draft head's; raises as `from_directory`."""
        family = FAMILIES[architecture]
        if given.get("model_type") != family.model_type:
            raise given.error("model_type", f"{family.model_type!r}, as architectures says")
        fields = given.over(family.defaults)
        if fields.get(family.activation_field) != family.activation.value:
            raise fields.error(family.activation_field, repr(family.activation.value))
        for name in family.refused:
            if fields.get(name):
                raise fields.error(name, "none with this architecture")
        vocab_size = fields.count("vocab_size", high=MAX_VOCAB_SIZE)
        hidden_size = fields.count("hidden_size", high=MAX_HIDDEN_SIZE)
        num_heads = fields.count("num_attention_heads", high=_MAX_HEADS)
        num_kv_heads = fields.count("num_key_value_heads", num_heads, high=_MAX_HEADS)
        if num_heads % num_kv_heads:
            raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads = {num_heads}")
        head_dim = _head_dim(fields, num_heads)
        max_positions = fields.count("max_position_embeddings", high=MAX_CONTEXT_TOKENS)
        if fields.get("dual_chunk_attention_config"):
            # After these the model was trained with other distances, which are not computed.
            dual = fields.sub("dual_chunk_attention_config")
            max_positions = min(max_positions, dual.count("original_max_position_embeddings", high=MAX_CONTEXT_TOKENS))
        full = _FULL if family.local_theta is not None else None
        rope = RopeConfig.from_fields(fields, family, head_dim=head_dim, layer_type=full)
        unrotated = _unrotated_layers(fields) if family.has_unrotated_layers else ()
        windows = _sliding_windows(fields, family.windows, unrotated)
        scalar = head_dim if family.score_scalar is None else fields.factor(family.score_scalar)
        num_layers = fields.count("num_hidden_layers", high=MAX_LAYERS)
        has_head_norms = family.head_norms_field is None or fields.flag(family.head_norms_field)
        mixture = family.mixture
        config = cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=fields.count("intermediate_size", high=_MAX_INTERMEDIATE_SIZE),
            rms_norm_eps=fields.number("rms_norm_eps"),
            max_position_embeddings=rope.context_tokens(max_positions),
            rope=rope,
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            has_qkv_bias=fields.flag(family.qkv_bias),
            has_output_bias=fields.flag(family.output_bias),
            has_mlp_bias=fields.flag(family.mlp_bias),
            head_norms=family.head_norms if has_head_norms else HeadNorms.NONE,
            sliding_windows=windows,
            eos_token_ids=_eos_token_ids(fields, vocab_size),
            num_nextn_layers=fields.count(_NEXTN, high=MAX_LAYERS) if fields.get(_NEXTN) else 0,
            layer_ropes=_layer_ropes(fields, family, rope, windows, unrotated, head_dim=head_dim),
            norms=tuple(family.norms),
            has_offset_norms=family.has_offset_norms,
            activation=family.activation,
            embedding_scale=math.sqrt(hidden_size) if family.has_scaled_embeddings else 1.0,
            score_scale=1 / math.sqrt(scalar),
            score_cap=_optional(fields, family.score_cap),
            logit_cap=_optional(fields, family.logit_cap),
            experts=None
            if mixture is None
            else ExpertsConfig.from_fields(given, family.defaults, mixture, num_layers=num_layers),
            has_sinks=family.has_sinks,
        )
        config = config._with_quantization(given)
        if not family.has_multipliers:
            return config
        return replace(
            config,
            embedding_scale=fields.factor("embedding_multiplier"),
            branch_scale=fields.factor("residual_multiplier"),
            score_scale=fields.factor("attention_multiplier"),
            logits_scale=fields.factor("logits_scaling"),
        )

    def _with_quantization(self, given: ConfigFields) -> ModelConfig:
        experts, columns = self.experts, {self.hidden_size, self.q_size}
        if experts is None or not all(experts.layers):
            columns.add(self.intermediate_size)
        if experts is not None:
            columns |= {experts.width, experts.shared_width} - {0}
        weights = read_quantization(given, columns, {*columns, self.kv_size})
        if weights is None:
            return self
        if isinstance(weights, PackedWeights):
            if weights.packing is Packing.MXFP4 and (experts is None or not experts.mixture.is_stacked):
                raise given.sub("quantization_config").error("quant_method", "mxfp4 of stacked experts only")
            return replace(self, packed=weights)
        return replace(self, fp8=weights)

    @property
    def has_llama_branches(self) -> bool:
        """True if both branches of a layer, attention and an MLP or experts, are normed first and added as they are.

        Layers of such models are computed by kernels from end to end (`FusedDecoder`).
        """
        is_plain = self.norms == tuple(LLAMA_NORMS) and self.head_norms is not HeadNorms.ALL
        return is_plain and self.branch_scale == 1.0 and self.activation is Activation.SILU

    @property
    def has_llama_layers(self) -> bool:
        """True if, besides such branches, all MLPs are dense and attention has no sinks.

        The kernels then take the weights as they are packed.
        """
        return self.has_llama_branches and self.experts is None and not self.has_sinks

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """The experts of a layer. None: its MLP is dense."""
        return self.experts if self.experts is not None and self.experts.layers[layer] else None

    @property
    def mlp_numbers_per_token(self) -> int:
        """Numbers that a token has on the way through the MLP of a layer, or through experts, which take more."""
        dense = 3 * self.intermediate_size
        if self.experts is None:
            return dense
        # Each expert's input, its output, and that in the tokens' order.
        return max(dense, self.experts.numbers_per_token + 3 * self.experts.num_chosen * self.hidden_size)

    def rope_of(self, layer: int) -> RopeConfig | None:
        """The RoPE of a layer. None: its queries and keys are not rotated."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    @property
    def vocab_rows(self) -> int:
        """Rows of embedding and output: the rank's part of the vocabulary, with padding."""
        return -(-self.vocab_size // self.rank.size)

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads, together."""
        return self.num_kv_heads * self.head_dim

    @property
    def rows_per_scale(self) -> int:
        """Rows of an FP8 weight that share their scales, also where several weights are one matrix."""
        return self._block if self.fp8 is not None and self.fp8.scaling is Scaling.BLOCK else 1

    @property
    def has_whole_blocks(self) -> bool:
        """True if rows and columns of all quantised weights are multiples of BLOCK."""
        return self._block == BLOCK

    @property
    def _block(self) -> int:
        return math.gcd(BLOCK, self.hidden_size, self.q_size, self.kv_size, self.intermediate_size)

    def kv_bytes_per_token(self, dtype: torch.dtype, *, is_fp8: bool = False) -> int:
        """Bytes of keys and values that one token takes in all layers; of FP8 ones with their scales."""
        return 2 * self.num_layers * (self.kv_size + self.num_kv_heads if is_fp8 else self.kv_size * dtype.itemsize)

    def sliding_window(self, layer: int) -> int | None:
        """Tokens that a query of the layer sees, its own included. None: all."""
        return self.sliding_windows[layer] if self.sliding_windows else None


def _head_dim(fields: ConfigFields, num_heads: int) -> int:
    hidden_size = fields.count("hidden_size", high=MAX_HIDDEN_SIZE)
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise fields.error("hidden_size", f"a multiple of num_attention_heads = {num_heads}")
    head_dim = fields.count("head_dim", hidden_size // num_heads, high=_MAX_HEAD_DIM)
    if head_dim % 2:
        raise fields.error("head_dim", "an even number")
    return head_dim


def _optional(fields: ConfigFields, name: str | None) -> float | None:
    return None if name is None or fields.get(name) is None else fields.factor(name)


def _sliding_windows(fields: ConfigFields, windows: Windows, unrotated: tuple[bool, ...]) -> tuple[int | None, ...]:
    num_layers, layer_types = fields.count("num_hidden_layers", high=MAX_LAYERS), fields.get("layer_types")
    if layer_types is not None and not (isinstance(layer_types, list) and len(layer_types) == num_layers):
        raise fields.error("layer_types", f"a type for each of {num_layers} layers")
    has_window = fields.get("sliding_window") is not None
    if windows in (Windows.NONE, Windows.ALL):
        if has_window and windows is Windows.NONE:
            raise fields.error("sliding_window", "none with this architecture")
        kind = _SLIDING if has_window else _FULL
        if layer_types is not None and any(layer_type != kind for layer_type in layer_types):
            raise fields.error("layer_types", f"{kind}, the same for all layers of this architecture")
        return (fields.count("sliding_window", high=MAX_CONTEXT_TOKENS),) * num_layers if has_window else ()
    is_used = windows not in (Windows.BY_LAYER, Windows.UNROTATED) or fields.flag("use_sliding_window")
    if layer_types is None:
        have_window = _layers_with_window(fields, windows, unrotated, num_layers)
        is_any = is_used and (has_window or windows is Windows.PATTERN)
        layer_types = [_SLIDING if is_any and has_one else _FULL for has_one in have_window]
    if any(layer_type not in (_FULL, _SLIDING) for layer_type in layer_types):
        raise fields.error("layer_types", f"{_FULL}, {_SLIDING}")
    if _SLIDING not in layer_types:
        return ()
    if not is_used:
        raise fields.error("use_sliding_window", f"true, as layer_types has {_SLIDING}")
    window = fields.count("sliding_window", high=MAX_CONTEXT_TOKENS)
    return tuple(window if layer_type == _SLIDING else None for layer_type in layer_types)


def _layers_with_window(
    fields: ConfigFields, windows: Windows, unrotated: tuple[bool, ...], num_layers: int
) -> list[bool]:
    """Returns which layers have a window where `layer_types` does not say it and windows are used."""
    match windows:
        case Windows.UNROTATED:
            return list(unrotated)
        case Windows.PATTERN:
            period = fields.count("sliding_window_pattern", high=MAX_LAYERS)
            return [(layer + 1) % period != 0 for layer in range(num_layers)]
        case Windows.BY_LAYER if fields.get("use_sliding_window") and fields.get("sliding_window") is not None:
            first = fields.get("max_window_layers")
            if not is_integer(first):
                raise fields.error("max_window_layers", "a number of layers")
            return [layer >= first for layer in range(num_layers)]
    return [windows is Windows.ALL_BY_DEFAULT] * num_layers


def _unrotated_layers(fields: ConfigFields) -> tuple[bool, ...]:
    """Returns which layers have no RoPE, in spite of their field's name."""
    num_layers, are_rotated = fields.count("num_hidden_layers", high=MAX_LAYERS), fields.get("no_rope_layers")
    if are_rotated is None:
        interval = fields.count("no_rope_layer_interval", high=MAX_LAYERS)
        return tuple((layer + 1) % interval == 0 for layer in range(num_layers))
    if not isinstance(are_rotated, list) or len(are_rotated) != num_layers or any(f not in (0, 1) for f in are_rotated):
        raise fields.error("no_rope_layers", f"0 or 1 for each of {num_layers} layers")
    return tuple(not is_rotated for is_rotated in are_rotated)


def _layer_ropes(
    fields: ConfigFields,
    family: Family,
    rope: RopeConfig,
    windows: tuple[int | None, ...],
    unrotated: tuple[bool, ...],
    *,
    head_dim: int,
) -> tuple[RopeConfig | None, ...]:
    if any(unrotated):
        return tuple(None if is_unrotated else rope for is_unrotated in unrotated)
    if family.local_theta is None or not any(windows):
        return ()
    given = fields.sub("rope_parameters")
    if fields.get("rope_scaling") or not (given.get(_FULL) or given.get(_SLIDING)):
        local = RopeConfig(theta=fields.number(family.local_theta))
    else:
        defaults = fields.with_values({"rope_theta": fields.get(family.local_theta)})
        local = RopeConfig.from_fields(defaults, family, head_dim=head_dim, layer_type=_SLIDING)
    return tuple(rope if window is None else local for window in windows)


def _eos_token_ids(fields: ConfigFields, vocab_size: int) -> frozenset[int]:
    # As in transformers' generate: generation_config.json has the last word, where it is there and says anything.
    path = fields.path / "generation_config.json"
    if path.is_file():
        generation = ConfigFields.of_file(path)
        if generation.get("eos_token_id") is not None:
            fields = generation
    return fields.token_ids("eos_token_id", vocab_size)
