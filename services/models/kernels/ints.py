"""Matrix products with weights of 4 or 8 bits: the numbers become bfloat16 in registers, less their zero points.

Scales multiply the sums of groups of columns, in float32: a weight is what its formula says, and is not rounded at
all. Otherwise these are the products with FP8 weights (`fp8.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from slipstream.services.models import packed_ints
from slipstream.services.models.kernels.fp8 import BLOCK, CHUNK, chunks_at, offsets_of, per_slice
from slipstream.services.models.kernels.launching import fetch, overlapping, wait_for_previous

if TYPE_CHECKING:
    from slipstream.services.models.packed_ints import PackedInts

_BIAS: tl.constexpr = tl.constexpr(128)
"""Added to numbers of 4 bits: in bfloat16 they are the last bits of these sums."""
_PART_4: tl.constexpr = tl.constexpr(packed_ints.MOST_PART[4])
_PART_8: tl.constexpr = tl.constexpr(packed_ints.MOST_PART[8])
_LINE: tl.constexpr = tl.constexpr(128)
"""Bytes in a line of the cache."""

_FROM_4_BITS: tl.constexpr = tl.constexpr("""{
.reg .b32 second, third, fourth;
shr.u32 second, $4, 4;
shr.u32 third, $4, 8;
shr.u32 fourth, $4, 12;
lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $1, second, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $2, third, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $3, fourth, 0x000f000f, 0x43004300, 0xea;
}""")
# A byte becomes the last one of 2**23 in float32, whose upper half is a bfloat16 after the difference.
_FROM_8_BITS: tl.constexpr = tl.constexpr("""{
.reg .b32 a, b, c, d;
.reg .f32 x, y, z, w;
prmt.b32 a, $2, 0x4b000000, 0x7650;
prmt.b32 b, $2, 0x4b000000, 0x7651;
prmt.b32 c, $2, 0x4b000000, 0x7652;
prmt.b32 d, $2, 0x4b000000, 0x7653;
mov.b32 x, a;
mov.b32 y, b;
mov.b32 z, c;
mov.b32 w, d;
sub.f32 x, x, 0f4b000000;
sub.f32 y, y, 0f4b000000;
sub.f32 z, z, 0f4b000000;
sub.f32 w, w, 0f4b000000;
mov.b32 a, x;
mov.b32 b, y;
mov.b32 c, z;
mov.b32 d, w;
prmt.b32 $0, a, b, 0x7632;
prmt.b32 $1, c, d, 0x7632;
}""")


@triton.jit
def int_numbers(
    blocks: tl.tensor, zero: tl.tensor, DTYPE: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    NUM_BITS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """STEP columns of some chunks, which begin at `blocks`, less zero points, [ROWS] uint8: exactly, [ROWS, STEP]."""
    most: tl.constexpr = _PART_4 if NUM_BITS == 4 else _PART_8
    columns: tl.constexpr = most if most < STEP else STEP
    bias: tl.constexpr = _BIAS if NUM_BITS == 4 else 0
    size: tl.constexpr = CHUNK * columns * NUM_BITS // 8
    at = blocks[None, :, None] + tl.arange(0, STEP // columns)[:, None, None] * size + tl.arange(0, size)[None, None, :]
    bits = tl.load(at)
    if NUM_BITS == 4:
        if DTYPE.is_bf16():
            first, second = tl.inline_asm_elementwise(
                _FROM_4_BITS, "=r,=r,=r,=r,r", [bits], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            first, second = ((bits & 15).to(DTYPE) + _BIAS).to(DTYPE), ((bits >> 4).to(DTYPE) + _BIAS).to(DTYPE)
        lanes = tl.reshape(tl.join(first, second), (STEP // columns, ROWS // 16, 8, 4, columns // 16, 2, 2, 2))
        lanes = tl.permute(lanes, (1, 5, 2, 0, 4, 7, 3, 6))
    else:
        if DTYPE.is_bf16():
            numbers = tl.inline_asm_elementwise(
                _FROM_8_BITS, "=r,=r,r", [bits], dtype=tl.bfloat16, is_pure=True, pack=4
            )
        else:
            numbers = bits.to(DTYPE)
        lanes = tl.reshape(numbers, (STEP // columns, ROWS // 16, 8, 4, columns // 16, 2, 2, 2))
        lanes = tl.permute(lanes, (1, 6, 2, 0, 4, 5, 3, 7))
    shift = (zero.to(tl.float32) + bias).to(DTYPE)
    return tl.reshape(lanes, (ROWS, STEP)) - shift[:, None]


@triton.jit
def fetch_ints(
    weight: tl.tensor, first: tl.tensor, SIZE: tl.constexpr, BEHIND: tl.constexpr, ROWS: tl.constexpr,
    SLICES: tl.constexpr, BLOCKS: tl.constexpr, NUM_BITS: tl.constexpr,
) -> None:  # fmt: skip
    """Prefetches the first BLOCKS blocks, a power of two, of what `int_sums` will read."""
    size: tl.constexpr = CHUNK * BLOCK * NUM_BITS // 8
    line = tl.arange(0, BLOCKS * size // _LINE) * _LINE
    begin = tl.program_id(1) * per_slice(SIZE, SLICES) * size
    fetch(chunks_at(weight, first, SIZE * NUM_BITS // 8, BEHIND, ROWS)[:, None] + begin + line[None, :])


@triton.jit
def int_sums(
    x: tl.tensor,  # [.., SIZE]
    source: tl.tensor,  # [BLOCK_M] int64: rows of x
    is_row: tl.tensor,  # [BLOCK_M]: those that are read
    weight: tl.tensor,  # bits of a `PackedInts`
    scales: tl.tensor,  # [GROUPS, ALL_ROWS] of the same
    zeros: tl.tensor,  # the same, read if HAS_ZEROS
    first: tl.tensor, slice: tl.tensor, SIZE: tl.constexpr, BEHIND: tl.constexpr, GROUPS: tl.constexpr,
    ALL_ROWS: tl.constexpr, NUM_BITS: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr,
    SLICES: tl.constexpr, STAGES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Multiplies ROWS of the weight with rows of x, over a slice of SIZE: [ROWS, BLOCK_M].

    The weight's rows begin at `first`; if BEHIND, the second half of them is BEHIND rows further.
    """
    group: tl.constexpr = SIZE // GROUPS
    step: tl.constexpr = group if group < BLOCK else BLOCK
    begin = slice * per_slice(SIZE, SLICES)
    end = tl.minimum(begin + per_slice(SIZE, SLICES), SIZE // BLOCK)
    x_at = x + source[:, None] * SIZE + tl.arange(0, step)[None, :]
    x_mask = is_row[:, None]
    w_at = chunks_at(weight, first, SIZE * NUM_BITS // 8, BEHIND, ROWS)
    row = first + offsets_of(tl.arange(0, ROWS), BEHIND, ROWS)
    begin, end = begin * (BLOCK // step), end * (BLOCK // step)
    total = tl.zeros((ROWS, BLOCK_M), tl.float32)
    # A step ahead, as the compiler gives such small loads no stages.
    at = row + begin * step // group * ALL_ROWS
    scale, zero = tl.load(scales + at), _zero_points(zeros + at, HAS_ZEROS, NUM_BITS)
    for number in tl.range(begin, end, num_stages=STAGES):
        tile = tl.trans(tl.load(x_at + number * step, mask=x_mask, other=0.0))
        at = row + tl.minimum(number + 1, end - 1) * step // group * ALL_ROWS
        next_scale, next_zero = tl.load(scales + at), _zero_points(zeros + at, HAS_ZEROS, NUM_BITS)
        blocks = w_at + number * (CHUNK * step * NUM_BITS // 8)
        numbers = int_numbers(blocks, zero, x.dtype.element_ty, ROWS, step, NUM_BITS)
        # See `fp8_sums` for a group that is the whole row.
        total += tl.dot(numbers, tile, input_precision="ieee") * scale[:, None].to(tl.float32)
        scale, zero = next_scale, next_zero
    return total


@triton.jit
def _zero_points(at: tl.tensor, HAS_ZEROS: tl.constexpr, NUM_BITS: tl.constexpr) -> tl.tensor:
    """uint8, of the shape of `at`."""
    return tl.load(at) if HAS_ZEROS else tl.full(at.shape, 1 << NUM_BITS - 1, tl.uint8)


@triton.jit
def expand_kernel(
    weight: tl.tensor,  # bits of a `PackedInts`
    scales: tl.tensor,  # [GROUPS, ALL_ROWS] of the same
    zeros: tl.tensor,  # the same, read if HAS_ZEROS
    output: tl.tensor,  # [ALL_ROWS, SIZE], written
    SIZE: tl.constexpr, GROUPS: tl.constexpr, ALL_ROWS: tl.constexpr, NUM_BITS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Rounds what some columns of a chunk are worth. Grid: (ALL_ROWS / CHUNK, SIZE / min(BLOCK, SIZE / GROUPS))."""
    group: tl.constexpr = SIZE // GROUPS
    step: tl.constexpr = group if group < BLOCK else BLOCK
    first, number = tl.program_id(0) * CHUNK, tl.program_id(1)
    row = first + tl.arange(0, CHUNK)
    blocks = chunks_at(weight, first, SIZE * NUM_BITS // 8, 0, CHUNK) + number * (CHUNK * step * NUM_BITS // 8)
    at = row + number * step // group * ALL_ROWS
    zero = _zero_points(zeros + at, HAS_ZEROS, NUM_BITS)
    numbers = int_numbers(blocks, zero, output.dtype.element_ty, CHUNK, step, NUM_BITS)
    worth = numbers.to(tl.float32) * tl.load(scales + at)[:, None].to(tl.float32)
    wait_for_previous(OVERLAPS)
    at = output + row.to(tl.int64)[:, None] * SIZE + (number * step + tl.arange(0, step))[None, :]
    tl.store(at, worth.to(output.dtype.element_ty))


def int_linear(x: torch.Tensor, ints: PackedInts, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiplies many rows: [N, size] to [N, columns], with the weight in their dtype, rounded, as `fp8_linear`."""
    worth = x.new_empty(ints.num_rows, ints.num_columns)
    step = min(BLOCK.value, ints.num_columns // len(ints.scales))
    expand_kernel[len(ints.bits), ints.num_columns // step](
        ints.bits, ints.scales, ints.bits if ints.zeros is None else ints.zeros, worth,
        SIZE=ints.num_columns, GROUPS=len(ints.scales), ALL_ROWS=ints.num_rows, NUM_BITS=ints.num_bits,
        HAS_ZEROS=ints.zeros is not None, **overlapping(x.device),
    )  # fmt: skip
    return F.linear(ints.ordered(x), worth, bias)
