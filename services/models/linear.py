"""Linear layers, and how they hold their weights: plain, in oneDNN's layout, as FP8 numbers, or as packed integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.services.models.packed_ints import CHUNK
from slipstream.services.models.quantization import BLOCK

if TYPE_CHECKING:
    from slipstream.services.models.packed_ints import PackedInts

FP8 = torch.float8_e4m3fn
_PACKED_FOR_TOKENS = 8
"""The number of tokens that a packed weight's layout is chosen for; it stays fast for many more."""


class Linear(nn.Module):
    """`x @ weight.T + bias`.

    oneDNN multiplies float32 on CPUs two to three times as fast as PyTorch's default when the weight is in a
    layout of its own (5 to 512 tokens, AMD with AVX-512), so `pack` replaces it by that after loading.
    """

    def __init__(
        self,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None = None,
        scales: nn.Parameter | None = None,
        ints: PackedInts | None = None,
    ) -> None:
        """`weight`: [out_features, in_features], which may be another module's. `bias`: [out_features].

        `ints`: the weight, where it is packed: only the kernels multiply it.

        `scales`: of an FP8 weight, see `dequantised`. `forward` then makes the weight anew; the kernels, which need
        `pack_fp8` before, do not.
        """
        super().__init__()
        self.weight: nn.Parameter | None = weight
        self.ints: PackedInts | None = ints
        self.bias = bias
        self.scales = scales
        self.packed_fp8: PackedFp8 | None = None
        self._packed: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        if self._packed is not None:
            rows = x.reshape(-1, x.shape[-1])
            num_rows = len(rows)
            if padding := padded_rows(num_rows) - num_rows:
                rows = F.pad(rows, (0, 0, 0, padding))
            packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
            return packed[:num_rows].view(*x.shape[:-1], packed.shape[-1])
        assert self.weight is not None, "a weight is only given up once it is packed"
        weight = self.weight if self.scales is None else dequantised(self.weight, self.scales).to(x.dtype)
        return F.linear(x, weight, self.bias)

    @property
    def plain_weight(self) -> torch.Tensor:
        """The weight, [out_features, in_features]; a copy if it is packed."""
        if self.weight is not None:
            return self.weight
        assert self._packed is not None, "a weight is only given up once it is packed"
        return self._packed.to_dense()

    def pack(self) -> None:
        """Rearranges the weight for the fastest product, where oneDNN has one; it cannot be read or set any more."""
        if self.weight is None or not len(self.weight) or not _can_pack(self.weight):
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACKED_FOR_TOKENS)
        self.weight = None

    def pack_fp8(self, dtype: torch.dtype) -> None:
        """Rearranges an FP8 weight for the kernels and rows of `dtype`; `forward` cannot be called any more."""
        if self.weight is not None and self.scales is not None:
            self.packed_fp8, self.weight = PackedFp8.of(self.weight, dtype), None


def dequantised(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiplies e4m3 numbers, [rows, columns], with the scales of equal groups of rows: float32.

    `scales`: [groups, 1], or [groups, cdiv(columns, 128)].
    """
    by_row = scales.repeat_interleave(len(weight) // len(scales), 0)
    if by_row.shape[1] > 1:
        by_row = by_row.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
    return weight.float() * by_row


def pack_linears(model: nn.Module) -> None:
    """Packs every `Linear` of a model."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.pack()


def padded_rows(num_rows: int) -> int:
    """Rounds up to one of eight sizes between a power of two and the next, an eighth more at most, and to 2.

    oneDNN makes and keeps a kernel of about half a MiB for every number of rows that it meets. Prompts have any number
    of rows, and a process would grow by gigabytes. A single row would be summed in another order than beside others,
    where it has more than a thousand columns.
    """
    num_rows = max(num_rows, 2)
    granule = 1 << max(0, num_rows.bit_length() - 4)
    return -(-num_rows // granule) * granule


def _can_pack(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def empty_parameter(*shape: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """A weight that a checkpoint fills in and that is not trained."""
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)


def keeps_fp8(device: torch.device, dtype: torch.dtype, *, has_whole_blocks: bool) -> bool:
    """True if a model that computes in `dtype` keeps FP8 weights as they are, else it has them in `dtype`.

    Packed weights are kept only where FP8 weights are, and on no CPU (`keeps_packed`).

    The kernels turn them into bfloat16, with instructions that GPUs have from compute capability 9 on.
    `has_whole_blocks`: rows and columns of all weights are multiples of BLOCK, as the kernels need them.
    """
    has_kernels = device.type != "cuda" or (has_whole_blocks and torch.cuda.get_device_capability(device) >= (9, 0))
    return dtype == torch.bfloat16 and has_kernels


@dataclass(frozen=True, slots=True)
class PackedFp8:
    """A weight, [rows, columns], as the kernels read it: in the order in which the lanes of a warp multiply it."""

    bits: torch.Tensor
    """[rows / 64, columns / 128, 8192] int8: blocks of 64 x 128 numbers."""
    arrivals: torch.Tensor
    """[rows / 64] int32: programs of a running product that have left their part of a sum; zeros otherwise.

    So products with one weight must not run side by side.
    """

    @classmethod
    def of(cls, weight: torch.Tensor, dtype: torch.dtype) -> PackedFp8:
        """Packs e4m3 numbers. `dtype`: of what they will be multiplied with; for bfloat16 their bits are woven."""
        rows, columns = weight.shape
        # By a chunk's groups of 16 rows, two of 8, each row; a block's groups of 32 columns, two of 16, of 8, pairs.
        parts = weight.view(torch.int8).view(rows // CHUNK, 4, 2, 8, columns // BLOCK, 4, 2, 2, 4, 2)
        bits = parts.permute(0, 4, 5, 1, 3, 8, 6, 7, 2, 9).reshape(rows // CHUNK, columns // BLOCK, CHUNK * BLOCK)
        if dtype == torch.bfloat16:
            for first in range(0, len(bits), _CHUNKS_WOVEN):  # which takes several times their memory
                some = bits[first : first + _CHUNKS_WOVEN]
                some.copy_(_woven(some))
        return cls(bits, torch.zeros(rows // CHUNK, dtype=torch.int32, device=weight.device))

    @property
    def num_rows(self) -> int:
        return len(self.bits) * CHUNK

    @property
    def num_columns(self) -> int:
        return self.bits.shape[1] * BLOCK


_CHUNKS_WOVEN = 16
"""Chunks whose bits are woven at a time."""


def _woven(bits: torch.Tensor) -> torch.Tensor:
    """Rearranges the bits of each four numbers, so that seven instructions make bfloat16 of them (`from_fp8`).

    The first two numbers of a word take the bits 15 and 10 to 4 of its halves, as they do in bfloat16. The others are
    where those leave room: their exponents in the bits 14 to 11, their last bits in 2 to 0, and their signs in bit 3 of
    the other one's half.
    """
    words = bits.view(torch.int32)
    first, second, third, fourth = (words >> shift & 0xFF for shift in (0, 8, 16, 24))

    def half(main: torch.Tensor, added: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        placed = (main & 0x80) << 8 | (main & 0x7F) << 4
        return placed | (added & 0x78) << 8 | (other & 0x80) >> 4 | added & 7

    return (half(first, third, fourth) | half(second, fourth, third) << 16).view(torch.int8)
