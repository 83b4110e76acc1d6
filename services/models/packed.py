"""The numbers of packed weights: each is what its formula says in float32, to be rounded once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slipstream.services.models.quantization import Packing

if TYPE_CHECKING:
    from slipstream.services.models.quantization import PackedWeights
    from slipstream.services.models.weight_files import WeightFiles

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place within a word of each of eight columns' numbers."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of three bits; a fourth is their sign."""
_SCALE_BIAS = 127
"""Exponent that is added to those of MXFP4's scales."""


def unpacked(layout: PackedWeights, files: WeightFiles, name: str, rows: int, columns: int) -> torch.Tensor:
    """The weight of which a checkpoint has the numbers in the tensor `name`: [rows, columns] float32.

    Raises `CheckpointError` for scales that are not finite, and zero points and groups that there are not.
    """
    prefix, numbers = name.removesuffix(layout.name), files.read(name)
    if layout.packing is Packing.COMPRESSED_TENSORS:
        return _compressed_tensors(layout, files, prefix, numbers, (rows, columns))
    scales = _finite(files, f"{prefix}scales")
    if layout.packing is Packing.AWQ:
        zeros = _awq(files.read(f"{prefix}qzeros"))
        values, groups = _awq(numbers), torch.arange(len(numbers)) // (len(numbers) // len(scales))
    else:
        values = _words(numbers.T, layout.num_bits).T
        zeros = _words(files.read(f"{prefix}qzeros"), layout.num_bits) + layout.zero_offset
        if int(zeros.max()) >= 1 << layout.num_bits:
            most = (1 << layout.num_bits) - 1
            raise files.error(f"{prefix}qzeros", f"got zero points of {int(zeros.max())}, supported: at most {most}")
        groups = _groups(files, f"{prefix}{layout.order_name}", len(scales))
    return ((values - zeros[groups]) * scales[groups]).T


def _compressed_tensors(
    layout: PackedWeights, files: WeightFiles, prefix: str, numbers: torch.Tensor, size: tuple[int, int]
) -> torch.Tensor:
    (rows, columns), scales, shape = (
        size,
        _finite(files, f"{prefix}weight_scale"),
        files.read(f"{prefix}weight_shape").tolist(),
    )
    if shape != [rows, columns]:
        raise files.error(f"{prefix}weight_shape", f"got {shape}, supported: {[rows, columns]}")
    values, zeros = (
        _words(numbers, layout.num_bits)[:, :columns],
        torch.full_like(scales, 1 << (layout.num_bits - 1), dtype=torch.int32),
    )
    if layout.has_zero_points:
        zeros = _words(files.read(f"{prefix}weight_zero_point").T, layout.num_bits).T[:rows]
    groups = torch.arange(columns) // (columns // scales.shape[1])
    if layout.has_order:
        groups = _groups(files, f"{prefix}{layout.order_name}", scales.shape[1])
    return (values - zeros[:, groups]) * scales[:, groups]


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers of a stacked expert: [rows, groups, 16] uint8 and [rows, groups] uint8 to [rows, columns] float32."""
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(2)
    numbers = torch.tensor([*_FP4, *(-number for number in _FP4)])[halves.int()]
    return torch.ldexp(numbers, (scales.int() - _SCALE_BIAS)[..., None]).view(len(blocks), -1)


def _words(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """The numbers of each row's words, lowest bits first: [rows, words] int32 to [rows, numbers] int32."""
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)
    return (words[..., None] >> shifts & (1 << num_bits) - 1).flatten(1)


def _awq(words: torch.Tensor) -> torch.Tensor:
    return _words(words, 4).view(len(words), -1, len(_AWQ_PLACES))[..., list(_AWQ_PLACES)].flatten(1)


def _finite(files: WeightFiles, name: str) -> torch.Tensor:
    scales = files.read(name).float()
    if not scales.isfinite().all():
        raise files.error(name, "got scales that are NaN or infinite, supported: finite scales")
    return scales


def _groups(files: WeightFiles, name: str, num_groups: int) -> torch.Tensor:
    """The group of each column: [columns] int64."""
    groups = files.read(name).long()
    if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        given = f"{int(groups.min())} to {int(groups.max())}"
        raise files.error(name, f"got groups {given}, supported: 0 to {num_groups - 1}")
    return groups
