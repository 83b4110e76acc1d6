"""Brings the contents of a command to the device: packed into pinned memory, fetched at once, without waiting.

A step puts each piece of its command (pages, limits, sampling, prompts) as a host tensor or integers, for which it gets
a device tensor, and flushes: one kernel on the worker's stream fetches it all. On the device there is one buffer, used
again in stream order; on the host a ring of buffers, each used again when its contents are fetched.

Chunks of prompts are staged one behind the other, for one forward.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from slipstream.common.wire.layout import PADDING_SLOT
from slipstream.services.models.attention import RaggedRows
from slipstream.services.worker.region import NO_REGION

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from slipstream.common.wire.step import PrefillChunk
    from slipstream.common.wire.worker import Attachment


_ALIGNMENT_BYTES = 16


class Staging(Protocol):
    """Belongs to the thread that enqueues. Call `begin`, then `put…` many times, then `flush` as stream work."""

    def begin(self, step: int, slots: Sequence[int], region_words: Sequence[int] = NO_REGION) -> None:
        """Begins a step: its number, its slots, and the `Region.words` of the draft that takes part."""

    def put(self, values: torch.Tensor) -> torch.Tensor:
        """Stages values (on the host, contiguous); returns their place in the step's work, good for that step only."""

    def put_integers(self, values: Sequence[int]) -> torch.Tensor:
        """As `put`, of integers as int64."""

    def flush(self) -> None:
        """Stream work: brings the staged values to the device."""


class HostStaging:
    """Implements `Staging` where the device is the host: values stay where they are."""

    def begin(self, step: int, slots: Sequence[int], region_words: Sequence[int] = NO_REGION) -> None:
        """Does nothing: there is nothing to pack."""

    def put(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def put_integers(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64)

    def flush(self) -> None:
        """Does nothing: the values are there."""


class PinnedStaging:
    """Implements `Staging` for a device with memory of its own.

    What `begin` is given is always at the same place, so that graphs can read it.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_bytes: int,
        depth: int,
        device: torch.device,
        fetch: Callable[[torch.Tensor, torch.Tensor], None],
        blocked: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`num_bytes`: of all values in a step; more takes copies of their own. `depth`: host buffers, and rows of
        the FutureMap's ring.

        `fetch` copies the second tensor, on the host, to the first, on the device, in words of 64 bits.
        `blocked` is entered for as long as the thread waits for the device.
        """
        self._fetch = fetch
        self._blocked = blocked
        fixed = _aligned((1 + len(NO_REGION) + num_slots) * 8)
        size = fixed + _aligned(num_bytes)
        self._host = [torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(depth)]
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        # Views made once, so that a step only writes.
        self._bytes = [buffer.numpy() for buffer in self._host]
        self._words = [buffer.view(torch.int64).numpy() for buffer in self._host]
        self._device_words = self._device.view(torch.int64)
        self._heads = [words[: fixed // 8] for words in self._words]
        self._fixed = [(self._device[:fixed], buffer[:fixed]) for buffer in self._host]
        self._copied = _events(device, depth)
        self._spilled: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._first_free = fixed
        self._used = fixed
        self._turn = 0
        first_slot = 1 + len(NO_REGION)
        self.ring_row = self._device_words[:1]
        """[1] int64 on the device: the step's row of the FutureMap's ring."""
        self.region_words = self._device_words[1:first_slot]
        """[words of `RegionWord`] int64 on the device."""
        self.slots = self._device_words[first_slot : first_slot + num_slots]
        """[num_slots] int64 on the device: the step's slots, then padding."""

    def begin(self, step: int, slots: Sequence[int], region_words: Sequence[int] = NO_REGION) -> None:
        """See `Staging.begin`. Blocks only if the device is a whole ring of steps behind."""
        self._turn = (self._turn + 1) % len(self._host)
        if self._copied and not self._copied[self._turn].query():  # type: ignore[no-untyped-call]
            with self._blocked():
                self._copied[self._turn].synchronize()
        head, values = self._heads[self._turn], (step % len(self._host), *region_words, *slots)
        head[: len(values)] = values
        head[len(values) :] = PADDING_SLOT
        self._used = self._first_free
        self._spilled.clear()

    def put(self, values: torch.Tensor) -> torch.Tensor:
        assert values.is_contiguous(), "a host tensor is packed as it lies in memory"
        end = self._used + values.nbytes
        if end > len(self._device):
            return self._spill(values)
        place = self._device[self._used : end].view(values.dtype).view(values.shape)
        self._bytes[self._turn][self._used : end] = values.view(-1).view(torch.uint8).numpy()
        self._used = _aligned(end)
        return place

    def put_integers(self, values: Sequence[int]) -> torch.Tensor:
        """See `Staging.put_integers`. Hardly uses PyTorch: between two steps the host's caches forget its code."""
        begin = self._used // 8
        end = begin + len(values)
        if end > len(self._device_words):
            return self._spill(torch.tensor(values, dtype=torch.int64))
        self._words[self._turn][begin:end] = values
        self._used = _aligned(8 * end)
        return self._device_words[begin:end]

    def flush(self) -> None:
        if self._used == self._first_free:
            self._fetch(*self._fixed[self._turn])
        else:
            self._fetch(self._device[: self._used], self._host[self._turn][: self._used])
        for source, target in self._spilled:
            target.copy_(source, non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()

    def _spill(self, values: torch.Tensor) -> torch.Tensor:
        source = values.pin_memory() if self._device.is_cuda else values
        target = torch.empty_like(values, device=self._device.device)
        self._spilled.append((source, target))
        return target


def _events(device: torch.device, count: int) -> list[torch.cuda.Event]:
    """An event for each host buffer, which tells when it is fetched; none where there are no streams."""
    return [torch.cuda.Event(blocking=True) for _ in range(count)] if device.type == "cuda" else []  # type: ignore[no-untyped-call]


def staged_bytes(attachment: Attachment) -> int:
    """Bytes that a step's command takes at most."""
    shape, page_bytes, row_bytes = attachment.shape, 16, 8192
    token_bytes = 3 * 8
    return attachment.num_pages * page_bytes + shape.num_slots * row_bytes + shape.chunk_tokens * token_bytes


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class FlatChunks:
    """B chunks, one behind the other: N tokens. All tensors are on the device."""

    slots: torch.Tensor
    """[B] int64."""
    tokens: torch.Tensor
    """[N] int64."""
    positions: torch.Tensor
    """[N] int64."""
    ragged: RaggedRows
    """The chunks as rows."""

    @classmethod
    def of(cls, chunks: Sequence[PrefillChunk], staging: Staging) -> FlatChunks:
        """Lays them out on the host."""
        lengths = tuple(len(chunk.tokens) for chunk in chunks)
        num_keys = tuple(chunk.start + len(chunk.tokens) for chunk in chunks)
        counts, starts = torch.tensor(lengths), torch.tensor([chunk.start for chunk in chunks])
        begins = torch.zeros(len(chunks) + 1, dtype=torch.int64)
        torch.cumsum(counts, 0, out=begins[1:])
        rows = torch.repeat_interleave(counts)
        positions = torch.arange(len(rows)) + (starts - begins[:-1])[rows]
        return cls(
            slots=staging.put_integers([chunk.slot for chunk in chunks]),
            tokens=staging.put_integers([token for chunk in chunks for token in chunk.tokens]),
            positions=staging.put(positions),
            ragged=RaggedRows(lengths, staging.put(rows), staging.put(begins), num_keys),
        )
