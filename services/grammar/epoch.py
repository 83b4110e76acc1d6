"""An attachment of a grammar worker: carries out steps in order, on its own thread, until the end of Execute."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.common.device.cpu.fence import HostFence, ReadOnlyFence, without_its_flag
from slipstream.common.device.cpu.shared_file import open_mapped
from slipstream.common.errors import InvalidArgumentError, ManifestError
from slipstream.common.host import name_this_thread
from slipstream.common.wire.events import EventLog, LogOp, StreamName
from slipstream.common.wire.step import FenceName
from slipstream.protos import worker_pb2 as pb
from slipstream.services.grammar.matchers import MaskFiller, SlotMatcher

if TYPE_CHECKING:
    from collections.abc import Callable

    from llguidance import LLExecutor
    from numpy.typing import NDArray

    from slipstream.services.grammar.matchers import Grammars

logger = logging.getLogger(__name__)

LOOK_S = 0.05
"""Seconds between two looks, in a wait, whether the attachment is over."""
LOOK_AT_GPU_S = 0.00005
"""Seconds between two looks at a word that a GPU sets. The kernel adds its timer slack, 50 us."""
FENCES = (pb.FENCE_VERIFY_PUBLISH, pb.FENCE_VERIFY_COPIED)
"""Fences that a command may wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarArrays:
    """The shared memory of an attachment, without the masks."""

    stamps: NDArray[np.int64]
    """[slots]: the step of a slot's masks; negative where there are none."""
    copied_tokens: NDArray[np.int64]
    """[slots, K]: the draft tokens as verify checks them."""
    num_accepted: NDArray[np.int32]
    """[ring, slots]."""
    output_tokens: NDArray[np.int64]
    """[ring, slots, K + 1]."""


class SharedPiece:
    """A piece of shared memory, as arrays of NumPy and fences. It stays mapped until the last of them is gone."""

    def __init__(self, manifest: pb.Manifest, *, read_only: bool, is_of_gpu: bool = False) -> None:
        """Maps it. `is_of_gpu`: a GPU sets its words. Raises ManifestError."""
        if manifest.kind != "file":
            raise ManifestError(f"arena kind {manifest.kind!r}: a grammar worker opens files")
        self._manifest = manifest
        mapped = open_mapped(Path(manifest.path), manifest.size, read_only=read_only)
        self._memory: Any = without_its_flag(mapped) if read_only else mapped
        readable = partial(ReadOnlyFence, look_s=LOOK_AT_GPU_S) if is_of_gpu else ReadOnlyFence
        self._fence_kind: Callable[[memoryview, int], HostFence] = readable if read_only else HostFence

    def array(self, name: str, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """Returns a buffer. Raises ManifestError unless it lies in the memory with this shape and dtype."""
        buffer = next((one for one in self._manifest.buffers if one.name == name), None)
        if buffer is None or tuple(buffer.shape) != shape or buffer.dtype != dtype:
            raise ManifestError(f"the arena has no buffer {name} of {dtype} {list(shape)}")
        size = math.prod(shape) * np.dtype(dtype).itemsize
        self._check(name, buffer.offset, size)
        return np.frombuffer(self._memory, dtype, math.prod(shape), buffer.offset).reshape(shape)

    def fence(self, fence: pb.Fence) -> HostFence:
        """Returns a fence. Raises ManifestError unless it lies in the memory."""
        word = next((one for one in self._manifest.fences if one.fence == fence), None)
        if word is None or word.kind != "host":
            raise ManifestError(f"the arena has no fence {fence} of kind 'host'")
        self._check(f"fence {fence}", word.offset, 8)
        return self._fence_kind(memoryview(self._memory), word.offset)

    def _check(self, name: str, offset: int, size: int) -> None:
        if offset % 8 or offset + size > self._manifest.size:
            raise ManifestError(f"{name}: bytes {offset} to {offset + size} of {self._manifest.size}")


class StepMasks:
    """Makes the masks of each step: reads what verify publishes and copies out, once that is there."""

    def __init__(
        self,
        arrays: GrammarArrays,
        grammars: Grammars,
        filler: MaskFiller,
        *,
        vocab_size: int,
    ) -> None:
        self._arrays = arrays
        self._grammars = grammars
        self._filler = filler
        self._vocab_size = vocab_size
        self.slots: dict[int, SlotMatcher] = {}

    def make(self, command: pb.StepCommand) -> int:
        """Makes them, and stamps them. Returns how many."""
        # Arrays are read for all slots at once: a row then takes a third of the time.
        slots, rows = [row.slot for row in command.grammar_rows], []
        drafts = np.minimum(np.maximum(self._arrays.copied_tokens[slots], 0), self._vocab_size - 1).tolist()
        published = _Published(self._arrays, slots)
        for place, row in enumerate(command.grammar_rows):
            if (matcher := self._advanced(place, row, command, published)) is not None:
                rows.append((row.slot, matcher, drafts[place][: row.num_draft_tokens]))
        failed = self._filler.fill(rows)
        # After the masks: x86-64 keeps stores in order.
        stamps = [-command.step if slot in failed else command.step for slot, *_ in rows]
        self._arrays.stamps[[slot for slot, *_ in rows]] = stamps
        return sum(len(tokens) + 1 for *_, tokens in rows)

    def rows_read(self, slots: list[int], step: int) -> list[int]:
        """The rows of the results that the masks of these slots took tokens from in a step, which was made last."""
        ring = len(self._arrays.num_accepted)
        known = [self.slots[slot] for slot in slots if slot in self.slots]
        return sorted({before % ring for output in known for before in output.steps if before != step})

    def _advanced(self, place: int, row: pb.GrammarRow, command: pb.StepCommand, published: _Published) -> Any:
        """The matcher of a slot after all tokens of the steps before; None if its grammar is not there any more."""
        if row.digest:
            matcher = self._grammars.matcher(row.digest)
            self.slots.pop(row.slot, None)
            if matcher is not None:
                self.slots[row.slot] = SlotMatcher(matcher)
                self._filler.clear(row.slot)
        if (output := self.slots.get(row.slot)) is None:
            return None
        end = output.take(row.num_known, row.tokens)
        output.steps = [step for step in output.steps if step > command.consumed]
        for step in output.steps:
            end = output.take(end, published.tokens(step, place))
        output.steps.append(command.step)
        return output.matcher


class _Published:
    """The results of steps under way, of some slots."""

    def __init__(self, arrays: GrammarArrays, slots: list[int]) -> None:
        self._arrays = arrays
        self._slots = slots
        self._found: dict[int, tuple[list[int], list[list[int]]]] = {}

    def tokens(self, step: int, place: int) -> list[int]:
        """The tokens of a step for the slot at `place` among these."""
        if step not in self._found:
            at = step % len(self._arrays.num_accepted)
            found = self._arrays.num_accepted[at, self._slots], self._arrays.output_tokens[at, self._slots]
            self._found[step] = found[0].tolist(), found[1].tolist()
        num_accepted, tokens = self._found[step]
        # Negative where there is no token: the sequence is over then, or will be taken in anew.
        return tokens[place][: max(num_accepted[place] + 1, 0)]


class GrammarEpoch:
    """Makes the masks of each step: what verify publishes and copies out is read, never waited for by anybody else."""

    def __init__(
        self,
        request: pb.AttachRequest,
        grammars: Grammars,
        executor: LLExecutor,
        on_failure: Callable[[Exception], None],
        on_filled: Callable[[int, float], None] = lambda num_masks, seconds: None,
        *,
        log: EventLog | None = None,
    ) -> None:
        """Maps the memory and starts the thread. Raises ManifestError.

        `on_failure` is called there, `on_filled` after each step with its masks, and the time that they took. `log`:
        gets the accesses, if its order is logged.
        """
        self.number = request.epoch
        self._log = log or EventLog(StreamName.GRAMMAR)
        self._verify_epoch = request.peer.last_epoch
        slots, self._width, ring = request.num_slots, request.num_draft_tokens + 1, request.run_ahead + 2
        is_of_gpu, own = request.peer.device != "cpu", SharedPiece(request.manifest, read_only=False)
        given = SharedPiece(request.given, read_only=True, is_of_gpu=is_of_gpu)
        results = SharedPiece(request.results, read_only=True, is_of_gpu=is_of_gpu)
        words = -(-request.peer.vocab_size // 32)
        arrays = GrammarArrays(
            stamps=own.array("mask_stamps", (slots,), "int64"),
            copied_tokens=given.array("copied_tokens", (slots, max(self._width - 1, 1)), "int64"),
            num_accepted=results.array("num_accepted", (ring, slots), "int32"),
            output_tokens=results.array("output_tokens", (ring, slots, self._width), "int64"),
        )
        filler = MaskFiller(own.array("masks", (slots, self._width, words), "int32"), executor)
        self._masks = StepMasks(arrays, grammars, filler, vocab_size=request.peer.vocab_size)
        self._ready = own.fence(pb.FENCE_GRAMMAR_READY)
        self._waits = {
            pb.FENCE_VERIFY_PUBLISH: results.fence(pb.FENCE_VERIFY_PUBLISH),
            pb.FENCE_VERIFY_COPIED: given.fence(pb.FENCE_VERIFY_COPIED),
        }
        self._num_slots = slots
        self._on_failure = on_failure
        self._on_filled = on_filled
        self._is_over = threading.Event()
        self._commands: queue.SimpleQueue[pb.StepCommand | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="grammar", daemon=True)
        self._thread.start()

    def enqueue(self, command: pb.StepCommand) -> None:
        """Queues a step and returns. Raises InvalidArgumentError for one that makes no sense."""
        for row in command.grammar_rows:
            if not 0 < row.slot < self._num_slots:
                raise InvalidArgumentError("grammar_rows.slot", row.slot, f"1 to {self._num_slots - 1}")
            if row.num_draft_tokens >= self._width:
                accepted = f"0 to {self._width - 1}"
                raise InvalidArgumentError("grammar_rows.num_draft_tokens", row.num_draft_tokens, accepted)
        for wait in command.waits:
            if wait.fence not in FENCES:
                raise InvalidArgumentError("waits", wait.fence, "VERIFY_PUBLISH and VERIFY_COPIED")
        self._commands.put(command)

    def finish(self) -> None:
        """Returns when every step that was queued is done."""
        self._commands.put(None)
        self._thread.join()

    def abandon(self) -> None:
        """Ends without the remaining steps: what they wait for may never happen."""
        self._is_over.set()
        self.finish()

    def _run(self) -> None:
        name_this_thread("grammar")
        try:
            while (command := self._commands.get()) is not None and not self._is_over.is_set():
                self._carry_out(command)
        except Exception as error:
            logger.exception("the grammar worker's thread failed")
            self._on_failure(error)

    def _carry_out(self, command: pb.StepCommand) -> None:
        if self._log.is_enabled:
            self._log.recv(epoch=self.number, step=command.step)
        for wait in command.waits:
            while not self._waits[wait.fence].wait_on_host(wait.value, LOOK_S):
                if self._is_over.is_set():
                    return
            if self._log.is_enabled:
                where = self._verify_epoch if wait.fence == pb.FENCE_VERIFY_PUBLISH else self.number
                fence = FenceName(wait.fence)
                self._log.fence(LogOp.WAIT, fence, wait.value, step=command.step, attachment=where)
        begun = time.monotonic()
        num_masks = self._masks.make(command)
        if self._log.is_enabled:
            self._log_step(command)
        self._ready.store(command.step)
        self._on_filled(num_masks, time.monotonic() - begun)

    def _log_step(self, command: pb.StepCommand) -> None:
        """Logs what was read and written for a step, and its signal, which comes next."""
        step, own = command.step, self.number
        slots = [row.slot for row in command.grammar_rows]
        drafted = [row.slot for row in command.grammar_rows if row.num_draft_tokens]
        if drafted:
            self._log.access("copied_tokens", drafted, is_write=False, step=step, attachment=own)
        if read := self._masks.rows_read(slots, step):
            for name in ("num_accepted", "output_tokens"):
                self._log.access(name, read, is_write=False, step=step, attachment=self._verify_epoch)
        for name in ("masks", "mask_stamps"):
            self._log.access(name, slots, is_write=True, step=step, attachment=own)
        self._log.fence(LogOp.SIGNAL, FenceName.GRAMMAR_READY, step, step=step, attachment=own)
