"""Rotary position embedding (Su et al., "RoFormer", 2021) as a checkpoint's `config.json` describes it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from slipstream.services.models.json_files import ConfigFields

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope"]
_OLDER_NAMES = {"su": "longrope"}
_DEFAULT_THETA = 10000.0
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
    """`yarn`: wavelengths that go this often into the original positions, or more often, are left alone."""
    beta_slow: float = 1.0
    """`yarn`: wavelengths that go this often into the original positions, or less often, are scaled in full."""
    truncate: bool = True
    """`yarn`: the bounds between which it interpolates are whole numbers of dimensions."""
    short_factors: tuple[float, ...] = ()
    """`longrope`: a factor of each wavelength, for texts up to `original_max_position_embeddings`."""
    attention_factor: float = 1.0
    """Factor of the rotated queries and keys."""

    @classmethod
    def from_fields(
        cls, fields: ConfigFields, *, head_dim: int, rope_types: tuple[RopeType, ...], may_be_partial: bool
    ) -> RopeConfig:
        """Reads it from `config.json`. Raises `CheckpointError` for what is not among `rope_types`, and bad values."""
        # Older files have `rope_scaling`, which goes first in transformers, too, and the other fields beside it.
        source = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
        given = fields.sub(source)
        for name in fields.get(source) or ():
            if isinstance(given.get(name), dict):
                raise given.error(name, "the same fields for all layers")
        name = "rope_type" if given.get("rope_type") is not None else "type"
        rope_type = "default" if given.get(name) is None else given.get(name)
        if isinstance(rope_type, str):
            rope_type = _OLDER_NAMES.get(rope_type, rope_type)
        if rope_type not in rope_types:
            raise given.error(name, ", ".join(rope_types))
        outside = {
            "rope_theta": fields.get("rope_theta") or _DEFAULT_THETA,
            "partial_rotary_factor": fields.get("partial_rotary_factor"),
        }
        rope = given.over(outside)
        config = cls(
            rope_type=rope_type,
            theta=rope.number("rope_theta"),
            partial_rotary_factor=_partial_rotary_factor(rope, head_dim, may_be_partial=may_be_partial),
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
    beta_fast, beta_slow = _optional(rope, "beta_fast", 32.0), _optional(rope, "beta_slow", 1.0)
    if beta_fast < beta_slow:
        raise rope.error("beta_fast", f"at least beta_slow = {beta_slow:g}")
    inferred = _mscale(factor)
    if rope.get("mscale") is not None and rope.get("mscale_all_dim") is not None:
        inferred = _mscale(factor, rope.number("mscale")) / _mscale(factor, rope.number("mscale_all_dim"))
    # transformers leaves `attn_factor` out; the checkpoints that have it are meant, and served elsewhere, with it.
    inferred *= _optional(rope, "attn_factor", 1.0)
    return replace(
        config,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=rope.over({"truncate": True}).flag("truncate"),
        attention_factor=_optional(rope, "attention_factor", inferred),
    )


def _longrope(config: RopeConfig, fields: ConfigFields, rope: ConfigFields, num_pairs: int) -> RopeConfig:
    original = _original(fields, rope)
    if original == 1:
        raise fields.error(_ORIGINAL, "2 or more")
    factor = _optional(rope, "factor", fields.count("max_position_embeddings", high=MAX_CONTEXT_TOKENS) / original)
    inferred = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return replace(
        config,
        original_max_position_embeddings=original,
        short_factors=rope.numbers("short_factor", num_pairs),
        attention_factor=_optional(rope, "attention_factor", inferred),
    )


_ORIGINAL = "original_max_position_embeddings"


def _original(fields: ConfigFields, rope: ConfigFields) -> int:
    # Beside the other fields it goes first, as in transformers.
    return (rope if fields.get(_ORIGINAL) is None else fields).count(_ORIGINAL, high=MAX_CONTEXT_TOKENS)


def _optional(rope: ConfigFields, name: str, default: float) -> float:
    return default if rope.get(name) is None else rope.number(name)


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0
