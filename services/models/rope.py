"""Rotary position embeddings (Su et al., "RoFormer", 2021), in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from slipstream.services.models.config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position for each pair of dimensions: [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = torch.reciprocal(config.theta**exponents)
    if config.rope_type == "linear":
        return frequencies / config.factor
    if config.rope_type == "llama3":
        return _llama3(config, frequencies)
    return frequencies


class Rotation:
    """The rotation of one forward's tokens, the same for all layers."""

    def __init__(self, inverse_frequencies: torch.Tensor, positions: torch.Tensor) -> None:
        """`positions`: [N] int64. `inverse_frequencies`: [head_dim / 2] float32."""
        angles = positions[:, None].to(torch.float32) * inverse_frequencies
        sine = angles.sin()[:, None, None]
        self._cosine = angles.cos()[:, None, None]
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
