"""Tokens in the order most likely first, and of equals the lowest id first, exactly and for any sort."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_ID_BITS = 32


def keys_of(deficits: Tensor) -> Tensor:
    """Numbers that sort as the tokens do, no two of a row equal: [..., V] int64.

    `deficits`: [..., V] float32, how far each logit is below its row's greatest.
    """
    # The bits of a float that is at least +0 sort as it does. `abs` is for the -0 that is the difference of -0 and 0.
    keys = deficits.abs().view(torch.int32).to(torch.int64) << _ID_BITS
    keys |= torch.arange(deficits.shape[-1], device=deficits.device)
    return keys


def token_ids_of(keys: Tensor) -> Tensor:
    """The tokens of keys: int64, of the same shape."""
    return keys & ((1 << _ID_BITS) - 1)


def deficits_of(keys: Tensor) -> Tensor:
    """The deficits that keys were made of: float32, of the same shape."""
    return (keys >> _ID_BITS).to(torch.int32).view(torch.float32)
