"""Norms and the gate of the MLP, each in one kernel: float32 inside, rounded once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.services.models.kernels.block_kernels import rms_norm_kernel, swiglu_kernel
from slipstream.services.models.kernels.launching import overlapping

if TYPE_CHECKING:
    import torch

_SWIGLU_COLUMNS = 1024


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x`: [N, size], contiguous. Returns the same shape and dtype."""
    normed = x.new_empty(x.shape)
    if len(x):
        _launch_norm(x, None, weight, x, normed, eps)
    return normed


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x`, `delta`: [N, size], contiguous. Returns their sum, rounded to their dtype, and its norm."""
    summed, normed = x.new_empty(x.shape), x.new_empty(x.shape)
    if len(x):
        _launch_norm(x, delta, weight, summed, normed, eps)
    return summed, normed


def _launch_norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    summed: torch.Tensor,
    normed: torch.Tensor,
    eps: float,
) -> None:
    num_rows, size = x.shape
    assert x.is_contiguous(), "a kernel reads rows side by side"
    assert delta is None or delta.is_contiguous(), "a kernel reads rows side by side"
    block = max(16, 1 << (size - 1).bit_length())
    rms_norm_kernel[(num_rows,)](
        x,
        delta if delta is not None else x,
        weight,
        summed,
        normed,
        eps,
        SIZE=size,
        BLOCK=block,
        HAS_DELTA=delta is not None,
        **overlapping(x.device),
        num_warps=min(16, max(1, block // 512)),
    )


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: [N, 2 * size], contiguous, gates first, to [N, size]."""
    num_rows, twice = gate_up.shape
    assert gate_up.is_contiguous(), "a kernel reads rows side by side"
    output = gate_up.new_empty(num_rows, twice // 2)
    if num_rows:
        grid = (num_rows, -(-twice // 2 // _SWIGLU_COLUMNS))
        swiglu_kernel[grid](
            gate_up, output, SIZE=twice // 2, BLOCK=_SWIGLU_COLUMNS, num_warps=4, **overlapping(gate_up.device)
        )
    return output
