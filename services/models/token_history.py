"""Which tokens each slot has already: what the penalties count."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokensSoFar:
    """Of B slots."""

    in_prompt: Tensor
    """[B, V] bool: whether the token is in the prompt."""
    num_in_output: Tensor
    """[B, V] int32: how often it is in the output."""


class TokenHistory:
    """A worker's own tables. Every call is stream work of fixed shapes, and reads nothing back."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        """Five bytes for each slot, row 0 (padding) included, and token id."""
        self._vocab_size = vocab_size
        self._in_prompt = torch.zeros((num_slots, vocab_size), dtype=torch.bool, device=device)
        self._num_in_output = torch.zeros((num_slots, vocab_size), dtype=torch.int32, device=device)

    def clear(self, rows: Tensor) -> None:
        """Other requests take these slots. `rows`: [B] int64."""
        self._in_prompt.index_fill_(0, rows, False)
        self._num_in_output.index_fill_(0, rows, 0)

    def add_prompt(self, rows: Tensor, tokens: Tensor, is_valid: Tensor) -> None:
        """Parts of prompts. `rows`: [B] int64; `tokens`: [B, W] int64; `is_valid`: [B, W] bool, False for padding."""
        places = torch.where(is_valid, rows[:, None] * self._vocab_size + tokens, 0)  # the padding row's first token
        self._in_prompt.view(-1).index_fill_(0, places.view(-1), True)

    def add_output(self, rows: Tensor, tokens: Tensor, num_tokens: Tensor) -> None:
        """The first `num_tokens` ([B] int64) of each row of `tokens` ([B, W] int64) are output. `rows`: [B] int64."""
        places = rows[:, None] * self._vocab_size + tokens
        counts = torch.arange(tokens.shape[1], device=tokens.device) < num_tokens[:, None]
        self._num_in_output.view(-1).scatter_add_(0, places.view(-1), counts.view(-1).to(torch.int32))

    def take(self, rows: Tensor) -> TokensSoFar:
        """A copy of some rows: [B] int64."""
        return TokensSoFar(self._in_prompt.index_select(0, rows), self._num_in_output.index_select(0, rows))
