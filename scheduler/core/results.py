"""Results of steps, which verify publishes in memory of the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from slipstream.common.device.interface import ANY_TIME
from slipstream.common.errors import FutureMapError
from slipstream.common.wire.events import LogOp
from slipstream.common.wire.job import TokenLogprobs
from slipstream.common.wire.layout import NOT_FINITE, BufferName
from slipstream.common.wire.step import FenceName
from slipstream.scheduler.records import NO_LOGPROBS, StepResult

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from numpy.typing import NDArray

    from slipstream.common.device.interface import Arena, Look
    from slipstream.common.wire.events import EventLog
    from slipstream.common.wire.layout import EpochShape
    from slipstream.scheduler.records import Step

_PUBLISHED = (BufferName.NEW_SEQ_LENS, BufferName.NUM_ACCEPTED, BufferName.OUTPUT_TOKENS)
_ACCEPTED = _PUBLISHED.index(BufferName.NUM_ACCEPTED)
_STAMPS = (BufferName.VERIFY_STAMPS, BufferName.DRAFT_STAMPS)
_LOGPROBS = (BufferName.OUTPUT_LOGPROBS, BufferName.TOP_TOKENS, BufferName.TOP_LOGPROBS)


class ResultReader:
    """Reads the rows of the ring after publish."""

    def __init__(self, arena: Arena, shape: EpochShape, log: EventLog, *, is_debug: bool = False) -> None:
        """`arena`: its tensors are the host's.

        `is_debug`: verify marks the lengths in rows that no step has published, and they are looked at.
        """
        self._ring = shape.ring
        self._is_debug = is_debug
        self._log = log
        self._publish = arena.fence(FenceName.VERIFY_PUBLISH)
        # NumPy takes a few numbers in a fraction of PyTorch's time.
        published, stamps = ([arena.tensor(name).numpy() for name in names] for names in (_PUBLISHED, _STAMPS))
        published[_ACCEPTED] = published[_ACCEPTED].view(np.uint32)
        self._num_tokens = [np.arange(1, most + 2, dtype=np.int32) for most in range(shape.num_draft_tokens + 1)]
        """By K: the number of tokens by that of the accepted ones. Without a sign, negative ones are too large."""
        self._ring_rows = [
            (*(column[row] for column in published), stamps[0][row - 1], *stamps[1][row - 1])
            for row in range(self._ring)
        ]
        """By row: what is published, and the stamps of the row before, of draft those of both parts."""
        self._verify_stamps = stamps[0]
        self._logprobs = list(zip(*(arena.tensor(name).unbind() for name in _LOGPROBS), strict=True))
        self._last_consumed = 0

    def resolve(self, step: Step, timeout_s: float, look: Look = ANY_TIME) -> StepResult | None:
        """Waits for the row; None if the time is over first.

        Raises FutureMapError if the row was consumed before, if it cannot be the step's result, as it has more tokens
        of a sequence than there can be, or, in debug mode, if no step published it.
        """
        if step.number <= self._last_consumed:
            raise FutureMapError(f"step {step.number} is consumed again, after step {self._last_consumed}")
        if not self._publish.wait_on_host(step.number, timeout_s, look):
            return None
        row = step.number % self._ring
        self._last_consumed = step.number
        if self._log.is_enabled:
            self._log.fence(LogOp.WAIT, FenceName.VERIFY_PUBLISH, step.number, step=step.number)
            for name in (*_PUBLISHED, *(_LOGPROBS if step.top_logprobs else ())):
                self._log.access(name, [row], is_write=False, step=step.number)
        seq_lens, accepted, output_tokens, *stamps = self._ring_rows[row]
        # Copied: the next step's result may overwrite the shared ones.
        rows, to_num_tokens = step.yielding.rows, self._num_tokens[step.most_draft_tokens]
        num_accepted = accepted.take(rows)
        not_finite: tuple[int, ...] = ()
        try:
            # Checks the bounds as well: an operation of NumPy of its own would take as long again.
            num_tokens = to_num_tokens.take(num_accepted)
            is_good = not step.is_bounded or not np.count_nonzero(num_tokens > step.most_more)
        except IndexError:
            is_good = False
        if not is_good or self._is_debug:
            not_finite = self._check_rows(step, num_accepted, seq_lens.take(rows))
            num_tokens = to_num_tokens.take(num_accepted)
        return StepResult(
            num_accepted=num_accepted,
            num_tokens=num_tokens,
            tokens=output_tokens.take(rows, 0),
            not_finite=not_finite,
            stamps_before=tuple([tuple(interval.tolist()) for interval in stamps]),
            logprobs=self._logprobs_of(step, num_tokens) if step.top_logprobs else NO_LOGPROBS,
        )

    def ended_ns(self, number: int) -> int:
        """Verify's stamp at the end of a step that was consumed; 0 if it is not there yet. That of its start is."""
        start, end = self._verify_stamps[number % self._ring].tolist()
        return end if end >= start else 0

    @property
    def published(self) -> int:
        """The last step that verify has published."""
        return self._publish.poll()

    def _logprobs_of(self, step: Step, num_tokens: NDArray[np.int32]) -> Mapping[int, tuple[TokenLogprobs, ...]]:
        return _token_logprobs(step, num_tokens, *self._logprobs[step.number % self._ring])

    def _check_rows(self, step: Step, num_accepted: NDArray[np.uint32], lengths: NDArray[np.int64]) -> tuple[int, ...]:
        """Returns the rows that are marked as not finite, whose numbers become 0. Raises FutureMapError of others."""
        accepted = num_accepted.view(np.int32)
        is_wrong = (accepted < 0) | (accepted >= step.most_more)
        if self._is_debug:
            is_wrong |= lengths < 0
        is_not_finite = (accepted == NOT_FINITE) & (lengths >= 0)
        accepted[is_not_finite], is_wrong[is_not_finite] = 0, False
        if is_wrong.any():
            at = is_wrong.argmax()
            what = f"length {lengths[at]} and {accepted[at]} accepted tokens"
            raise FutureMapError(f"step {step.number}, slot {step.yielding.slots[at]}: {what} cannot be its result")
        return tuple(is_not_finite.nonzero()[0].tolist())


def _token_logprobs(
    step: Step,
    num_tokens: NDArray[np.int32],
    output: torch.Tensor,
    top_tokens: torch.Tensor,
    top: torch.Tensor,
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """`output`: [slots, K+1]; `top_tokens`, `top`: [slots, K+1, 20]."""
    found: dict[int, tuple[TokenLogprobs, ...]] = {}
    for at, asked in step.top_logprobs.items():
        slot, num_places = step.yielding.slots[at], int(num_tokens[at])
        places = zip(
            output[slot, :num_places].tolist(),
            top_tokens[slot, :num_places, :asked].tolist(),
            top[slot, :num_places, :asked].tolist(),
            strict=True,
        )
        found[at] = tuple(TokenLogprobs(own, tuple(zip(ids, values, strict=True))) for own, ids, values in places)
    return found
