"""Numbers of tokens of forwards over prompts on a GPU.

Libraries choose the kernel of a product by its exact number of rows, and load each at its first use, for 10 to 60 ms in
which steps wait. So forwards have few sizes, all of which are rehearsed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.common.worker.layout import PADDING_SLOT
from slipstream.common.worker.step import PrefillChunk

if TYPE_CHECKING:
    from collections.abc import Sequence

_SIZES = (16, 32, *range(64, 512, 64), *range(512, 2048, 128))
_FURTHER = 128
"""Larger sizes are multiples of it; so are the tiles of large products, which compute them whole."""


def forward_size(num_tokens: int) -> int:
    """Returns the size of a forward over so many tokens."""
    return next((size for size in _SIZES if size >= num_tokens), -(-num_tokens // _FURTHER) * _FURTHER)


def sizes_up_to(most: int) -> list[int]:
    """Returns all sizes that forwards over up to `most` tokens have, the largest first."""
    sizes = {*_SIZES, *range(_SIZES[-1], most, _FURTHER), most}
    return sorted((size for size in sizes if size <= most), reverse=True)


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
