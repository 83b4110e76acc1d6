"""Computes rotary position embedding: how fast each pair of dimensions turns, and the rotation of a forward's tokens.

Dimensions i and i + head_dim / 2 are a pair. Where only the first dimensions of a head are rotated, the others have the
angle 0, and `paired_dimensions` is the order that makes pairs of those that a checkpoint has as pairs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from slipstream.services.models.rope_config import RopeConfig


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
