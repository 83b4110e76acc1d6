"""The numbers of packed weights: each is what its formula says in float32, to be rounded once."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from slipstream.services.models.quantization import MXFP4_GROUP, Packing

if TYPE_CHECKING:
    from slipstream.services.models.quantization import PackedWeights
    from slipstream.services.models.slots import Slot, Slots
    from slipstream.services.models.weight_files import WeightFiles

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place within a word of each of eight columns' numbers."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of three bits; a fourth is their sign."""
_SCALE_BIAS = 127
"""Exponent that is added to those of MXFP4's scales."""
_MOST_EXPONENT = 251
"""Greatest sum of both with which twice each number is finite in bfloat16, as kernels need it; 255 means NaN."""
_MOST_FP8 = 448
"""Greatest number of e4m3."""


class Quantised(NamedTuple):
    """Numbers of a checkpoint: each is worth (value - zero point) * scale, but for MXFP4, see `mxfp4_codes`."""

    values: torch.Tensor
    """[rows, columns], not negative."""
    zeros: torch.Tensor
    """[rows, groups]."""
    scales: torch.Tensor
    """[rows, groups] float32; of MXFP4 the exponents, uint8."""
    groups: torch.Tensor
    """[columns] int64: the group of each."""

    def worth(self) -> torch.Tensor:
        """[rows, columns] float32."""
        return (self.values - self.zeros[:, self.groups]) * self.scales[:, self.groups]

    def taken(self, slot: Slot) -> Quantised:
        """Selects what a rank takes."""
        values, zeros, scales, groups = self
        if slot.columns is not None:
            values, groups = values[:, slice(*slot.columns)], groups[slice(*slot.columns)]
            first, last = int(groups.min()), int(groups.max())
            zeros, scales, groups = zeros[:, first : last + 1], scales[:, first : last + 1], groups - first
        if slot.rows is not None:
            values, zeros, scales = (
                torch.cat([part[slice(*some)] for some in slot.rows]) for part in (values, zeros, scales)
            )
        return Quantised(values, zeros, scales, groups)


def unpacked(
    layout: PackedWeights, files: WeightFiles, name: str, rows: int, columns: int, device: torch.device
) -> Quantised:
    """The weight, [rows, columns], of which a checkpoint has the numbers in the tensor `name`, on a device."""
    prefix, numbers = name.removesuffix(layout.name), files.read(name).to(device)
    if layout.packing is Packing.COMPRESSED_TENSORS:
        return _compressed_tensors(layout, files, prefix, numbers, (rows, columns))
    scales, zeros = (files.read(f"{prefix}{part}").to(device) for part in ("scales", "qzeros"))
    if layout.packing is Packing.AWQ:
        values, zeros = _awq(numbers), _awq(zeros)
        groups = torch.arange(columns, device=device) // (columns // len(scales))
    else:
        values = _words(numbers.T, layout.num_bits).T
        zeros = _words(zeros, layout.num_bits) + layout.zero_offset
        groups = files.read(f"{prefix}{layout.order_name}").long().to(device)
    return Quantised(values.T, zeros.T, scales.float().T, groups)


def _compressed_tensors(
    layout: PackedWeights, files: WeightFiles, prefix: str, numbers: torch.Tensor, size: tuple[int, int]
) -> Quantised:
    (rows, columns), device = size, numbers.device
    scales = files.read(f"{prefix}weight_scale").float().to(device)
    values, zeros = (
        _words(numbers, layout.num_bits)[:, :columns],
        torch.full_like(scales, 1 << (layout.num_bits - 1), dtype=torch.int32),
    )
    if layout.has_zero_points:
        zeros = _words(files.read(f"{prefix}weight_zero_point").to(device).T, layout.num_bits).T[:rows]
    groups = torch.arange(columns, device=device) // (columns // scales.shape[1])
    if layout.has_order:
        groups = files.read(f"{prefix}{layout.order_name}").long().to(device)
    return Quantised(values, zeros, scales, groups)


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers of a stacked expert: [rows, groups, 16] uint8 and [rows, groups] uint8 to [rows, columns] float32."""
    codes, exponents = mxfp4_codes(blocks, scales)[0], scales.int() - _SCALE_BIAS
    numbers = torch.tensor([*_FP4, *(-number for number in _FP4)])[codes.int()]
    return torch.ldexp(numbers.view(*scales.shape, MXFP4_GROUP), exponents[..., None]).flatten(1)


def mxfp4_codes(blocks: torch.Tensor, scales: torch.Tensor) -> Quantised:
    """Reads a stacked expert as the codes and exponents that `PackedInts` keeps, without zero points; see `mxfp4`."""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)
    groups = torch.arange(codes.shape[1], device=codes.device) // MXFP4_GROUP
    return Quantised(codes, scales.new_empty(0), scales, groups)


def _words(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """The numbers of each row's words, lowest bits first: [rows, words] int32 to [rows, numbers] int32."""
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & (1 << num_bits) - 1).flatten(1)


def _awq(words: torch.Tensor) -> torch.Tensor:
    return _words(words, 4).view(len(words), -1, len(_AWQ_PLACES))[..., list(_AWQ_PLACES)].flatten(1)


def check_values(files: WeightFiles, slots: Slots) -> None:
    """Raises `CheckpointError` for scales that may make weights infinite, and bad zero points, groups and sizes.

    Reads what belongs to quantised numbers, and not these, before anything takes memory.
    """
    for name, slot in slots.items():
        layout = slot.packed
        if slot.fp8 is not None and slot.num_rows:
            _check_scales(files, name, _MOST_FP8)
        elif layout is not None and slot.is_part:
            if name.endswith("qzeros") and layout.packing is Packing.GPTQ:
                most = (1 << layout.num_bits) - 1
                greatest = int(_words(files.read(name), layout.num_bits).max()) + layout.zero_offset
                if greatest > most:
                    raise files.error(name, f"got zero points of {greatest}, supported: at most {most}")
            elif name.endswith(layout.order_name):
                _check_groups(files, name, layout.num_groups(slot.num_columns))
            elif name.endswith("weight_shape"):
                given, size = files.read(name).tolist(), [slot.num_rows, slot.num_columns]
                if given != size:
                    raise files.error(name, f"got {given}, supported: {size}")
            elif layout.packing is Packing.MXFP4:
                if (greatest := int(files.read(name).max())) > _MOST_EXPONENT:
                    raise files.error(name, f"got exponents of {greatest}, supported: at most {_MOST_EXPONENT}")
            elif name.endswith(("scales", "weight_scale")):
                _check_scales(files, name, (1 << layout.num_bits) - 1)


def _check_scales(files: WeightFiles, name: str, most: int) -> None:
    """`most`: the greatest number that a scale multiplies. Where both stay, only kernels see the product."""
    if not (files.read(name).float() * most).isfinite().all():
        raise files.error(name, "got scales that are NaN or infinite, or make weights so, supported: finite weights")


def _check_groups(files: WeightFiles, name: str, num_groups: int) -> None:
    groups = files.read(name)
    if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        given = f"{int(groups.min())} to {int(groups.max())}"
        raise files.error(name, f"got groups {given}, supported: 0 to {num_groups - 1}")
