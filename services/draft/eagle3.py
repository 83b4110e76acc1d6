"""A draft that reads the target's hidden states: an EAGLE-3 head, which drafts a chain (Li et al., 2025).

The head's entry p pairs the target's state at position p with the token at p + 1, and its keys and values are those
of position p. A chunk [s, e) of a prompt has the states s .. e-1 and the tokens s .. e-1, so the entries s-1 .. e-2 are
made of it: the state at s-1 is kept here from the chunk before. The entry at the prompt's end pairs with the first
sampled token, which comes with the stash of the first decode step like every other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slipstream.services.paged_slots import PaddedChunks, PagedSlots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.common.future_map import Stash
    from slipstream.common.step import PromptChunk
    from slipstream.services.engine import EpochState
    from slipstream.services.models.eagle3 import Eagle3Head


class Eagle3Drafter:
    """Implements `Drafter`: a chain, each token sampled with the noise that verify will use at its place."""

    def __init__(self, head: Eagle3Head, device: torch.device, dtype: torch.dtype) -> None:
        self._head = head
        self._device = device
        self._dtype = dtype
        self._slots = PagedSlots(head.config.layer, device, dtype)
        self._last_states = torch.empty(0)
        """[slots, hidden_size]: the fused state of the last token of each slot's last chunk."""

    def open(self, state: EpochState) -> None:
        """See `Drafter.open`. Runs what a step runs, so that the first request finds it warm."""
        shape = state.attachment.shape
        self._slots.open(state)
        size = (shape.num_slots, self._head.config.layer.hidden_size)
        self._last_states = torch.zeros(size, dtype=self._dtype, device=self._device)
        padding = self.index((0,))
        for width in (1, shape.num_draft_tokens + 1, min(16, shape.chunk_tokens)):
            fused = torch.zeros((1, width, shape.hidden_width), dtype=self._dtype, device=self._device)
            positions = torch.arange(width, device=self._device)[None]
            states = self._forward(padding, torch.zeros_like(positions), positions, self._head.fuse(fused))
            self._sample(states, padding, positions + 2)

    def close(self) -> None:
        """See `Drafter.close`."""
        self._slots.close()
        self._last_states = torch.empty(0)

    def index(self, slots: Sequence[int]) -> torch.Tensor:
        """See `Drafter.index`."""
        return self._slots.index(slots)

    def limits(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Drafter.limits`."""
        return self._slots.limits(rows)

    def prefill(self, chunks: tuple[PromptChunk, ...], hidden: torch.Tensor | None) -> None:
        """See `Drafter.prefill`. Each token goes with the state before it; the first of a prompt has none."""
        assert hidden is not None, "the description asks for hidden states"
        padded = PaddedChunks.of(chunks, self._device)
        rows = self.index([chunk.slot for chunk in chunks])
        self._slots.remember_prompt(rows, padded)
        fused = self._head.fuse(hidden.to(self._dtype))
        states = fused.new_zeros((*padded.tokens.shape, fused.shape[1]))
        states[padded.is_valid] = fused
        before = torch.cat((self._last_states[rows][:, None], states[:, :-1]), dim=1)
        self._last_states[rows] = states.gather(1, _columns(padded.lengths - 1, states))[:, 0]
        positions = padded.positions - 1
        is_valid = padded.is_valid & (positions >= 0)
        self._forward(rows, padded.tokens, positions.clamp(min=0), before, is_valid)

    def propose(self, rows: torch.Tensor, stash: Stash, num_tokens: int) -> torch.Tensor:
        """See `Drafter.propose`. First the entries of the last step's new tokens, then one for each drafted token."""
        assert stash.hidden_states is not None, "the description asks for hidden states"
        self._slots.remember_output(rows, stash.last_tokens, stash.num_new)
        columns = torch.arange(stash.last_tokens.shape[1], device=self._device)
        last = (stash.num_new - 1)[:, None]
        positions = stash.seq_lens[:, None] - stash.num_new[:, None] + torch.minimum(columns, last)
        is_valid = (columns <= last) & (positions >= 0)
        fused = self._head.fuse(stash.hidden_states.to(self._dtype))
        states = self._forward(rows, stash.last_tokens, positions.clamp(min=0), fused, is_valid)
        state = states.gather(1, _columns(stash.num_new - 1, states))
        position = stash.seq_lens[:, None]
        proposed = [self._sample(state, rows, position + 1)]
        while len(proposed) < num_tokens:
            state = self._forward(rows, proposed[-1], position, state)
            position = position + 1
            proposed.append(self._sample(state, rows, position + 1, torch.cat(proposed, dim=1)))
        return torch.cat(proposed, dim=1)

    def _forward(
        self,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor,
        is_valid: torch.Tensor | None = None,
    ) -> torch.Tensor:
        batch = self._slots.batch(rows, tokens, positions, is_valid)
        return self._head(batch, states, self._slots.cache)  # type: ignore[no-any-return]

    def _sample(
        self, states: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, chain: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._slots.sample(self._head.logits(states), rows, positions, chain)


def _columns(columns: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """One column of each row, as an index for `gather`: [B] to [B, 1, size]."""
    return columns[:, None, None].expand(-1, 1, states.shape[2])
