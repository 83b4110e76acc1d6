"""An attachment to verify: carries out the steps from Attach to the end of Execute, in order, on its own thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
from arena import Arena
from ngram import Continuation, History
from noise import can_choose, choose

from slipstream.protos import worker_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


class Epoch:
    """The stream of an epoch. `enqueue` returns at once; the thread does the work."""

    def __init__(self, request: pb.AttachRequest, vocab_size: int, on_failure: Callable[[], None]) -> None:
        """Maps the memory and starts the thread. Raises ManifestError."""
        self.number = request.epoch
        slots, width, ring = request.num_slots, request.num_draft_tokens, request.run_ahead + 2
        own, given = Arena(request.manifest, is_writable=True), Arena(request.given, is_writable=False)
        self._seq_lens = given.array("seq_lens", (slots,))
        self._num_new = given.array("num_new", (slots,))
        self._last_tokens = given.array("last_tokens", (slots, width + 1))
        self._draft_tokens = own.array("draft_tokens", (slots, width))
        self._num_proposed = own.array("num_proposed", (slots,))
        self._stamps = own.array("draft_stamps", (ring, 2, 2))
        self._fences = {name: own.fence(name) for name in (pb.FENCE_DRAFT_PROPOSED, pb.FENCE_DRAFT_PREFILLED)}
        self._stashed = given.fence(pb.FENCE_VERIFY_STASH)
        self._vocab_size = vocab_size
        self._histories = [History() for _ in range(slots)]
        self._sampling = [pb.SlotSampling() for _ in range(slots)]
        self._on_failure = on_failure
        self._is_over = threading.Event()
        self._commands: queue.SimpleQueue[pb.StepCommand | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._thread.start()

    def enqueue(self, command: pb.StepCommand) -> None:
        """Queues a step and returns. Raises ValueError for an invalid one."""
        if not all(can_choose(each.sampling) for each in command.updates if each.HasField("sampling")):
            raise ValueError(f"step {command.step}: sampling that leaves nothing to choose")
        self._commands.put(command)

    def finish(self) -> None:
        """Waits until every enqueued step is done."""
        self._commands.put(None)
        self._thread.join()

    def abandon(self) -> None:
        """Ends without the remaining steps: the signals that they wait for may never come."""
        self._is_over.set()
        self.finish()

    def _run(self) -> None:
        try:
            while (command := self._commands.get()) is not None and not self._is_over.is_set():
                self._carry_out(command)
        except Exception:
            logger.exception("the stream is broken")
            self._on_failure()

    def _carry_out(self, command: pb.StepCommand) -> None:
        for update in command.updates:
            if update.HasField("sampling"):
                self._sampling[update.slot] = update.sampling
        # The signals say which parts the step has: the decode part, the prefill part, or both in this order.
        for point in command.signals:
            is_decode = point.fence == pb.FENCE_DRAFT_PROPOSED
            place = pb.WAIT_PLACE_START if is_decode else pb.WAIT_PLACE_PREFILL_HIDDEN
            for wait in command.waits:
                if wait.place == place and not self._stashed.wait(wait.value, self._is_over.is_set):
                    return
            stamps = self._stamps[command.step % len(self._stamps), 0 if is_decode else 1]
            stamps[0] = time.monotonic_ns()
            if is_decode:
                self._decode(command)
            else:
                for chunk in command.chunks:
                    self._histories[chunk.slot].put(chunk.start, chunk.tokens)
            stamps[1] = time.monotonic_ns()
            self._fences[point.fence].signal(point.value)

    def _decode(self, command: pb.StepCommand) -> None:
        for slot, num_guesses in zip(command.slots, command.num_draft_tokens or [0] * len(command.slots), strict=True):
            guesses = self._propose(slot, num_guesses)
            self._draft_tokens[slot, :num_guesses] = guesses
            self._num_proposed[slot] = num_guesses

    def _propose(self, slot: int, num_guesses: int) -> list[int]:
        """Takes in what verify stashed, and returns guesses for the tokens after the slot's sequence."""
        history = self._histories[slot]
        # Clamped, because the memory may hold anything: a length becomes an index, a token an id.
        num_new = min(max(int(self._num_new[slot]), 1), self._last_tokens.shape[1])
        tokens = np.clip(self._last_tokens[slot, :num_new], 0, self._vocab_size - 1)
        history.put(max(int(self._seq_lens[slot]) + 1 - num_new, 0), tokens.tolist())
        continuation = Continuation(history.tokens())
        guesses = []
        for position in range(history.end, history.end + num_guesses):
            index = choose(continuation.token_ids, continuation.probabilities(), self._sampling[slot], position)
            continuation.append(index)
            guesses.append(int(continuation.token_ids[index]))
        return guesses
