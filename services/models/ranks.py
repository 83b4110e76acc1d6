"""The ranks of a target that lies on several devices: what each of them computes becomes one result on all.

Every rank has a part of each weight (`sharding.py`) and runs the same forward. Rank 0 leads: what it tells the others
goes over a channel of its own, and the numbers that they compute with are broadcast, so that only rank 0 knows slots,
drafts and requests.
"""

from __future__ import annotations

import time
from datetime import timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from slipstream.services.models.attention import ForwardBatch, JoinedBatch, RaggedRows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from slipstream.services.models.config import Rank

TIMEOUT = timedelta(seconds=60)
"""Longest time for a collective. A rank that is dead, or hangs, is found sooner."""
LOOPBACK = "127.0.0.1"
_FIELDS = ("tokens", "positions", "page_table", "limits", "is_valid", "starts", "outputs")
_RAGGED_FIELDS = ("rows", "begins")

Message = dict[str, Any]
"""A message between ranks, beside tensors: plain values, as JSON has them."""


class Channel(Protocol):
    """Rank 0's way to the others."""

    def tell(self, message: Message) -> None:
        """Has all of them call a method of `Follower`: `do` is its name, the rest are its arguments."""

    def answers(self) -> list[Message]:
        """Waits for an answer of each, by rank."""


class Ranks:
    """The collectives of one rank, on a CPU by gloo. Every rank calls the same ones in the same order."""

    def __init__(self, rank: Rank, store: Any, channel: Channel | None = None) -> None:
        """Returns once all ranks have met at the store. `channel`: rank 0's."""
        self.rank = rank
        self.captured: list[Message] = []
        """Messages of a graph that is captured, for `Follower.capture`; whoever captures it empties the list."""
        self.is_waiting = False
        """True while the thread is in a collective; on a GPU that is not known."""
        self.waited_s = 0.0
        """Seconds in collectives until now."""
        self._channel = channel
        self._group = self._meet(store)

    def _meet(self, store: Any) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # Else it listens at the address of the host's name, which others reach.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = TIMEOUT
        return dist.ProcessGroupGloo(store, self.rank.number, self.rank.size, options)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Adds up the parts of all ranks in the order of their numbers, so that each rank gets the same bits.

        Nor do they depend on a number's place in the tensor, as they would if each rank added up a piece of it.
        """
        return reduce(torch.add, self._all(part))

    def joined(self, part: torch.Tensor) -> torch.Tensor:
        """Puts the last dimensions of all parts side by side."""
        return torch.cat(self._all(part), dim=-1)

    def _all(self, part: torch.Tensor) -> list[torch.Tensor]:
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.rank.size)]
        self._wait(lambda: self._group.allgather([parts], [part]))
        return parts

    def _wait(self, collective: Callable[[], Any]) -> None:
        self.is_waiting, began_at = True, time.monotonic()
        try:
            collective().wait()
        finally:
            self.is_waiting = False
            self.waited_s += time.monotonic() - began_at

    def broadcast(self, values: torch.Tensor) -> None:
        """Replaces the values, which are contiguous, by those of rank 0."""
        if values.numel():
            self._wait(lambda: self._group.broadcast([values], dist.BroadcastOptions()))

    def tell(self, do: str, **arguments: Any) -> None:
        """Rank 0: has all others call a method; they do nothing by themselves."""
        if self._channel is not None:
            self._channel.tell({"do": do, **arguments})

    def ask(self, do: str, **arguments: Any) -> None:
        """As `tell`, of a method that answers. Raises torch.OutOfMemoryError where one has no memory for it."""
        if self._channel is not None:
            self.tell(do, **arguments)
            for error in filter(None, (answer["error"] for answer in self._channel.answers())):
                raise torch.OutOfMemoryError(error)

    def share_batch(self, batch: ForwardBatch | JoinedBatch, aux_layers: tuple[int, ...]) -> None:
        """Rank 0: has the others run the same forward."""
        if self._channel is not None:
            parts = batch.parts if isinstance(batch, JoinedBatch) else (batch,)
            joins = isinstance(batch, JoinedBatch)
            self.tell("forward", parts=[_shapes(part) for part in parts], joins=joins, aux_layers=aux_layers)
            tensors = (values for part in parts for values in _named(part).values())
            self.broadcast(torch.cat([values.flatten().to(torch.int64) for values in tensors]))

    def share_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rank 0: has the others compute the logits of hidden states; returns these, contiguous."""
        hidden = hidden.contiguous()
        if self._channel is not None:
            self.tell("logits", shape=list(hidden.shape))
            self.broadcast(hidden)
        return hidden

    def shared_batch(self, parts: Sequence[Message], device: torch.device, *, joins: bool) -> Any:
        """All others: the batch of a forward, a ForwardBatch or JoinedBatch. `parts`, `joins`: as they were told."""
        sizes = [torch.Size(shape).numel() for part in parts for shape in part["shapes"].values()]
        values = torch.empty(sum(sizes), dtype=torch.int64, device=device)
        self.broadcast(values)
        flat = iter(torch.split(values, sizes))
        batches = [_batch({name: next(flat).view(shape) for name, shape in p["shapes"].items()}, p) for p in parts]
        return JoinedBatch.of(*batches) if joins else batches[0]


def _named(batch: ForwardBatch) -> dict[str, torch.Tensor]:
    named = {name: getattr(batch, name) for name in _FIELDS}
    if batch.ragged is not None:
        named |= {name: getattr(batch.ragged, name) for name in _RAGGED_FIELDS}
    return {name: values for name, values in named.items() if values is not None}


def _shapes(batch: ForwardBatch) -> Message:
    """Describes a batch to the others, beside the values of its tensors."""
    ragged = batch.ragged
    return {
        "shapes": {name: list(values.shape) for name, values in _named(batch).items()},
        "max_kv_len": batch.max_kv_len,
        "lengths": None if ragged is None else ragged.lengths,
        "num_keys": None if ragged is None else ragged.num_keys,
    }


def _batch(tensors: dict[str, torch.Tensor], told: Message) -> ForwardBatch:
    ragged = None
    if "rows" in tensors:
        lengths, num_keys = (None if told[name] is None else tuple(told[name]) for name in ("lengths", "num_keys"))
        ragged = RaggedRows(lengths, tensors.pop("rows"), tensors.pop("begins"), num_keys)
    tensors["is_valid"] = tensors["is_valid"].to(torch.bool)
    return ForwardBatch(**tensors, max_kv_len=told["max_kv_len"], ragged=ragged)


def file_store(descriptor: int, num_ranks: int) -> Any:
    """The file by which ranks of one host meet, which each process has opened."""
    return dist.FileStore(f"/proc/self/fd/{descriptor}", num_ranks)  # type: ignore[attr-defined]
