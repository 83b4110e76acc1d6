"""Keys and values in pages, in the dtype that is computed in, or as FP8 numbers.

FP8 numbers are e4m3, with one scale for each token and key head, of its keys and of its values: the power of two that
brings the greatest of them to between 224 and 448. It depends on the token's own numbers only, so that a page has the
same content whatever was computed beside its tokens, and whether they were drafted. The numbers that are read are exact
in bfloat16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from slipstream.services.models.config import ModelConfig

PADDING_PAGE = 0
"""Takes the writes that must not be read."""

_MANTISSA_BITS = 23
"""Of float32, as are the next two."""
_ROUND_UP = 2**21 - 1
"""Added to the bits of a number, raises its exponent if the mantissa is more than 1.75, that of e4m3's greatest."""
_EXPONENT_OF_MOST = 8
"""Exponent of e4m3's greatest number."""
_INVERSE = 254
"""The sum of the biased exponents of a power of two and its inverse."""


class PagedKV:
    """One pool of pages for each layer; the same page numbers are used in all of them.

    Key and value of a token lie side by side, so that a layer writes and gathers them in one operation.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_pages: int,
        page_size: int,
        device: torch.device,
        dtype: torch.dtype,
        is_fp8: bool = False,
    ) -> None:
        """`num_pages` counts the padding page, `page_size` is in tokens. Pages start as zeros.

        `dtype`: of what is kept and read. `is_fp8`: pages hold FP8 numbers.
        """
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self._vectors = 2 * config.num_kv_heads, config.head_dim
        num_rows = config.num_layers, num_pages * page_size
        kept_as = torch.uint8 if is_fp8 else dtype
        self.rows = torch.zeros((*num_rows, 2 * config.kv_size), device=device, dtype=kept_as).unbind(0)
        """Per layer [num_pages * page_size, 2 * kv_size]: keys of all heads, then values; one row a token."""
        scales = torch.zeros((*num_rows, self._vectors[0]), device=device, dtype=torch.uint8) if is_fp8 else None
        self.scales = None if scales is None else scales.unbind(0)
        """Per layer [num_pages * page_size, 2 * num_kv_heads], None without FP8: biased exponents of FP8's scales."""

    def keep(self, layer: int, places: torch.Tensor, values: torch.Tensor) -> None:
        """Keeps keys and values, [N, 2 * kv_size], in the rows `places`, [N] int64."""
        if self.scales is not None:
            values, scales = self._to_fp8(values)
            self.scales[layer].index_copy_(0, places, scales)
        self.rows[layer].index_copy_(0, places, values)

    def gather(self, layer: int, places: torch.Tensor, output: torch.Tensor) -> None:
        """Reads the rows `places`, [N] int64, into `output`: [N, 2 * kv_size] of `dtype`."""
        if self.scales is None:
            torch.index_select(self.rows[layer], 0, places, out=output)
            return
        output.copy_(self.rows[layer].index_select(0, places).view(torch.float8_e4m3fn))
        scales = _power_of_two(self.scales[layer].index_select(0, places).to(torch.int32))
        output.view(-1, *self._vectors).mul_(scales[..., None])

    def _to_fp8(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the bits of the numbers, uint8, and the biased exponents of their scales."""
        vectors = values.to(torch.float32).view(-1, *self._vectors)
        most = vectors.abs().amax(dim=-1).view(torch.int32)
        # Of numbers that are not finite the exponent means nothing.
        exponents = ((most + _ROUND_UP >> _MANTISSA_BITS) - _EXPONENT_OF_MOST).clamp_(1, _INVERSE - 1)
        scaled = vectors * _power_of_two(_INVERSE - exponents)[..., None]
        scaled = torch.where(vectors.isfinite(), scaled, torch.nan)  # e4m3 has no infinite number
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8).view(values.shape), exponents.to(torch.uint8)


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """The powers of two with some biased exponents: int32 to float32."""
    return (exponents << _MANTISSA_BITS).view(torch.float32)
