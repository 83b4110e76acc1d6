"""What a draft service needs of a way to guess tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from slipstream.services.worker.engine import EpochState
    from slipstream.services.worker.future_map import NextStepState
    from slipstream.services.worker.padded_chunks import PaddedChunks
    from slipstream.services.worker.slots import SamplingMode


class Drafter(Protocol):
    """A way to guess tokens. All but `open` and `close` is stream work."""

    def open(self, state: EpochState) -> None:
        """Allocates what an epoch needs and warms up."""
        ...

    def close(self) -> None:
        """Frees it."""
        ...

    def prefill(self, chunks: PaddedChunks, hidden: torch.Tensor | None) -> None:
        """Takes in parts of prompts; `hidden` has the target's states of their tokens, if the draft reads them.

        [tokens, width], chunk after chunk.
        """
        ...

    def propose(self, rows: torch.Tensor, stash: NextStepState, num_tokens: int, needs: SamplingMode) -> torch.Tensor:
        """Guesses the `num_tokens` tokens behind each slot's bonus token: [B, num_tokens] int64.

        `rows`: [B] int64 slots; `needs`: what it takes to choose for them as verify does. Called once for each stash
        of a slot that drafts. What it launches depends on shapes and `needs` alone.
        """
        ...
