"""`VerifyResult`: the lengths, tokens and hidden states of a verify step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from slipstream.services.models.sampler import Logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """Result of a verify step, for B slots."""

    seq_lens: torch.Tensor
    """[B] int64: tokens whose KV is committed now."""
    num_accepted: torch.Tensor
    """[B] int64: a, the draft tokens accepted."""
    tokens: torch.Tensor
    """[B, 1 to K+1] int64: the target's tokens; the first a + 1 are the output, the last of those the bonus token."""
    scores: torch.Tensor | None = None
    """[B, 1 to K+1]: the logits of `tokens`. Of a slot where one that counts is not finite, no token is published."""
    hidden_states: torch.Tensor | None = None
    """[B, 1 to K+1, width]: the states that these tokens were sampled from, if a draft reads them."""
    logprobs: Logprobs | None = None
    """Logprobs of `tokens`, if the step is asked for them."""
