"""The ranks of a target after the first: each does what rank 0 tells it, with its part of the weights and pages."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from slipstream.common.wire.events import EventLog, Site
from slipstream.services.models.paged_kv import PagedKV
from slipstream.services.worker.graphs import CudaCapture
from slipstream.services.worker.memory import first_line, give_back_unused, is_out_of_memory

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from slipstream.services.models.decoder import Decoder
    from slipstream.services.models.ranks import Message, Ranks

SIGN_INTERVAL_S = 0.5
"""Time between two signs of life."""
_RECORDED = ("forward", "logits")
"""The work that is recorded for traces."""


class Follower:
    """A rank's part of the work on a target. Rank 0 calls its methods by their names, see `Ranks.tell`.

    Those that return a text or a message answer: the text is the error, if there is one.
    """

    def __init__(self, decoder: Decoder, ranks: Ranks, device: torch.device, *, keeps_fp8: bool = False) -> None:
        """`keeps_fp8`: keys and values are kept as FP8 numbers."""
        self._decoder = decoder
        self._ranks = ranks
        self._device = device
        self._keeps_fp8 = keeps_fp8
        self._cache: PagedKV | None = None
        self._capture: CudaCapture | None = None
        self._graphs: dict[int, Callable[[], None]] = {}
        self._log = EventLog()
        self._step = 0
        """The number of the step that work belongs to; 0 where none is told, as on a GPU."""

    def do(self, message: Message) -> str | Message | None:
        """Calls what a message names."""
        arguments = {name: value for name, value in message.items() if name != "do"}
        work = partial(getattr(self, message["do"]), **arguments)
        if self._step and message["do"] in _RECORDED:
            work = partial(self._record, work)
        answer: str | Message | None = work()
        return answer

    def _record(self, work: Callable[[], None]) -> None:
        begin_ns, waited_s = time.monotonic_ns(), self._ranks.waited_s
        work()
        end_ns, in_collectives_ns = time.monotonic_ns(), round(1e9 * (self._ranks.waited_s - waited_s))
        self._log.add(Site.STREAM, self._step, begin_ns, end_ns)
        self._log.add(Site.COLLECTIVES, self._step, begin_ns, min(begin_ns + in_collectives_ns, end_ns))

    def begin_step(self, step: int) -> None:
        """Names the step that the work after it belongs to."""
        self._step = step

    def report(self, number: int, from_step: int) -> Message:
        """Answers with its records of steps from this one on, and with the question's number."""
        return {"number": number, "records": self._log.since(from_step)}

    def open(self, num_pages: int, page_tokens: int) -> str:
        """Allocates the KV pages of an epoch."""
        self._cache, self._step = None, 0
        self._log.begin_epoch(0)

        def allocate() -> None:
            self._cache = PagedKV(
                self._decoder.config,
                num_pages=num_pages,
                page_size=page_tokens,
                device=self._device,
                dtype=self._decoder.embedding.dtype,
                is_fp8=self._keeps_fp8,
            )

        return _want_of_memory(allocate)

    def close(self) -> str:
        """Frees them, and the graphs."""
        self._graphs.clear()
        self._cache = self._capture = None
        give_back_unused(self._device)
        return ""

    def forward(self, parts: list[Message], joins: bool, aux_layers: list[int]) -> None:
        """Runs a forward, see `Ranks.share_batch`."""
        assert self._cache is not None, "a forward belongs into an epoch"
        batch = self._ranks.shared_batch(parts, self._device, joins=joins)
        self._decoder.forward(batch, self._cache, aux_layers=tuple(aux_layers))

    def logits(self, shape: list[int]) -> None:
        """Computes its part of logits, see `Ranks.share_hidden`."""
        hidden = torch.empty(shape, dtype=self._decoder.embedding.dtype, device=self._device)
        self._ranks.broadcast(hidden)
        self._decoder.logits(hidden)

    def capture(self, number: int, messages: list[Message]) -> str:
        """Makes a graph, of what it has done by the same messages before."""
        self._capture = self._capture or CudaCapture()

        def work() -> None:
            for message in messages:
                self.do(message)

        capture = self._capture

        def record() -> None:
            self._graphs[number] = capture.record(work)

        return _want_of_memory(record)

    def replay(self, number: int) -> None:
        """Does what the graph of this number is of."""
        self._graphs[number]()

    def enable_batch_invariance(self) -> None:
        """See `Decoder.enable_batch_invariance`."""
        self._decoder.enable_batch_invariance()


def _want_of_memory(work: Callable[[], None]) -> str:
    """Does work; returns the error where there is no memory for it."""
    try:
        work()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return first_line(error)
    return ""


class Line:
    """A follower's end of the channel: lines of JSON in both directions, those without an error as signs of life."""

    def __init__(self, connection: socket.socket, free_bytes: Callable[[], int] = lambda: 0) -> None:
        """`free_bytes`: of the device's memory; 0 where it is the host's."""
        self._connection = connection
        self._free_bytes = free_bytes
        self._sending = threading.Lock()
        self._ranks: Ranks | None = None
        """Say when and how long the thread that serves waits in a collective."""
        self._is_busy = False
        self._clock = time.CLOCK_MONOTONIC
        self._used_s = 0.0

    def show_life(self) -> None:
        """Sends signs of life from a thread of its own, until rank 0 is gone."""
        threading.Thread(target=self._show_life, name="signs-of-life", daemon=True).start()

    def answer(self, error: str, **more: Any) -> None:
        self._send({"error": error, **more})

    def serve(self, follower: Follower, ranks: Ranks | None = None) -> None:
        """Does what rank 0 tells until it hangs up.

        `ranks`: those whose collectives say when this thread waits in them; there are no signs of life while it hangs
        elsewhere. None: it is not known where it waits.
        """
        self._ranks, self._clock = ranks, time.pthread_getcpuclockid(threading.get_ident())
        with self._connection.makefile("rb") as lines:
            for line in lines:
                self._is_busy = True
                answer = follower.do(json.loads(line))
                self._is_busy = False
                if answer is not None:
                    self._send({"error": answer} if isinstance(answer, str) else answer)
        self._ranks = None  # their store ends with this thread's use of it, not with the signs of life

    def wait_for_end(self) -> None:
        """Returns when rank 0 has hung up."""
        with self._connection.makefile("rb") as lines:
            lines.read()

    def is_alive(self) -> bool:
        """Returns whether the thread that serves waits for other ranks, or has computed since the last call."""
        before, self._used_s = self._used_s, time.clock_gettime(self._clock)
        ranks = self._ranks
        return not self._is_busy or ranks is None or ranks.is_waiting or self._used_s != before

    def _show_life(self) -> None:
        with suppress(OSError):
            while True:
                if self.is_alive():
                    self._send({})
                time.sleep(SIGN_INTERVAL_S)

    def _send(self, message: Message) -> None:
        waited_s = None if (ranks := self._ranks) is None else ranks.waited_s
        with self._sending:
            line = json.dumps({"free": self._free_bytes(), "waited_s": waited_s, **message})
            self._connection.sendall(line.encode() + b"\n")
