"""The output for the gateways: collected during a turn of the loop, one message for each stream."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from slipstream.common.api.output_chunk import FinishReason
from slipstream.common.api.step_output import Refusal, StepOutput
from slipstream.scheduler.core.accounts import LENGTH, STOP

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slipstream.common.errors import SlipstreamError
    from slipstream.scheduler.core.accounts import Ints, TakenIn
    from slipstream.scheduler.core.sequence import Sequence

_REASONS = {STOP: FinishReason.STOP, LENGTH: FinishReason.LENGTH}


class Delivery(NamedTuple):
    """Something for one gateway's stream."""

    stream: int
    output: StepOutput | None = None
    refusals: tuple[Refusal, ...] = ()


class OutputSink(Protocol):
    """Takes the output out of the loop."""

    def put(self, outgoing: Outgoing) -> None:
        """Called on the loop's thread after each step; returns at once. Keeps the order."""


class Outgoing:
    """The output of a turn of the loop, as arrays. Messages are made of it off the loop's thread."""

    def __init__(self) -> None:
        self.taken_in: tuple[TakenIn, int, int] | None = None
        """The outcome of a step, with what was drafted for each sequence and the time of its publication."""
        self.admitted: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self.aborted: defaultdict[int, list[int]] = defaultdict(list)
        self.refused: defaultdict[int, list[Refusal]] = defaultdict(list)
        self.taken_ns = 0
        """When it was taken out of the outbox."""

    def __bool__(self) -> bool:
        return bool(self.taken_in or self.admitted or self.aborted or self.refused)

    def deliveries(self) -> list[Delivery]:
        """Returns the messages of all streams, in order. Called once."""
        deliveries = list(self._of_step())
        for stream in tuple(self.admitted):
            output = StepOutput(published_ns=self.taken_ns, **self._admissions(stream))
            deliveries.append(Delivery(stream, output))
        deliveries += [Delivery(stream, self._aborted(ids)) for stream, ids in self.aborted.items()]
        return deliveries + [Delivery(stream, None, tuple(refusals)) for stream, refusals in self.refused.items()]

    def _of_step(self) -> Iterator[Delivery]:
        if self.taken_in is None:
            return
        taken_in, num_draft_tokens, published_ns = self.taken_in
        for stream, rows in _by_stream(taken_in):
            output = StepOutput(
                **_columns(taken_in, rows),
                num_draft_tokens=num_draft_tokens,
                published_ns=published_ns,
                **self._admissions(stream),
            )
            yield Delivery(stream, output)

    def _admissions(self, stream: int) -> dict[str, Any]:
        admitted = self.admitted.pop(stream, ())
        return {"admitted": [number for number, _ in admitted], "admitted_ns": [when for _, when in admitted]}

    def _aborted(self, ids: list[int]) -> StepOutput:
        nothing = [0] * len(ids)
        return StepOutput(
            sequences=ids,
            num_tokens=nothing,
            num_accepted=nothing,
            finish_reasons=[FinishReason.ABORT] * len(ids),
            published_ns=self.taken_ns,
        )


class Outbox:
    """Belongs to the loop's thread."""

    def __init__(self) -> None:
        self._outgoing = Outgoing()

    def add_step(self, taken_in: TakenIn, num_draft_tokens: int, published_ns: int) -> None:
        """Adds the outcome of a step; one at a time. `num_draft_tokens`: drafted in the step for each sequence."""
        assert self._outgoing.taken_in is None, "the outcome of a step goes out before the next one's comes in"
        if len(taken_in.rows):
            self._outgoing.taken_in = (taken_in, num_draft_tokens, published_ns)

    def add_admitted(self, sequence: Sequence) -> None:
        """Adds the admission of a sequence, now."""
        self._outgoing.admitted[sequence.stream].append((sequence.id, time.monotonic_ns()))

    def add_aborted(self, sequence: Sequence) -> None:
        """Adds the end of a cancelled sequence, behind all output that it has."""
        self._outgoing.aborted[sequence.stream].append(sequence.id)

    def add_refused(self, sequence: Sequence, error: SlipstreamError) -> None:
        """Adds the end of a sequence that cannot be run."""
        self._outgoing.refused[sequence.stream].append(Refusal(sequence.id, error))

    def take(self) -> Outgoing:
        """Empties it."""
        outgoing = self._outgoing
        if outgoing:
            outgoing.taken_ns = time.monotonic_ns()
            self._outgoing = Outgoing()
        return outgoing


def _by_stream(taken_in: TakenIn) -> list[tuple[int, slice | Ints]]:
    """Each stream with its rows."""
    streams = taken_in.streams
    if (streams == streams[0]).all():
        return [(int(streams[0]), slice(None))]
    return [(stream, (streams == stream).nonzero()[0]) for stream in np.unique(streams).tolist()]


def _columns(taken_in: TakenIn, rows: slice | Ints) -> dict[str, Any]:
    """The fields of an output that its rows decide."""
    num_tokens, ids, reasons = taken_in.num_tokens[rows], taken_in.ids[rows], taken_in.reasons[rows]
    is_there = np.arange(taken_in.tokens.shape[1]) < num_tokens[:, None]
    finish_reasons: list[FinishReason | None] = [None] * len(ids)
    for at in reasons.nonzero()[0].tolist():
        finish_reasons[at] = _REASONS[int(reasons[at])]
    places = np.arange(len(taken_in.rows))[rows].tolist() if taken_in.logprobs else ()
    return {
        "sequences": ids.tolist(),
        "num_tokens": num_tokens.tolist(),
        "num_accepted": taken_in.num_accepted[rows].tolist(),
        "finish_reasons": finish_reasons,
        "tokens": taken_in.tokens[rows][is_there].tolist(),
        "logprobs": {int(taken_in.ids[at]): taken_in.logprobs[at] for at in places if at in taken_in.logprobs},
    }
