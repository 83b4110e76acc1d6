"""A model whose next token is a checksum of all tokens before it, and its KV memory in pages.

So the whole output of a job is known at once, and one wrong token anywhere in a slot's pages changes every later one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from slipstream.common.wire.step import SlotUpdate

LEAST_TOKEN, NUM_TOKENS = 3, 60
"""The tokens that it says."""
_BYTES = [number.to_bytes(8, "little") for number in range(512)]


def extend(state: int, tokens: Iterable[int]) -> int:
    """The checksum behind more tokens. It begins with the seed."""
    return crc32(b"".join([_BYTES[token] for token in tokens]), state)


def token_of(state: int) -> int:
    """The token that follows."""
    return LEAST_TOKEN + (state >> 7) % NUM_TOKENS


def allows(state: int, token: int) -> bool:
    """Whether a grammar lets a token follow an output with this checksum, which begins with 0."""
    return token % 2 == (state >> 5) % 2


def chosen(state: int, is_allowed: Callable[[int], bool]) -> int:
    """The first token from the model's own on, in turn, that is allowed."""
    own = token_of(state)
    return next(
        token
        for step in range(NUM_TOKENS)
        if is_allowed(token := LEAST_TOKEN + (own - LEAST_TOKEN + step) % NUM_TOKENS)
    )


def is_constrained(seed: int) -> bool:
    """Whether a sequence of this seed has a grammar, where there is a grammar worker."""
    return seed % 2 == 0


def reference(
    prompt: Sequence[int], seed: int, most: int, stops: Iterable[int], *, has_grammar: bool = False
) -> list[int]:
    """The complete output of a sequence."""
    state, output = extend(seed & 0xFFFFFFFF, prompt), []
    while len(output) < most:
        so_far = extend(0, output)
        output.append(chosen(state, partial(allows, so_far)) if has_grammar else token_of(state))
        if output[-1] in stops:
            break
        state = extend(state, output[-1:])
    return output


@dataclass
class Slot:
    """A row of the batch, as the last update of it says."""

    pages: NDArray[np.int64]
    limit_tokens: int
    seed: int = 0
    max_draft_tokens: int | None = None


@dataclass
class PagedTokens:
    """The KV memory of a worker: it keeps the tokens themselves. Positions without a page go to page 0."""

    page_tokens: int
    memory: NDArray[np.int64]
    slots: dict[int, Slot] = field(default_factory=dict)

    @classmethod
    def of(cls, num_pages: int, page_tokens: int) -> PagedTokens:
        """Empty memory."""
        return cls(page_tokens, np.zeros(num_pages * page_tokens, np.int64))

    def update(self, update: SlotUpdate) -> None:
        """Takes over a change of a slot."""
        pages = np.array(update.pages, np.int64)
        if update.sampling is not None:
            assert update.first_page_index == 0, "a request that takes a slot brings its pages"
            self.slots[update.slot] = Slot(
                pages, update.limit_tokens, update.sampling.seed & 0xFFFFFFFF, update.max_draft_tokens
            )
            return
        held = self.slots[update.slot]
        num_missed = max(0, update.first_page_index - len(held.pages))
        is_drafted = 0 not in (held.max_draft_tokens, update.max_draft_tokens)
        assert not (num_missed and is_drafted), "a draft misses pages only where it has nothing to draft"
        assert update.limit_tokens == held.limit_tokens
        held.max_draft_tokens = update.max_draft_tokens
        missed = np.zeros(num_missed, np.int64)
        held.pages = np.concatenate((held.pages[: update.first_page_index], missed, pages))

    def write(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        """Writes tokens at positions from `start` on, up to the slot's limit."""
        places = self._places(slot, start, start + len(tokens))
        self.memory[places] = tokens[: len(places)]

    def state(self, slot: int, length: int) -> int:
        """The checksum of a slot's first `length` tokens."""
        held = self.slots[slot]
        return crc32(self.memory[self._places(slot, 0, length)].tobytes(), held.seed)

    def _places(self, slot: int, start: int, end: int) -> NDArray[np.int64]:
        held = self.slots[slot]
        positions = np.arange(start, min(end, held.limit_tokens, len(held.pages) * self.page_tokens))
        places: NDArray[np.int64] = held.pages[positions // self.page_tokens] * self.page_tokens
        return places + positions % self.page_tokens
