"""Numbers of tokens of forwards over prompts on a GPU.

Libraries choose the kernel of a product by its exact number of rows, and load each at its first use, while all steps
wait. So forwards have few sizes, all of which are rehearsed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.common.wire.layout import PADDING_SLOT
from slipstream.common.wire.step import PrefillChunk

if TYPE_CHECKING:
    from collections.abc import Sequence

_SIZES: tuple[int, ...] = (16, 32, *range(64, 512, 64), *range(512, 2049, 128))
_FURTHER_BITS = 5
"""Sixteen larger ones lie between a power of two and the next, so that rehearsing large steps does not take minutes."""
MOST_PADDING, PADDING_SHARE = 128, 16
"""A forward has less padding than MOST_PADDING tokens, or than one in PADDING_SHARE."""


def forward_size(num_tokens: int) -> int:
    """Returns the size of a forward over so many tokens."""
    if num_tokens <= _SIZES[-1]:
        return next(size for size in _SIZES if size >= num_tokens)
    granule = 1 << ((num_tokens - 1).bit_length() - _FURTHER_BITS)
    return -(-num_tokens // granule) * granule


def sizes_up_to(most: int) -> list[int]:
    """Returns all sizes that forwards over up to `most` tokens have, `most` included, the largest first."""
    sizes, size = [most], forward_size(1)
    while size < most:
        sizes.append(size)
        size = forward_size(size + 1)
    return sorted(sizes, reverse=True)


def with_padding(chunks: Sequence[PrefillChunk], most: int, *, beside: int = 0) -> tuple[PrefillChunk, ...]:
    """Adds a chunk in the padding slot that gives a forward over the chunks its size.

    `most`: tokens of the largest step of prompts alone, which is a size, too; `beside`: the forward's other tokens.
    """
    num_tokens = beside + sum(len(chunk.tokens) for chunk in chunks)
    size = forward_size(num_tokens)
    return padded_to((min(size, most) if num_tokens <= most else size) - beside, chunks)


def padded_to(size: int, chunks: Sequence[PrefillChunk]) -> tuple[PrefillChunk, ...]:
    """Adds a chunk in the padding slot that makes them `size` tokens together, if they are fewer."""
    missing = size - sum(len(chunk.tokens) for chunk in chunks)
    if missing <= 0:
        return tuple(chunks)
    return (*chunks, PrefillChunk(slot=PADDING_SLOT, start=0, tokens=(0,) * missing, is_last=False))
