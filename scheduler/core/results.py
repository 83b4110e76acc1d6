"""Results of steps, and their copy from the FutureMap to the host."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from slipstream.common.api.output_chunk import TokenLogprobs
from slipstream.common.errors import FutureMapError
from slipstream.common.worker.access_log import LogOp
from slipstream.common.worker.layout import NOT_FINITE, BufferName
from slipstream.common.worker.step import FenceName

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from numpy.typing import NDArray

    from slipstream.common.device.interface import Arena, Device
    from slipstream.common.worker.access_log import AccessLog
    from slipstream.common.worker.layout import EpochShape
    from slipstream.scheduler.core.step import Step

_PUBLISHED = (BufferName.NEW_SEQ_LENS, BufferName.NUM_ACCEPTED, BufferName.OUTPUT_TOKENS)
_LOGPROBS = (BufferName.OUTPUT_LOGPROBS, BufferName.TOP_TOKENS, BufferName.TOP_LOGPROBS)

Interval = tuple[int, int]
"""Start and end of a worker's part of a step, in nanoseconds of the clock that all stamps share."""
_NO_LOGPROBS: Mapping[int, tuple[TokenLogprobs, ...]] = MappingProxyType({})


class StepResult(NamedTuple):
    """The result of a step, on the host: one row for each of the step's `yielding`, in order."""

    num_accepted: NDArray[np.int32]
    """[rows]: accepted draft tokens."""
    tokens: NDArray[np.int64]
    """[rows, K + 1]: those, then the target's own; the rest of a row means nothing."""
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = _NO_LOGPROBS
    """By row, for its tokens, of sequences that asked for them."""
    not_finite: tuple[int, ...] = ()
    """Rows without tokens, because the model's logits are NaN or infinite there."""
    stamps_before: tuple[Interval, ...] = ()
    """Stamps of the step before, as of this step's publication: verify's and draft's. Draft's may be any numbers."""


class ResultReader:
    """Copies results on a private stream that waits for publish alone: other queued work does not delay it."""

    def __init__(
        self, device: Device, arena: Arena, shape: EpochShape, log: AccessLog, *, is_debug: bool = False
    ) -> None:
        """`is_debug`: verify marks the lengths in rows that no step has published, and they are looked at."""
        self._shape = shape
        self._is_debug = is_debug
        self._log = log
        self._publish = publish = arena.fence(FenceName.VERIFY_PUBLISH)
        stamps = (BufferName.VERIFY_STAMPS, BufferName.DRAFT_STAMPS)
        published = [arena.tensor(name).unbind() for name in _PUBLISHED]
        before = [_row_before(arena.tensor(name).unbind()) for name in stamps]
        self._copy = device.host_copy(publish, [*published, *before])
        self._logprobs = device.host_copy(publish, [arena.tensor(name).unbind() for name in _LOGPROBS])
        self._last_consumed = 0
        self._views: dict[int, tuple[list[torch.Tensor], list[NDArray[Any]]]] = {}
        """By row: the tensors of its copies, and views of them."""

    def start(self, step: Step) -> None:
        """Enqueues the copy of the step's row, which waits for its publication."""
        row = step.number % self._shape.ring
        self._copy.start(step.number, row)
        if step.top_logprobs:
            self._logprobs.start(step.number, row)

    def resolve(self, step: Step, timeout_s: float, *, since: float = 0.0, usual_s: float = 0.0) -> StepResult | None:
        """Waits for the row; None if the time is over first. `since`, `usual_s`: see `HostCopy.finish`.

        Raises FutureMapError if the row was consumed before, if it cannot be a result or, in debug mode, if no step
        published it.
        """
        if step.number <= self._last_consumed:
            raise FutureMapError(f"step {step.number} is consumed again, after step {self._last_consumed}")
        row = step.number % self._shape.ring
        copied = self._copy.finish(step.number, row, timeout_s, since=since, usual_s=usual_s)
        likely = self._logprobs.finish(step.number, row, timeout_s) if step.top_logprobs else []
        if copied is None or likely is None:
            return None
        self._last_consumed = step.number
        if self._log.is_enabled:
            self._log.fence(LogOp.WAIT, FenceName.VERIFY_PUBLISH, step.number, step=step.number)
            for name in (*_PUBLISHED, *(_LOGPROBS if likely else ())):
                self._log.access(name, [row], is_write=False, step=step.number)
        seq_lens, accepted, output_tokens, verify_stamps, draft_stamps = self._views_of(row, copied)
        num_accepted, tokens, not_finite = self._rows(step, seq_lens, accepted, output_tokens)
        return StepResult(
            num_accepted=num_accepted,
            tokens=tokens,
            not_finite=not_finite,
            stamps_before=(tuple(verify_stamps.tolist()), tuple(draft_stamps.tolist())),
            logprobs=_token_logprobs(step, num_accepted + 1, *likely) if likely else _NO_LOGPROBS,
        )

    @property
    def published(self) -> int:
        """The last step that verify has published."""
        return self._publish.poll()

    def close(self) -> None:
        """Ends the stream without waiting for copies under way."""
        self._copy.close()
        self._logprobs.close()

    def _views_of(self, row: int, copied: list[torch.Tensor]) -> list[NDArray[Any]]:
        known = self._views.get(row)
        if known is None or known[0] is not copied:
            known = self._views[row] = (copied, [column.numpy() for column in copied])
        return known[1]

    def _rows(
        self,
        step: Step,
        seq_lens: NDArray[np.int64],
        num_accepted: NDArray[np.int32],
        output_tokens: NDArray[np.int64],
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], tuple[int, ...]]:
        """Copies the rows of the step: the next step's result may overwrite the shared ones."""
        rows = step.yielding.rows
        most = step.num_draft_tokens
        accepted = num_accepted.take(rows)
        not_finite: tuple[int, ...] = ()
        # Without their sign, negative numbers are too large as well.
        is_wrong = accepted.view(np.uint32) > most
        if self._is_debug:
            is_wrong |= seq_lens.take(rows) < 0
        if np.count_nonzero(is_wrong):
            lengths = seq_lens.take(rows)
            is_not_finite = (accepted == NOT_FINITE) & (lengths >= 0)
            not_finite = tuple(is_not_finite.nonzero()[0].tolist())
            accepted[is_not_finite], is_wrong[is_not_finite] = 0, False
            if is_wrong.any():
                at = is_wrong.argmax()
                found = f"length {lengths[at]} and {accepted[at]} accepted tokens"
                raise FutureMapError(f"step {step.number}, slot {rows[at]}: {found} were never published")
        return accepted, output_tokens.take(rows, 0), not_finite


def _row_before(rows: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The row before each row of a ring."""
    return (*rows[-1:], *rows[:-1])


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
