"""Products with MXFP4 weights: their numbers, which bfloat16 holds exactly, are made in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.services.models.kernels.fp8 import CHUNK, chunks_at, offsets_of

STEP: tl.constexpr = tl.constexpr(64)
"""Columns that are multiplied at a time."""
_GROUPS: tl.constexpr = tl.constexpr(2)
"""Groups of 32 columns, which share an exponent, in a step."""

# A code's sign, exponent and last bit take their places in bfloat16; 2**127 makes up for the other bias of the
# exponent, also for the subnormal number, and doubles.
_FROM_FP4: tl.constexpr = tl.constexpr("""{
.reg .b32 sign, rest, factor;
mov.b32 factor, 0x7f007f00;
shl.b32 sign, $4, 12;
and.b32 sign, sign, 0x80008000;
shl.b32 rest, $4, 6;
lop3.b32 rest, rest, 0x01c001c0, sign, 0xea;
mul.bf16x2 $0, rest, factor;
shl.b32 sign, $4, 8;
and.b32 sign, sign, 0x80008000;
shl.b32 rest, $4, 2;
lop3.b32 rest, rest, 0x01c001c0, sign, 0xea;
mul.bf16x2 $1, rest, factor;
shl.b32 sign, $4, 4;
and.b32 sign, sign, 0x80008000;
shr.u32 rest, $4, 2;
lop3.b32 rest, rest, 0x01c001c0, sign, 0xea;
mul.bf16x2 $2, rest, factor;
and.b32 sign, $4, 0x80008000;
shr.u32 rest, $4, 6;
lop3.b32 rest, rest, 0x01c001c0, sign, 0xea;
mul.bf16x2 $3, rest, factor;
}""")


@triton.jit
def _from_code(code: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Twice the e2m1 numbers that uint8 below 16 give."""
    wide = code.to(tl.int16)
    half = (((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.float16, bitcast=True)
    return (half * 32768.0).to(DTYPE)


@triton.jit
def _scale(exponent: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """2 ** (exponent - 127), given as uint8; of 0, which the bits of no normal number say, too."""
    bits = tl.where(exponent > 0, exponent.to(tl.int32) << 23, 1 << 22)
    return bits.to(tl.float32, bitcast=True).to(DTYPE)


@triton.jit
def mxfp4_sums(
    x: tl.tensor,  # [.., SIZE]
    source: tl.tensor,  # [BLOCK_M] int64: rows of x
    is_row: tl.tensor,  # [BLOCK_M]: those that are read
    weight: tl.tensor,  # [ALL_ROWS / 64, SIZE * 32] uint8, see `in_lanes`
    scales: tl.tensor,  # [SIZE / 32, ALL_ROWS] uint8
    first: tl.tensor, SIZE: tl.constexpr, BEHIND: tl.constexpr, ALL_ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Multiplies ROWS of a weight, from `first` on, with rows of x: [ROWS, BLOCK_M]. See `fp8_sums` for BEHIND."""
    dtype: tl.constexpr = x.dtype.element_ty
    size: tl.constexpr = CHUNK * STEP // 2
    x_at = x + source[:, None] * SIZE + tl.arange(0, STEP)[None, :]
    w_at = chunks_at(weight, first, SIZE // 2, BEHIND, ROWS)[None, :, None] + tl.arange(0, size)[None, None, :]
    row = first + offsets_of(tl.arange(0, ROWS), BEHIND, ROWS)
    s_at = scales + tl.arange(0, _GROUPS)[None, :] * ALL_ROWS + row[:, None]
    exponent = tl.load(s_at)
    total = tl.zeros((ROWS, BLOCK_M), tl.float32)
    for number in tl.range(0, SIZE // STEP, num_stages=STAGES):
        tile = tl.trans(tl.load(x_at + number * STEP, mask=is_row[:, None], other=0.0))
        following = tl.load(s_at + tl.minimum(number + 1, SIZE // STEP - 1) * (_GROUPS * ALL_ROWS))
        bits = tl.load(w_at + number * size)
        if dtype.is_bf16():
            one, other = tl.inline_asm_elementwise(
                _FROM_FP4, "=&r,=&r,=&r,=&r,r", [bits], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            one, other = _from_code(bits & 15, dtype), _from_code(bits >> 4, dtype)
        lanes = tl.reshape(tl.join(one, other), (1, ROWS // 16, 8, 4, STEP // 16, 2, 2, 2))
        numbers = tl.reshape(tl.permute(lanes, (1, 5, 2, 0, 4, 7, 3, 6)), (ROWS, _GROUPS, STEP // _GROUPS))
        numbers = tl.reshape(numbers * _scale(exponent, dtype)[:, :, None], (ROWS, STEP))
        # Of twice the numbers, halved here: so the compiler waits for the product, see `fp8_sums`.
        total += tl.dot(numbers, tile, input_precision="ieee") * 0.5
        exponent = following
    return total
