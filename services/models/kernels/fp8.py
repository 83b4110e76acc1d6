"""Matrix products with FP8 weights: the numbers become bfloat16 in registers, scales multiply the sums.

Rows are never rounded to FP8: a product is as exact as one with the same weights in float32, and does not depend on the
rows beside. A weight lies in memory as the lanes of a warp multiply it (`PackedFp8`), so that it goes from there to the
tensor cores without a detour over shared memory. It is their first operand and the few rows are the second, whose tiles
may be narrow. The columns of a weight are split over programs, so that there are enough of them to keep memory busy;
the program that arrives last adds up what the others left, always in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from slipstream.services.models import packed_ints, quantization
from slipstream.services.models.kernels.launching import fetch, overlapping, wait_for_previous

if TYPE_CHECKING:
    from slipstream.services.models.linear import Linear, PackedFp8

BLOCK: tl.constexpr = tl.constexpr(quantization.BLOCK)
"""Columns of a weight that share a scale, and that are multiplied at a time."""
CHUNK: tl.constexpr = tl.constexpr(packed_ints.CHUNK)
_LINE: tl.constexpr = tl.constexpr(128)
"""Bytes in a line of the cache."""

# Four numbers of 8 bits, woven as `PackedFp8` has them, become four of 16; 2**120 makes up for the other bias of the
# exponent, also for subnormal numbers.
_TO_BF16: tl.constexpr = tl.constexpr("""{
.reg .b32 low, high, rotated, shifted, factor;
and.b32 low, $2, 0x87f087f0;
shf.r.wrap.b32 rotated, $2, $2, 4;
shl.b32 shifted, $2, 4;
and.b32 shifted, shifted, 0x00700070;
lop3.b32 high, rotated, 0x87808780, shifted, 0xea;
mov.b32 factor, 0x7b807b80;
mul.bf16x2 $0, low, factor;
mul.bf16x2 $1, high, factor;
}""")


@triton.jit
def from_fp8(bits: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """e4m3 numbers of a `PackedFp8` for DTYPE, given as int8, in DTYPE, exactly; NaN becomes 480."""
    if DTYPE.is_bf16():
        return tl.inline_asm_elementwise(_TO_BF16, "=r,=r,r", [bits], dtype=tl.bfloat16, is_pure=True, pack=4)
    wide = bits.to(tl.int16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return (half * 256.0).to(DTYPE)


@triton.jit
def offsets_of(i: tl.tensor, BEHIND: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    """Where a program's rows `i` of ROWS are, from its first on; if BEHIND, the second half is BEHIND rows further."""
    half: tl.constexpr = ROWS if BEHIND == 0 else ROWS // 2
    return i % half + i // half * BEHIND


@triton.jit
def chunks_at(
    weight: tl.tensor, first: tl.tensor, SIZE: tl.constexpr, BEHIND: tl.constexpr, ROWS: tl.constexpr
) -> tl.tensor:
    """Where the chunks of a program's ROWS of a weight begin, which are those from `first` on."""
    row = first + offsets_of(tl.arange(0, ROWS // CHUNK) * CHUNK, BEHIND, ROWS)
    return weight + (row // CHUNK).to(tl.int64) * (CHUNK * SIZE)


@triton.jit
def _numbers(blocks: tl.tensor, DTYPE: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    """A block of each of some chunks, which begins at `blocks`, as numbers: [ROWS, BLOCK]."""
    part: tl.constexpr = CHUNK * BLOCK // 4
    at = blocks[None, :, None] + tl.arange(0, 4)[:, None, None] * part + tl.arange(0, part)[None, None, :]
    lanes = tl.reshape(from_fp8(tl.load(at), DTYPE), (4, ROWS // 16, 8, 4, 2, 2, 2, 2))
    return tl.reshape(tl.permute(lanes, (1, 6, 2, 0, 4, 5, 3, 7)), (ROWS, BLOCK))


@triton.jit
def fetch_fp8(
    weight: tl.tensor, first: tl.tensor, SIZE: tl.constexpr, BEHIND: tl.constexpr, ROWS: tl.constexpr,
    SLICES: tl.constexpr, BLOCKS: tl.constexpr,
) -> None:  # fmt: skip
    """Prefetches the first BLOCKS blocks, a power of two, of what `fp8_sums` will read."""
    line = tl.arange(0, BLOCKS * CHUNK * BLOCK // _LINE) * _LINE
    begin = tl.program_id(1) * per_slice(SIZE, SLICES) * (CHUNK * BLOCK)
    fetch(chunks_at(weight, first, SIZE, BEHIND, ROWS)[:, None] + begin + line[None, :])


@triton.jit
def per_slice(SIZE: tl.constexpr, SLICES: tl.constexpr) -> tl.constexpr:
    """Blocks of a slice, at most."""
    return (SIZE // BLOCK + SLICES - 1) // SLICES


@triton.jit
def fp8_sums(
    x: tl.tensor,  # [num_rows, SIZE]
    weight: tl.tensor,  # a `PackedFp8`'s bits
    scales: tl.tensor,  # [rows of the weight / GROUP, K_BLOCKS] float32
    first: tl.tensor, num_rows: tl.tensor, SIZE: tl.constexpr, BEHIND: tl.constexpr, K_BLOCKS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Multiplies ROWS of the weight with all rows of x, over this program's slice of SIZE: [ROWS, BLOCK_M].

    The weight's rows begin at `first`; if BEHIND, the second half of them is BEHIND rows further.
    """
    begin = tl.program_id(1) * per_slice(SIZE, SLICES)
    end = tl.minimum(begin + per_slice(SIZE, SLICES), SIZE // BLOCK)
    m = tl.arange(0, BLOCK_M)
    x_at = x + m.to(tl.int64)[:, None] * SIZE + tl.arange(0, BLOCK)[None, :]
    x_mask = (m < num_rows)[:, None]
    w_at = chunks_at(weight, first, SIZE, BEHIND, ROWS)
    if GROUP >= ROWS and BEHIND == 0:
        s_at = scales + first // GROUP * K_BLOCKS
    else:
        s_at = scales + ((first + offsets_of(tl.arange(0, ROWS), BEHIND, ROWS)) // GROUP * K_BLOCKS)[:, None]
    total = tl.zeros((ROWS, BLOCK_M), tl.float32)
    scale = tl.load(s_at)
    for block in tl.range(begin, end, num_stages=STAGES):
        tile = tl.trans(tl.load(x_at + block * BLOCK, mask=x_mask, other=0.0))
        numbers = _numbers(w_at + block * (CHUNK * BLOCK), x.dtype.element_ty, ROWS)
        # Multiplied here also where one scale is for all, so that the compiler waits for the product: else the next
        # step's numbers may come into registers that the tensor cores still read.
        total += tl.dot(numbers, tile, input_precision="ieee") * (tl.load(s_at + block) if K_BLOCKS > 1 else scale)
    return total


@triton.jit
def leave(
    total: tl.tensor,  # [ROWS, BLOCK_M]
    parts: tl.tensor,  # [SLICES, programs, BLOCK_M, ROWS] float32
    arrivals: tl.tensor,  # [programs] int32
    num_rows: tl.tensor, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Leaves this slice's part of a sum for the program that arrives last. Returns whether it is this one."""
    tl.store(_part(parts, tl.program_id(1), BLOCK_M, ROWS), total, mask=(tl.arange(0, BLOCK_M) < num_rows)[None, :])
    tl.debug_barrier()
    return tl.atomic_add(arrivals + tl.program_id(0), 1, sem="acq_rel", scope="gpu") == SLICES - 1


@triton.jit
def gather(
    parts: tl.tensor, arrivals: tl.tensor, num_rows: tl.tensor, BLOCK_M: tl.constexpr, ROWS: tl.constexpr,
    SLICES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Adds up what all slices left, [ROWS, BLOCK_M], and makes `arrivals` zero again."""
    is_row = (tl.arange(0, BLOCK_M) < num_rows)[None, :]
    total = tl.zeros((ROWS, BLOCK_M), tl.float32)
    # As many loads at once as the registers hold.
    for slice in tl.range(0, SLICES, loop_unroll_factor=128 // BLOCK_M):
        at = _part(parts, slice, BLOCK_M, ROWS)
        total += tl.load(at, mask=is_row, other=0.0, cache_modifier=".cg")
    tl.store(arrivals + tl.program_id(0), 0)
    return total


@triton.jit
def _part(parts: tl.tensor, slice: tl.tensor, BLOCK_M: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    """Where a slice's part of this program's sums lies: [ROWS, BLOCK_M]."""
    place = (slice * tl.num_programs(0) + tl.program_id(0)) * (BLOCK_M * ROWS)
    return parts + place + tl.arange(0, BLOCK_M)[None, :] * ROWS + tl.arange(0, ROWS)[:, None]


@triton.jit
def halves(total: tl.tensor, BLOCK_M: tl.constexpr, ROWS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The first and the second half of [ROWS, BLOCK_M], each [BLOCK_M, ROWS / 2]."""
    first, second = tl.split(tl.permute(tl.reshape(total, (2, ROWS // 2, BLOCK_M)), (2, 1, 0)))
    return first, second


@triton.jit
def dequantise_kernel(
    weight: tl.tensor,  # a `PackedFp8`'s bits
    scales: tl.tensor,  # [rows / GROUP, K_BLOCKS] float32
    output: tl.tensor,  # [rows, SIZE], written
    SIZE: tl.constexpr, K_BLOCKS: tl.constexpr, GROUP: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Multiplies a block of a chunk with its scales. Grid: (rows / CHUNK, SIZE / BLOCK)."""
    first, block = tl.program_id(0) * CHUNK, tl.program_id(1)
    row = first + tl.arange(0, CHUNK)
    numbers = _numbers(
        chunks_at(weight, first, SIZE, 0, CHUNK) + block * (CHUNK * BLOCK), output.dtype.element_ty, CHUNK
    )
    scale = tl.load(scales + row // GROUP * K_BLOCKS + (block if K_BLOCKS > 1 else 0))
    at = output + row.to(tl.int64)[:, None] * SIZE + (block * BLOCK + tl.arange(0, BLOCK))[None, :]
    wait_for_previous(OVERLAPS)
    tl.store(at, (numbers.to(tl.float32) * scale[:, None]).to(output.dtype.element_ty))


def fp8_operands(layer: Linear) -> tuple[PackedFp8, torch.Tensor]:
    """Returns the weight and its scales, as the kernels read them."""
    assert layer.packed_fp8 is not None, "a decoder packs its weights when they are complete"
    assert layer.scales is not None, "the weight is FP8"
    return layer.packed_fp8, layer.scales


def fp8_layout(layer: Linear) -> dict[str, int]:
    """Returns how a weight's scales lie, as the kernels are told; without any for a weight that is not FP8."""
    if layer.scales is None:
        return {"K_BLOCKS": 0, "GROUP": 1}
    groups, blocks = layer.scales.shape
    return {"K_BLOCKS": blocks, "GROUP": fp8_operands(layer)[0].num_rows // groups}


def fp8_linear(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    """Computes `layer(x)` of many rows: [N, size] to [N, columns]. The layer's weight is FP8.

    Makes the weight in the rows' dtype, rounded, for a product of the library's: from about a hundred rows on that is
    faster than any kernel here, as each of its programs would turn the same numbers into others once more.
    """
    weight, scales = fp8_operands(layer)
    worth = x.new_empty(weight.num_rows, weight.num_columns)
    dequantise_kernel[weight.bits.shape[:2]](
        weight.bits, scales, worth, SIZE=weight.num_columns, **fp8_layout(layer), **overlapping(x.device)
    )
    return F.linear(x, worth, layer.bias)
