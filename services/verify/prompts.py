"""The prompts of a step, as verify takes them in: which run side by side, and where they end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from slipstream.services.worker.padded_chunks import PaddedChunks, alike

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.common.worker.step import PrefillChunk
    from slipstream.services.worker.staging import Staging


@dataclass(frozen=True, slots=True)
class PromptEnds:
    """Where, in a forward over B chunks, the E prompts end that do: what their first tokens are sampled from."""

    rows: torch.Tensor
    """[E] int64: their slots."""
    chunks: torch.Tensor
    """[E] int64: numbers of chunks."""
    columns: torch.Tensor
    """[E] int64: of the last tokens."""
    lengths: torch.Tensor
    """[E] int64: of the prompts."""
    slots: tuple[int, ...]
    """As `rows`, on the host."""

    @classmethod
    def of(cls, chunks: Sequence[PrefillChunk], staging: Staging) -> PromptEnds | None:
        """None if no prompt ends."""
        ends = [number for number, chunk in enumerate(chunks) if chunk.is_last]
        if not ends:
            return None

        def put(values: list[int]) -> torch.Tensor:
            return staging.put(torch.tensor(values, dtype=torch.int64))

        slots = tuple(chunks[number].slot for number in ends)
        return cls(
            rows=put(list(slots)),
            chunks=put(ends),
            columns=put([len(chunks[number].tokens) - 1 for number in ends]),
            lengths=put([chunks[number].start + len(chunks[number].tokens) for number in ends]),
            slots=slots,
        )


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """Chunks of prompts that go through the model side by side."""

    chunks: PaddedChunks
    ends: PromptEnds | None

    @classmethod
    def of(
        cls, chunks: Sequence[PrefillChunk], staging: Staging, *, width: int | None = None, is_one: bool = False
    ) -> list[PromptGroup]:
        """Those together that are alike; all of them with `is_one`; with `width`, each alone and padded to that."""
        together = [list(chunks)] if is_one else alike(chunks)
        groups = together if width is None else [[chunk] for chunk in chunks]
        return [cls(PaddedChunks.of(group, staging, width=width), PromptEnds.of(group, staging)) for group in groups]
