"""What a step does around its forwards, each in one launch; shapes alone decide what is launched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slipstream.services.models.kernels.step_kernels import pair_kernel, settle_kernel, take_sampling_kernel
from slipstream.services.models.sampler import SamplingRows

if TYPE_CHECKING:
    from torch import Tensor


def take_sampling(table: SamplingRows, rows: Tensor, width: int) -> SamplingRows:
    """As `table.take(rows).repeat(width)`. `rows`: [B] int64."""
    taken = SamplingRows(
        temperature=table.temperature.new_empty(len(rows) * width),
        top_k=table.top_k.new_empty(len(rows) * width),
        top_p=table.top_p.new_empty(len(rows) * width),
        min_p=table.min_p.new_empty(len(rows) * width),
        seed=table.seed.new_empty(len(rows) * width),
    )
    take_sampling_kernel[(len(rows) * width,)](
        table.temperature,
        table.top_k,
        table.top_p,
        table.min_p,
        table.seed,
        rows,
        taken.temperature,
        taken.top_k,
        taken.top_p,
        taken.min_p,
        taken.seed,
        width,
        num_warps=1,
    )
    return taken


def settle(
    tokens: Tensor, given: Tensor, rows: Tensor, seq_lens: Tensor, most: Tensor, seeds: Tensor, threshold: int | None
) -> tuple[Tensor, Tensor]:
    """How many draft tokens of B slots stand, as `accept` has it, and the lengths that this makes: two [B] int64.

    `tokens`: [B, W] int64, the target's; `given`: [B, W] int64, the bonus token and the draft's. `rows`, `seq_lens`:
    [B] int64. `most`, `seeds`: [slots] int64. `threshold`: accept by chance instead, see `SimulatedAcceptance`.
    """
    num_rows, width = tokens.shape
    new_seq_lens, accepted = torch.empty((2, num_rows), dtype=torch.int64, device=tokens.device)
    settle_kernel[(num_rows,)](
        tokens,
        given,
        rows,
        seq_lens,
        most,
        seeds,
        new_seq_lens,
        accepted,
        threshold if threshold is not None else 0,
        WIDTH=width,
        BLOCK_W=power_of_two(width),
        IS_SIMULATED=threshold is not None,
        num_warps=1,
    )
    return new_seq_lens, accepted


def embed_and_norm(
    tokens: Tensor, embedding: Tensor, states: Tensor, embedding_norm: Tensor, state_norm: Tensor, eps: float
) -> Tensor:
    """The normed embeddings of N tokens beside N normed states: [N, 2 * size]. `states`: [N, size], contiguous."""
    num_tokens, size = states.shape
    both = states.new_empty(num_tokens, 2 * size)
    if num_tokens:
        block = power_of_two(size)
        pair_kernel[num_tokens, 2](
            tokens,
            embedding,
            states,
            embedding_norm,
            state_norm,
            both,
            len(embedding),
            eps,
            SIZE=size,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )
    return both


def power_of_two(number: int) -> int:
    """The least that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()
