"""Which draft tokens stand: those that the target chose as well, up to the first that it did not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def accept(draft_tokens: Tensor, target_tokens: Tensor) -> Tensor:
    """Counts the leading draft tokens of each chain that equal the target's choice at their place.

    `draft_tokens`: [B, K] int64. `target_tokens`: [B, K + 1] int64, where [b, i] is what the target chose
    after the first i draft tokens. Returns [B] int64 in 0 .. K; `target_tokens[b, num_accepted[b]]` is the
    bonus token.
    """
    num_draft_tokens = draft_tokens.shape[1]
    matches = draft_tokens == target_tokens[:, :num_draft_tokens]
    return matches.to(torch.int64).cumprod(dim=1).sum(dim=1)
