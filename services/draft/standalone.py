"""A draft that is a language model of its own, with the target's tokenizer (Leviathan et al., 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slipstream.services.worker.slots import SamplingMode

if TYPE_CHECKING:
    from slipstream.services.worker.epoch import EpochState
    from slipstream.services.worker.future_map import NextStepState
    from slipstream.services.worker.language_model import LanguageModel
    from slipstream.services.worker.staging import PaddedChunks


class StandaloneDrafter:
    """Implements `Drafter`: a chain, each token sampled with the noise that verify will use at its place."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    def open(self, state: EpochState) -> None:
        """See `Drafter.open`."""
        self._model.open(state)

    def close(self) -> None:
        """See `Drafter.close`."""
        self._model.close()

    def prefill(self, chunks: PaddedChunks, hidden: torch.Tensor | None) -> None:
        """See `Drafter.prefill`. A language model reads no hidden states."""
        self._model.prefill(self._model.slots.take(chunks.rows), chunks)

    def propose(self, rows: torch.Tensor, stash: NextStepState, num_tokens: int, mode: SamplingMode) -> torch.Tensor:
        """See `Drafter.propose`.

        The first forward also takes the token before the bonus: when all of the last draft was accepted,
        its last token was never an input here, and has no KV yet. For the others it writes what is there.
        """
        slots = self._model.slots.take(rows)
        self._model.slots.record_output(rows, stash.last_tokens, stash.num_new)
        before = stash.last_tokens.gather(1, (stash.num_new - 2).clamp(min=0)[:, None])
        tokens = torch.cat((before, stash.bonus_tokens[:, None]), dim=1)
        positions = stash.seq_lens[:, None] + torch.arange(-1, 1, device=tokens.device)
        is_valid = torch.stack((stash.num_new > 1, torch.ones_like(stash.num_new, dtype=torch.bool)), dim=1)
        output = self._model.forward(slots, tokens, positions.clamp(min=0), is_valid=is_valid)
        # [num_tokens, B, 1]: where the tokens come to be.
        ahead = (stash.seq_lens + torch.arange(1, num_tokens + 1, device=tokens.device)[:, None])[:, :, None]
        proposed = [self._model.sample(slots, output.hidden[:, -1:], ahead[0], mode)]
        while len(proposed) < num_tokens:
            number = len(proposed)
            output = self._model.forward(slots, proposed[-1], ahead[number - 1])
            chain = torch.cat(proposed, dim=1) if mode is SamplingMode.ADJUSTMENTS else None
            proposed.append(self._model.sample(slots, output.hidden, ahead[number], mode, chain))
        return torch.cat(proposed, dim=1)
