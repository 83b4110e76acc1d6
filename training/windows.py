"""Windows of tokens in random order, an epoch after the other, for training."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipstream.common.errors import ConfigError


def load_tokens(path: Path, device: torch.device) -> Tensor:
    """Read a file of token ids as an int32 tensor of the same shape. Raises ``ConfigError`` for another file."""
    try:
        return torch.from_numpy(np.load(path).astype(np.int32)).to(device)
    except (ValueError, EOFError) as error:  # of NumPy
        raise ConfigError(
            "corpus", f"{path}: {error}", "token ids, as the tokenizer and sample commands write them"
        ) from None


class Windows:
    """Cuts a stream of tokens [n] into windows; each epoch begins at another offset."""

    def __init__(self, stream: Tensor, *, length: int, batch: int, seed: int) -> None:
        self.stream = stream
        self.length = length
        self.batch = batch
        self._random = torch.Generator().manual_seed(seed)

    @property
    def batches_per_epoch(self) -> int:
        """Full batches in one pass over the stream; the remainder is skipped until another epoch."""
        return (len(self.stream) - 2 * self.length) // self.length // self.batch

    def check(self, option: str) -> None:
        """Raise ``ConfigError`` that names the text's option if it is too short: ``batches`` would never yield one."""
        if self.batches_per_epoch < 1:
            least = (self.batch + 2) * self.length
            raise ConfigError(option, f"{len(self.stream)} tokens", f"at least {least}, for one batch")

    def batches(self) -> Iterator[Tensor]:
        """Yield int64 [batch, length + 1] for ever: a window and the token after it."""
        device = self.stream.device
        reach = torch.arange(self.length + 1, device=device)
        count = self.batches_per_epoch * self.batch
        while True:
            offset = int(torch.randint(self.length, (1,), generator=self._random))
            order = torch.randperm(count, generator=self._random).to(device) * self.length + offset
            for start in range(0, count, self.batch):
                rows = order[start : start + self.batch, None] + reach
                yield self.stream[rows].long()


class Rows:
    """Draws rows [n, length] of already cut text, for ever, in a new order each time around."""

    def __init__(self, rows: Tensor, *, batch: int, seed: int) -> None:
        self.rows = rows
        self.batch = batch
        self._random = torch.Generator().manual_seed(seed)

    def batches(self) -> Iterator[Tensor]:
        """Yield int64 [batch, length]."""
        while True:
            order = torch.randperm(len(self.rows), generator=self._random).to(self.rows.device)
            for start in range(0, len(order) - self.batch + 1, self.batch):
                yield self.rows[order[start : start + self.batch]].long()
