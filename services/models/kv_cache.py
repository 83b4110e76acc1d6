"""Keys and values of all requests, in pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from slipstream.services.models.config import ModelConfig

PADDING_PAGE = 0
"""Takes the writes that nobody may read."""


class PagedKV:
    """One pool of pages for each layer; the same page numbers are used in all of them.

    Key and value of a token lie side by side, so that a layer writes and gathers them in one operation.
    """

    def __init__(
        self, config: ModelConfig, *, num_pages: int, page_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """`num_pages` counts the padding page, `page_size` is in tokens. Pages start as zeros."""
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_bytes = num_pages * page_size * config.kv_bytes_per_token(dtype)
        shape = (config.num_layers, num_pages * page_size, 2 * config.kv_size)
        by_layer = torch.zeros(shape, device=device, dtype=dtype).unbind(0)
        self.rows = by_layer
        """Per layer [num_pages * page_size, 2 * kv_size]: keys of all heads, then values; one row a token."""
        paged = [layer.view(num_pages, page_size, 2, config.num_kv_heads, config.head_dim) for layer in by_layer]
        self.keys = tuple(layer[:, :, 0] for layer in paged)
        """Per layer [num_pages, page_size, kv_heads, head_dim], a view."""
        self.values = tuple(layer[:, :, 1] for layer in paged)
        """Per layer [num_pages, page_size, kv_heads, head_dim], a view."""
