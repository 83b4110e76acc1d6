"""Matrix products with FP8 weights: the numbers become bfloat16 in registers, scales multiply the sums.

Rows are never rounded to FP8: a product is as exact as one with the same weights in float32, and does not depend on the
rows beside. Half the bytes of bfloat16 weights are read, but not yet in half the time: docs/measured-on-a-gpu.md has
the steps of an 8B model, which are somewhat shorter at few rows and longer from 32 rows on. What the machine code and
the tiles suggest, unmeasured: the narrow products have one program of four warps for a multiprocessor, or for two of
them, so a warp scheduler has nothing else to do while its warp waits for loads, conversions and chains of tensor-core
instructions; at 64 rows a program of 32 columns reads four times as many bytes of rows as of weights. More warps with
slices of K each would hide the waits; more columns in a program, with K split over programs, would save reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from slipstream.services.models.kernels.launching import overlapping, power_of_two, wait_for_previous

if TYPE_CHECKING:
    from slipstream.services.models.decoder import Linear

BLOCK: tl.constexpr = tl.constexpr(128)
"""Columns of a weight that share a scale, and that are multiplied at a time."""

# Four numbers of 8 bits become four of 16: the bits move to their places, and 2**120 makes up for the other bias of the
# exponent, also for subnormal numbers. Triton's own conversion goes through float16 and float32.
_TO_BF16: tl.constexpr = tl.constexpr("""{
.reg .b32 low, high, a, b, factor;
prmt.b32 low, $2, 0, 0x1404;
prmt.b32 high, $2, 0, 0x3424;
shr.b32 a, low, 4;
shr.b32 b, high, 4;
and.b32 a, a, 0x07f007f0;
and.b32 b, b, 0x07f007f0;
lop3.b32 low, low, 0x80008000, a, 0xea;
lop3.b32 high, high, 0x80008000, b, 0xea;
mov.b32 factor, 0x7b807b80;
mul.bf16x2 $0, low, factor;
mul.bf16x2 $1, high, factor;
}""")


@triton.jit
def from_fp8(bits: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """e4m3 numbers, given as int8, in a larger dtype, exactly; NaN becomes 480."""
    if DTYPE.is_bf16():
        return tl.inline_asm_elementwise(_TO_BF16, "=r,=r,r", [bits], dtype=tl.bfloat16, is_pure=True, pack=4)
    wide = bits.to(tl.int16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return (half * 256.0).to(DTYPE)


@triton.jit
def fp8_sums(
    x: tl.tensor,  # [num_rows, SIZE]
    weight: tl.tensor,  # [COLUMNS, SIZE] int8; [2 * COLUMNS, SIZE] if IS_GATED
    scales: tl.tensor,  # [COLUMNS / GROUP, K_BLOCKS] float32, or twice as many rows
    first: tl.tensor,
    num_rows: tl.tensor,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    K_BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
    IS_GATED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Multiplies all rows with BLOCK_N columns from `first`, and with those COLUMNS behind if IS_GATED.

    Loads UNROLL blocks of the weight at a time. Returns [BLOCK_M, BLOCK_N] twice.
    """
    m = tl.arange(0, BLOCK_M)
    n = first + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK)
    m_mask = (m < num_rows)[:, None]
    n_mask = (n < COLUMNS)[None, :]
    x_at = x + m.to(tl.int64)[:, None] * SIZE + k[None, :]
    w_at = weight + n.to(tl.int64)[None, :] * SIZE + k[:, None]
    if GROUP % BLOCK_N == 0:
        s_at = scales + first // GROUP * K_BLOCKS
    else:
        s_at = scales + tl.minimum(n, COLUMNS - 1)[None, :] // GROUP * K_BLOCKS
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, SIZE, BLOCK * UNROLL, num_stages=STAGES):
        for part in tl.static_range(UNROLL):
            at = start + part * BLOCK
            k_mask = k < SIZE - at
            mask = n_mask & k_mask[:, None]
            tile = tl.load(x_at + at, mask=m_mask & k_mask[None, :], other=0.0)
            w = from_fp8(tl.load(w_at + at, mask=mask, other=0), x.dtype.element_ty)
            if IS_GATED:
                up = from_fp8(tl.load(w_at + COLUMNS * SIZE + at, mask=mask, other=0), x.dtype.element_ty)
            if K_BLOCKS > 1:
                scale_at = s_at + tl.minimum(at // BLOCK, K_BLOCKS - 1)
                total += tl.dot(tile, w, input_precision="ieee") * tl.load(scale_at)
                if IS_GATED:
                    scale = tl.load(scale_at + COLUMNS // GROUP * K_BLOCKS)
                    total_up += tl.dot(tile, up, input_precision="ieee") * scale
            else:
                total = tl.dot(tile, w, total, input_precision="ieee")
                if IS_GATED:
                    total_up = tl.dot(tile, up, total_up, input_precision="ieee")
    if K_BLOCKS == 1:
        total *= tl.load(s_at)
        if IS_GATED:
            total_up *= tl.load(s_at + COLUMNS // GROUP)
    return total, total_up


@triton.jit
def dequantise_kernel(
    weight: tl.tensor,  # [rows, SIZE] int8
    scales: tl.tensor,  # [rows / GROUP, K_BLOCKS] float32
    output: tl.tensor,  # [rows, SIZE], written
    SIZE: tl.constexpr,
    K_BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """BLOCK_K columns of a row of the weight. Grid: (rows, cdiv(SIZE, BLOCK_K))."""
    row = tl.program_id(0)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = k < SIZE
    at = row.to(tl.int64) * SIZE + k
    number = from_fp8(tl.load(weight + at, mask=mask, other=0), output.dtype.element_ty).to(tl.float32)
    scale = tl.load(scales + row // GROUP * K_BLOCKS + tl.minimum(k // BLOCK, K_BLOCKS - 1))
    wait_for_previous(OVERLAPS)
    tl.store(output + at, (number * scale).to(output.dtype.element_ty), mask=mask)


_DEQUANTISED_COLUMNS = 4096


def fp8_operands(layer: Linear) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weight's bits, [columns, size] int8, and its scales, as the kernels read them."""
    assert layer.weight is not None, "an FP8 weight is never packed"
    assert layer.scales is not None, "the weight is FP8"
    return layer.weight.view(torch.int8), layer.scales


def fp8_layout(layer: Linear) -> dict[str, int]:
    """Returns how a weight's scales lie, as the kernels are told; without any for a weight that is not FP8."""
    if layer.weight is None or layer.scales is None:
        return {"K_BLOCKS": 0, "GROUP": 1}
    groups, blocks = layer.scales.shape
    return {"K_BLOCKS": blocks, "GROUP": len(layer.weight) // groups}


def fp8_linear(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    """Computes `layer(x)` of many rows: [N, size] to [N, columns]. The layer's weight is FP8.

    Makes the weight in the rows' dtype, rounded, for a product of the library's: from about a hundred rows on that is
    faster than any kernel here, as each of its programs would turn the same numbers into others once more.
    """
    weight, scales = fp8_operands(layer)
    columns, size = weight.shape
    worth = x.new_empty(columns, size)
    dequantise_kernel[columns, -(-size // _DEQUANTISED_COLUMNS)](
        weight,
        scales,
        worth,
        SIZE=size,
        **fp8_layout(layer),
        BLOCK_K=min(_DEQUANTISED_COLUMNS, power_of_two(size)),
        **overlapping(x.device),
        num_warps=8,
    )
    return F.linear(x, worth, layer.bias)
