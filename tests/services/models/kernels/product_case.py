"""Random products of one device and dtype, with plain or quantised weights, and their exact values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.services.models.decoder import RMSNorm
from slipstream.services.models.kernels.products import add_product, product
from slipstream.services.models.linear import FP8, Linear, dequantised
from slipstream.services.models.packed import Quantised
from slipstream.services.models.packed_ints import PackedInts
from slipstream.services.models.quantization import BLOCK, PackedWeights

HAS_CUDA = torch.cuda.is_available()
FP8_ROUNDING = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Exact sums, rounded where the kernels round, differ by 0.0032 and 0.022 in 16 bits, behind a norm and a gate."""
BY_ROW = 1


EPS = 1e-5


def gated(halves: torch.Tensor) -> torch.Tensor:
    """The second half times SwiGLU's gate of the first."""
    gate, up = halves.chunk(2, dim=1)
    return F.silu(gate) * up


class Case:
    """Numbers of one device and dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype, rounding: Mapping[torch.dtype, float]) -> None:
        self._generator = torch.Generator().manual_seed(9)
        self._device, self._dtype, self._rounding = device, dtype, rounding[dtype]
        self._worth: dict[Linear, torch.Tensor] = {}

    def some(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Random numbers around zero."""
        return (scale * torch.randn(*shape, generator=self._generator)).to(self._device, self._dtype)

    def layer(
        self, size: int, columns: int, rows_per_scale: int | PackedWeights | None = None, *, has_bias: bool = False
    ) -> Linear:
        """Its outputs are of the size of its inputs.

        `rows_per_scale`: of FP8 weights; BY_ROW for scales that have no columns. None: the weight is of the dtype.
        """
        bias = nn.Parameter(self.some(columns), requires_grad=False) if has_bias else None
        if isinstance(rows_per_scale, PackedWeights):
            return self._of_ints(rows_per_scale, size, columns, bias)
        if rows_per_scale is None:
            weight = self.some(columns, size, scale=size**-0.5)
            layer = Linear(nn.Parameter(weight, requires_grad=False), bias)
            self._worth[layer] = weight.to(torch.float64)
            return layer
        weight = (100 * torch.randn(columns, size, generator=self._generator)).clamp(-448, 448).to(FP8)
        blocks = 1 if rows_per_scale == BY_ROW else -(-size // BLOCK)
        scales = (1 + torch.rand(columns // rows_per_scale, blocks, generator=self._generator)) * size**-0.5 / 100
        weight, scales = weight.to(self._device), scales.to(self._device)
        layer = Linear(nn.Parameter(weight, requires_grad=False), bias, nn.Parameter(scales, requires_grad=False))
        self._worth[layer] = dequantised(weight, scales).to(torch.float64)
        layer.pack_fp8(self._dtype)
        return layer

    def _of_ints(self, layout: PackedWeights, size: int, columns: int, bias: nn.Parameter | None) -> Linear:
        """Filled by two parts, with scales of three significant digits."""
        most, num_groups = 1 << layout.num_bits, layout.num_groups(size)
        values = torch.randint(0, most, (columns, size), generator=self._generator)
        zeros = torch.full((columns, num_groups), most // 2)
        if layout.has_zero_points:
            zeros = torch.randint(0, most, zeros.shape, generator=self._generator)
        scales = (1 + torch.rand(columns, num_groups, generator=self._generator)) * 2 * size**-0.5 / most
        groups = torch.arange(size) // (size // num_groups)
        if layout.has_order:
            groups = groups[torch.randperm(size, generator=self._generator)]
        scales = scales.half().float()
        ints = PackedInts(layout, columns, size, device=self._device, dtype=self._dtype)
        for start in (0, columns // 2):
            rows = slice(start, start + columns // 2)
            part = (values[rows], zeros[rows], scales[rows], groups)
            ints.fill(start, Quantised(*(tensor.to(self._device) for tensor in part)))
        layer = Linear(None, bias, ints=ints)
        layer.pack_fp8(self._dtype)
        self._worth[layer] = Quantised(values, zeros, scales.double(), groups).worth().to(self._device)
        return layer

    def exact(self, x: torch.Tensor, layer: Linear) -> torch.Tensor:
        """`layer(x)` in float64."""
        bias = layer.bias.to(torch.float64) if layer.bias is not None else None
        return F.linear(x.to(torch.float64), self._worth[layer], bias)

    def check_sum_norm_and_product(
        self, num_rows: int, size: int, columns: int, behind: int, group: int | PackedWeights | None, *, is_gated: bool
    ) -> None:
        """A product that is added, its norm, and a product of that with `behind` columns. `group`: see `layer`."""
        x, residual = self.some(num_rows, size), self.some(num_rows, columns)
        norm = RMSNorm(nn.Parameter(1 + self.some(columns, scale=0.2), requires_grad=False), EPS)
        first = self.layer(size, columns, group, has_bias=is_gated)
        second = self.layer(columns, 2 * behind if is_gated else behind, group, has_bias=is_gated)
        summed, scaled = add_product(residual, x, first, norm)
        self.close(summed, residual.to(torch.float64) + self.exact(x, first))
        normed = F.rms_norm(summed.to(torch.float64), (columns,), norm.weight.to(torch.float64), EPS)
        expected = self.exact(normed, second)
        self.close(product(scaled, second, is_gated=is_gated), gated(expected) if is_gated else expected)

    def close(self, values: torch.Tensor, expected: torch.Tensor) -> None:
        """Compares up to rounding."""
        assert values.dtype == self._dtype
        torch.testing.assert_close(values.to(torch.float64), expected, atol=self._rounding, rtol=self._rounding)
