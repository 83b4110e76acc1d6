"""Weights of 4 or 8 bits as the kernels read them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from slipstream.services.models.quantization import BLOCK

if TYPE_CHECKING:
    from slipstream.services.models.packed import Quantised
    from slipstream.services.models.quantization import PackedWeights

CHUNK = 64
"""Rows of a weight that are packed together."""
MOST_PART = {4: 64, 8: 32}
"""Columns whose numbers lie together, by bits: a lane of a warp has 16 bytes of them. Of smaller groups, theirs."""
_DEVIATION = {4: 4.6, 8: 74.0}
"""Standard deviation of random numbers of some bits."""
_FP4_DEVIATION, _EXPONENT_OF_ONE = 3.0, 127
"""Standard deviation of random MXFP4 numbers, and the exponent of the scale 1."""


class PackedInts(nn.Module):
    """A weight, [rows, columns], in the order in which the lanes of a warp multiply it; of experts, all their rows.

    Its numbers are integers, and groups have 32 or 64 columns, multiples of 128, or all; or they are MXFP4.
    """

    zeros: nn.Parameter | None

    def __init__(
        self,
        layout: PackedWeights,
        rows: int,
        columns: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        num_experts: int = 1,
    ) -> None:
        """`rows`: of an expert. `dtype`: of what it will be multiplied with; for bfloat16 bits are woven."""
        super().__init__()
        self.rows_per_expert = rows
        rows *= num_experts
        self.num_bits, self.num_rows, self.num_columns = layout.num_bits, rows, columns
        self.is_mxfp4 = not layout.is_of_ints
        part = MOST_PART[layout.num_bits]
        self._part = part if self.is_mxfp4 else min(part, layout.group_size or columns)
        self._is_woven = dtype == torch.bfloat16

        def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)

        groups = layout.num_groups(columns)
        self.bits = parameter(rows // CHUNK, columns * CHUNK * layout.num_bits // 8, dtype=torch.uint8)
        self.scales = parameter(groups, rows, dtype=torch.uint8 if self.is_mxfp4 else torch.float16)
        """[groups, rows]; float32 where float16 would not be exact. Of MXFP4 the exponents."""
        has_zeros = layout.has_zero_points and not self.is_mxfp4
        self.zeros = parameter(groups, rows, dtype=torch.uint8) if has_zeros else None
        """[groups, rows]; None: the middle of the range."""
        self.order: torch.Tensor | None = None
        """[columns] int64: the columns by group, where they are not in this order."""
        self.arrivals = torch.zeros(rows // CHUNK, dtype=torch.int32, device=device)
        """See `PackedFp8`."""

    def fill(self, start: int, part: Quantised) -> None:
        """Packs rows from `start` on."""
        rows, scales = slice(start, start + len(part.values)), part.scales.T
        groups, columns = len(self.scales), self.num_columns
        if not torch.equal(part.groups, torch.arange(columns, device=part.groups.device) // (columns // groups)):
            self.order = part.groups.argsort(stable=True)
        values = self.ordered(part.values).to(torch.uint8)
        lanes = in_lanes(values, self.num_bits, self._part, is_woven=self._is_woven)
        self.bits[start // CHUNK : rows.stop // CHUNK] = lanes
        if self.scales.dtype == torch.float16 and not torch.equal(scales.to(self.scales.dtype).float(), scales):
            self.scales.data = self.scales.data.float()
        self.scales[:, rows] = scales
        if self.zeros is not None:
            self.zeros[:, rows] = part.zeros.T.to(torch.uint8)

    def complete(self) -> None:
        """Gives up zero points that are all in the middle of the range. Call it when all rows are filled."""
        if self.zeros is not None and bool((self.zeros == 1 << (self.num_bits - 1)).all()):
            self.zeros = None

    def fill_with_noise(self, generator: torch.Generator) -> None:
        """Random numbers around zero with a standard deviation of 1 / sqrt(columns)."""
        self.bits.random_(generator=generator)
        if self.is_mxfp4:
            self.scales.fill_(_EXPONENT_OF_ONE - round(math.log2(_FP4_DEVIATION * self.num_columns**0.5)))
            return
        self.scales.fill_(self.num_columns**-0.5 / _DEVIATION[self.num_bits])
        if self.zeros is not None:
            self.zeros.fill_(1 << (self.num_bits - 1))

    def ordered(self, x: torch.Tensor) -> torch.Tensor:
        """The columns of [rows, columns] in the weight's order."""
        return x if self.order is None else x.index_select(1, self.order)


def in_lanes(values: torch.Tensor, num_bits: int, part: int, *, is_woven: bool) -> torch.Tensor:
    """Orders the numbers of [rows, columns] uint8 as lanes multiply them: [rows / 64, bytes].

    `part`: columns whose numbers lie together. `is_woven`: for bfloat16.
    """
    rows, columns = values.shape
    # By a chunk's groups of 16 rows, two of 8, each row; a part's groups of 16 columns, two of 8, of pairs.
    shape = (rows // CHUNK, 4, 2, 8, columns // part, part // 16, 2, 4, 2)
    # Within a word: of 8 bits as the lane multiplies; of 4 bits so that one mask takes a pair out of it.
    word = (6, 2, 8) if num_bits == 8 else (8, 6, 2) if is_woven else (2, 8, 6)
    lanes = values.reshape(shape).permute(0, 4, 1, 3, 7, 5, *word).reshape(rows // CHUNK, -1)
    return lanes if num_bits == 8 else lanes[:, ::2] | lanes[:, 1::2] << 4


def keeps_packed(layout: PackedWeights, device: torch.device, *sizes: int) -> bool:
    """True if kernels multiply weights of these rows and columns as they are packed, where they do so with FP8."""
    has_groups = not layout.is_of_ints or layout.group_size in (None, 32, 64) or layout.group_size % BLOCK == 0
    least = BLOCK if layout.is_of_ints else CHUNK
    return device.type != "cpu" and has_groups and all(size % least == 0 for size in sizes)
