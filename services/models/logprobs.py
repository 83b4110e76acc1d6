"""How likely the model found the tokens that were chosen, and which it found likeliest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slipstream.services.models.ranking import keys_of, token_ids_of
from slipstream.services.worker.future_map import Logprobs

if TYPE_CHECKING:
    from torch import Tensor


@torch.inference_mode()
def logprobs_of(logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    """Of `tokens` ([B, W] int64) and of the `num_top` most likely ones, or all if there are fewer.

    `logits`: [B, W, V] float32, as the model gave them. Nothing is read back.
    """
    totals = logits.logsumexp(dim=2, keepdim=True)
    keys = keys_of(logits.amax(dim=2, keepdim=True) - logits)
    likeliest = keys.topk(min(num_top, logits.shape[2]), dim=2, largest=False, sorted=True)[0]
    top_tokens = token_ids_of(likeliest)
    return Logprobs(
        output=(logits.gather(2, tokens[:, :, None]) - totals)[:, :, 0],
        top_tokens=top_tokens.to(torch.int32),
        top=logits.gather(2, top_tokens) - totals,
    )
