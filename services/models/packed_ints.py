"""A weight of 4 or 8 bits as the kernels read it."""

from __future__ import annotations

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


class PackedInts(nn.Module):
    """A weight, [rows, columns], in the order in which the lanes of a warp multiply it.

    Rows and columns are multiples of 128, and groups have 32 or 64 columns, multiples of 128, or all.
    """

    zeros: nn.Parameter | None

    def __init__(
        self, layout: PackedWeights, rows: int, columns: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        """`dtype`: of what it will be multiplied with; for bfloat16 bits are woven."""
        super().__init__()
        self.num_bits, self.num_rows, self.num_columns = layout.num_bits, rows, columns
        self._part = min(MOST_PART[layout.num_bits], layout.group_size or columns)
        self._is_woven = dtype == torch.bfloat16

        def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)

        groups = layout.num_groups(columns)
        self.bits = parameter(rows // CHUNK, columns * CHUNK * layout.num_bits // 8, dtype=torch.uint8)
        self.scales = parameter(groups, rows, dtype=torch.float16)
        """[groups, rows]; float32 where float16 would not be exact."""
        self.zeros = parameter(groups, rows, dtype=torch.uint8) if layout.has_zero_points else None
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
        self.bits[start // CHUNK : rows.stop // CHUNK] = self._in_lanes(values)
        if self.scales.dtype != torch.float32 and not torch.equal(scales.to(self.scales.dtype).float(), scales):
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
        self.scales.fill_(self.num_columns**-0.5 / _DEVIATION[self.num_bits])
        if self.zeros is not None:
            self.zeros.fill_(1 << (self.num_bits - 1))

    def ordered(self, x: torch.Tensor) -> torch.Tensor:
        """The columns of [rows, columns] in the weight's order."""
        return x if self.order is None else x.index_select(1, self.order)

    def _in_lanes(self, values: torch.Tensor) -> torch.Tensor:
        rows, columns = values.shape
        # By a chunk's groups of 16 rows, two of 8, each row; a part's groups of 16 columns, two of 8, of pairs.
        shape = (rows // CHUNK, 4, 2, 8, columns // self._part, self._part // 16, 2, 4, 2)
        # Within a word: of 8 bits as the lane multiplies; of 4 bits so that one mask takes a pair out of it.
        word = (6, 2, 8) if self.num_bits == 8 else (8, 6, 2) if self._is_woven else (2, 8, 6)
        lanes = values.view(shape).permute(0, 4, 1, 3, 7, 5, *word).reshape(rows // CHUNK, -1)
        return lanes if self.num_bits == 8 else lanes[:, ::2] | lanes[:, 1::2] << 4


def keeps_ints(layout: PackedWeights | None, device: torch.device) -> bool:
    """True if kernels multiply weights that are packed so, where they multiply FP8 weights, too."""
    if layout is None or not layout.is_of_ints or device.type == "cpu":
        return False
    size = layout.group_size
    return size is None or size in (32, 64) or size % BLOCK == 0
