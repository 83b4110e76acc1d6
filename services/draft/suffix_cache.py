"""The tokens of recent outputs, of all requests, in which prompt lookup searches beyond a sequence's own text.

A ring on the device has an entry for each token that verify chose: the tokens that stood before it in its sequence,
from the prompt, too, and the place of the entry after it. So outputs that grow at the same time share the ring token
by token, and neither a match nor what follows it runs from one output into another. Idea: SuffixDecoding (Oliaro et
al., 2024), which keeps suffix trees on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

NO_TOKEN = -1
"""Stands before the beginning of a sequence in an entry, and in those that are empty."""
NOTHING_TO_FIND = -2
"""Stands there in what is searched for: it equals nothing."""


class Guesses(NamedTuple):
    """Draft tokens for B sequences, and how good the match after each is."""

    tokens: torch.Tensor
    """[B, K] int64."""
    scores: torch.Tensor
    """[B]: 1 for a match of the fewest tokens that count, 2 for one more and so on; 0 without a match."""


class NewTokens(NamedTuple):
    """The tokens that the last step added to B sequences."""

    rows: torch.Tensor
    """[B] int64 slots, each once, but for padding."""
    ends: torch.Tensor
    """[B] int64: the position of each sequence's last token."""
    num_new: torch.Tensor
    """[B] int64: how many of `tokens` are new; the last of them is at `ends`."""
    tokens: torch.Tensor
    """[B, W] int64."""
    limits: torch.Tensor
    """[B] int64: tokens at positions from here on do not count. 0 for padding."""
    are_shared: torch.Tensor
    """[B] bool: the others neither give nor get anything."""


class SuffixCache:
    """The last `num_tokens` tokens of outputs. All methods are stream work. On a CPU: see `FusedSuffixCache`."""

    def __init__(self, num_tokens: int, num_slots: int, bounds: tuple[int, int], device: torch.device) -> None:
        """`num_tokens`: at least those of a step. `num_slots`: padding included. `bounds`: tokens of a match."""
        self._size = num_tokens
        self._shortest, self._longest = bounds
        self._device = device
        # One place more than there are entries takes what is not to be written.
        self._tokens = torch.zeros(num_tokens + 1, dtype=torch.int32, device=device)
        self._before = torch.full((self._longest, num_tokens + 1), NO_TOKEN, dtype=torch.int32, device=device)
        """[longest, places]: the token that stands 1, 2, ... before an entry's."""
        self._next = torch.full((num_tokens + 1,), -1, dtype=torch.int64, device=device)
        """The place of the entry after; -1 for none. It is younger, so that it is there as long as the entry is."""
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        """Entries that were ever written: number n is at place n % size."""
        self._last = torch.zeros(num_slots, dtype=torch.int64, device=device)
        """[slots]: the number of each slot's last entry."""
        self._expected = torch.full((num_slots,), -1, dtype=torch.int64, device=device)
        """[slots]: the position of the token that follows it; -1 where none does."""

    @staticmethod
    def num_bytes(num_tokens: int, longest: int) -> int:
        """The memory that so many tokens take, with matches of at most `longest`."""
        return num_tokens * (torch.int32.itemsize * (1 + longest) + torch.int64.itemsize)

    def interrupt(self, slots: torch.Tensor) -> None:
        """The next tokens of these slots do not follow those before: another sequence's, or after a gap."""
        self._expected.index_fill_(0, slots, -1)

    def record(self, new: NewTokens, history: torch.Tensor) -> None:
        """Takes in the tokens of a step. `history`: [B, T] int32, the tokens of each sequence up to its end."""
        size, width = self._size, new.tokens.shape[1]
        first = new.ends + 1 - new.num_new
        taken = torch.minimum(new.num_new, new.limits - first).clamp(min=0) * new.are_shared
        ends = taken.cumsum(0)
        numbers = self._count + ends - taken
        columns = torch.arange(width, device=self._device)
        is_taken = columns < taken[:, None]
        places = ((numbers[:, None] + columns) % size).masked_fill(~is_taken, size)
        flat = places.flatten()
        self._tokens.index_copy_(0, flat, new.tokens.flatten().to(torch.int32))
        self._before.index_copy_(1, flat, self._tokens_before(first, width, history))
        follows = ((places + 1) % size).masked_fill(columns + 1 >= taken[:, None], -1)
        self._next.index_copy_(0, flat, follows.flatten())

        total = self._count + ends[-1:]
        last, expected = self._last.index_select(0, new.rows), self._expected.index_select(0, new.rows)
        is_any = taken > 0
        goes_on = is_any & (expected == first) & (last >= total - size)
        self._next.index_copy_(0, (last % size).masked_fill(~goes_on, size), places[:, 0])
        self._last.index_copy_(0, new.rows, torch.where(is_any, numbers + taken - 1, last))
        self._expected.index_copy_(0, new.rows, torch.where(is_any, first + taken, expected))
        self._count.copy_(total)

    def improve(self, own: Guesses, new: NewTokens, history: torch.Tensor) -> torch.Tensor:
        """Guesses as `own`, [B, K] int64, or what follows a longer match in the ring, of equal ones the last written.

        If fewer than K tokens follow it, they are repeated.
        """
        best = search(self._before, self._suffixes(new.ends, history), self._count, self._shortest)
        is_longer = (best // self._size > own.scores) & new.are_shared
        first = (best % self._size + self._count) % self._size
        place, found = first, []
        for _ in range(own.tokens.shape[1]):
            found.append(self._tokens.index_select(0, place))
            place = self._next.index_select(0, place)
            place = torch.where(place < 0, first, place)
        return torch.where(is_longer[:, None], torch.stack(found, dim=1).to(torch.int64), own.tokens)

    def _suffixes(self, ends: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        positions = ends[:, None] - torch.arange(self._longest, device=self._device)
        tokens = history.gather(1, positions.clamp(min=0, max=history.shape[1] - 1))
        return tokens.masked_fill(positions < 0, NOTHING_TO_FIND)

    def _tokens_before(self, first: torch.Tensor, width: int, history: torch.Tensor) -> torch.Tensor:
        """The tokens before each of `width` from position `first` on: [longest, B * width] int32, the last first."""
        offsets = torch.arange(-1, -self._longest - 1, -1, device=self._device)[:, None]
        positions = first[:, None, None] + offsets + torch.arange(width, device=self._device)
        # [B, longest, width]
        places = positions.clamp(min=0, max=history.shape[1] - 1).flatten(1)
        tokens = history.gather(1, places).view(positions.shape).masked_fill(positions < 0, NO_TOKEN)
        return tokens.transpose(0, 1).flatten(1)


def search(before: torch.Tensor, suffixes: torch.Tensor, count: torch.Tensor, shortest: int) -> torch.Tensor:
    """Finds the best match of each of B suffixes in the ring of a `SuffixCache`.

    `before`: [longest, size + 1] int32, of which the last column does not count; `suffixes`: [B, longest] int32, the
    last token first; `count`: [1] int64, entries that were ever written. Returns [B] int64: the score of the match (see
    `Guesses`) times the size, plus its age, from 0, the oldest, to size - 1; 0 without a match.
    """
    size, num_written = before.shape[1] - 1, int(count)
    found = torch.zeros(len(suffixes), dtype=torch.int64)
    for row, suffix in enumerate(suffixes.tolist()):
        places: slice | torch.Tensor = slice(min(num_written, size))
        for back, token in enumerate(suffix):
            # On a CPU the host reads results without waiting: what does not match is not compared further.
            matches = (before[back][places] == token).nonzero()[:, 0]
            places = matches if isinstance(places, slice) else places[matches]
            if not len(places):
                break
            if back >= shortest - 1:
                found[row] = size * (back + 2 - shortest) + ((places - num_written) % size).max()
    return found
