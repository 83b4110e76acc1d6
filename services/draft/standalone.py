"""A draft that is a language model of its own, with the target's tokenizer (Leviathan et al., 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.common.future_map import Stash
    from slipstream.common.step import PromptChunk
    from slipstream.services.engine import EpochState
    from slipstream.services.language_model import LanguageModel


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

    def index(self, slots: Sequence[int]) -> torch.Tensor:
        """See `Drafter.index`."""
        return self._model.index(slots)

    def limits(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Drafter.limits`."""
        return self._model.limits(rows)

    def prefill(self, chunks: tuple[PromptChunk, ...], hidden: torch.Tensor | None) -> None:
        """See `Drafter.prefill`. A language model reads no one's states."""
        self._model.prefill(chunks)

    def propose(self, rows: torch.Tensor, stash: Stash, num_tokens: int) -> torch.Tensor:
        """See `Drafter.propose`.

        The first forward also takes the token before the bonus: when all of the last draft was accepted,
        its last token was never an input here, and has no KV yet. For the others it writes what is there.
        """
        self._model.remember_output(rows, stash.last_tokens, stash.num_new)
        before = stash.last_tokens.gather(1, (stash.num_new - 2).clamp(min=0)[:, None])
        tokens = torch.cat((before, stash.bonus_tokens[:, None]), dim=1)
        positions = stash.seq_lens[:, None] + torch.tensor([-1, 0], device=tokens.device)
        is_valid = torch.stack((stash.num_new > 1, torch.ones_like(stash.num_new, dtype=torch.bool)), dim=1)
        output = self._model.forward(rows, tokens, positions.clamp(min=0), is_valid=is_valid)
        position = stash.seq_lens[:, None] + 1
        proposed = [self._model.sample(output.hidden[:, -1:], rows, position)]
        while len(proposed) < num_tokens:
            output = self._model.forward(rows, proposed[-1], position)
            position = position + 1
            proposed.append(self._model.sample(output.hidden, rows, position, torch.cat(proposed, dim=1)))
        return torch.cat(proposed, dim=1)
