"""The output for the gateways: collected during a turn of the loop, one message for each stream."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from slipstream.common.wire.job import FinishReason
from slipstream.common.wire.sequence import PackedStep, Refusal
from slipstream.scheduler.records import StepOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from slipstream.common.errors import SlipstreamError
    from slipstream.scheduler.records import Sequence


class OutputSink(Protocol):
    """Takes the output out of the loop."""

    def put(self, outgoing: Outgoing) -> None:
        """Called on the loop's thread after each step; returns at once. Keeps the order."""


class Outgoing:
    """The output of a turn of the loop, as arrays. Messages are made of it off the loop's thread."""

    __slots__ = ("aborted", "admitted", "cached_tokens", "outcomes", "refused", "taken_ns")

    def __init__(self) -> None:
        self.outcomes: tuple[tuple[StepOutcome, int, int], ...] = ()
        """The outcome of a step, with what was drafted for each sequence and the time of its publication.

        In two parts if the step has drafted for some of them and not for others.
        """
        # By stream.
        self.admitted: dict[int, list[tuple[int, int]]] = {}
        self.cached_tokens: dict[int, dict[int, int]] = {}
        self.aborted: dict[int, list[int]] = {}
        self.refused: dict[int, list[Refusal]] = {}
        self.taken_ns = 0
        """When it was taken out of the outbox; 0 if it is empty."""

    def deliveries(self) -> Iterator[tuple[int, PackedStep | None, tuple[Refusal, ...]]]:
        """Yields what each gateway's stream gets, in order: its number, output, refusals. Called once."""
        for stream, packed in self._of_step():
            yield stream, packed, ()
        for stream in {**self.admitted, **self.cached_tokens}:
            yield stream, PackedStep(published_ns=self.taken_ns, **self._beginnings(stream)), ()
        for stream, ids in self.aborted.items():
            yield stream, self._aborted(ids), ()
        for stream, refusals in self.refused.items():
            yield stream, None, tuple(refusals)

    def _of_step(self) -> Iterator[tuple[int, PackedStep]]:
        for outcome, num_draft_tokens, published_ns in self.outcomes:
            for stream, part in _by_stream(outcome):
                packed = _packed(part, num_draft_tokens, published_ns)
                if stream in self.admitted or stream in self.cached_tokens:
                    packed = packed._replace(**self._beginnings(stream))
                yield stream, packed

    def _beginnings(self, stream: int) -> dict[str, Any]:
        admitted = self.admitted.pop(stream, [])
        return {
            "admitted": [number for number, _ in admitted],
            "admitted_ns": [when for _, when in admitted],
            "cached_tokens": self.cached_tokens.pop(stream, {}),
        }

    def _aborted(self, ids: list[int]) -> PackedStep:
        counts, reasons = np.zeros(len(ids), np.uint32).tobytes(), bytes([FinishReason.ABORT.to_pb()] * len(ids))
        return PackedStep(np.array(ids, np.uint64).tobytes(), counts, counts, reasons, published_ns=self.taken_ns)


class Outbox:
    """Belongs to the loop's thread."""

    def __init__(self) -> None:
        self._outgoing = Outgoing()

    def add_step(
        self, outcome: StepOutcome, num_draft_tokens: int, published_ns: int, *, takes_prompts: bool = False
    ) -> None:
        """Adds the outcome of a step; one at a time. `num_draft_tokens`: drafted in the step for each sequence.

        `takes_prompts`: True if for some nothing was drafted, as their prompts ended in it.
        """
        assert not self._outgoing.outcomes, "the outcome of a step goes out before the next one's comes in"
        if not len(outcome.rows):
            return
        is_drafted = outcome.is_speculating
        if not (takes_prompts and num_draft_tokens) or is_drafted.all():
            self._outgoing.outcomes = ((outcome, num_draft_tokens, published_ns),)
            return
        parts = [(is_drafted.nonzero()[0], num_draft_tokens), ((~is_drafted).nonzero()[0], 0)]
        self._outgoing.outcomes = tuple(
            (_part(outcome, places), drafted, published_ns) for places, drafted in parts if len(places)
        )

    def add_admitted(self, sequence: Sequence) -> None:
        """Adds the admission of a sequence, now."""
        self._outgoing.admitted.setdefault(sequence.stream, []).append((sequence.id, time.monotonic_ns()))

    def add_cached(self, sequence: Sequence, num_tokens: int) -> None:
        """Adds the tokens of a sequence's prompt that the prefix cache had."""
        self._outgoing.cached_tokens.setdefault(sequence.stream, {})[sequence.id] = num_tokens

    def add_aborted(self, sequence: Sequence) -> None:
        """Adds the end of a cancelled sequence, behind all output that it has."""
        self._outgoing.aborted.setdefault(sequence.stream, []).append(sequence.id)

    def add_refused(self, sequence: Sequence, error: SlipstreamError) -> None:
        """Adds the end of a sequence that cannot be run."""
        self._outgoing.refused.setdefault(sequence.stream, []).append(Refusal(sequence.id, error))

    def take(self) -> Outgoing:
        """Empties it."""
        outgoing = self._outgoing
        if outgoing.outcomes or outgoing.admitted or outgoing.cached_tokens or outgoing.aborted or outgoing.refused:
            outgoing.taken_ns = time.monotonic_ns()
            self._outgoing = Outgoing()
        return outgoing


def _by_stream(outcome: StepOutcome) -> Iterator[tuple[int, StepOutcome]]:
    """Yields each stream with its part."""
    streams: list[int] = outcome.streams.tolist()
    if streams.count(streams[0]) == len(streams):
        yield streams[0], outcome
        return
    for stream in sorted(set(streams)):
        yield stream, _part(outcome, (outcome.streams == stream).nonzero()[0])


def _part(outcome: StepOutcome, places: NDArray[np.int64]) -> StepOutcome:
    """The outcome for the sequences at these places, which are in order."""
    columns = {name: column[places] for name, column in outcome._asdict().items() if name != "logprobs"}
    # By place in the part.
    at = {int(place): number for number, place in enumerate(places)} if outcome.logprobs else {}
    logprobs = {at[place]: likely for place, likely in outcome.logprobs.items() if place in at}
    return StepOutcome(**columns, logprobs=logprobs)


def _packed(outcome: StepOutcome, num_draft_tokens: int, published_ns: int) -> PackedStep:
    """The message of a step. STOP and LENGTH have the numbers of `FinishReason` in generation.proto.

    Counts have 32 bits as in the message, and none is negative.
    """
    num_tokens, ids, logprobs = outcome.num_tokens, outcome.ids, outcome.logprobs
    return PackedStep(
        ids.tobytes(),
        num_tokens.tobytes(),
        outcome.num_accepted.tobytes(),
        outcome.reasons.tobytes(),
        outcome.tokens[outcome.is_new].astype(np.uint32).tobytes(),
        num_draft_tokens,
        published_ns,
        is_beyond_draft=outcome.is_beyond_draft.tobytes() if outcome.is_beyond_draft.any() else b"",
        logprobs={int(ids[at]): likely for at, likely in sorted(logprobs.items())},
    )
