"""The output for the gateways: collected during a turn of the loop, one message for each stream."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from slipstream.common.wire.job import FinishReason
from slipstream.common.wire.sequence import PackedStep, Refusal, StepOutput
from slipstream.scheduler.records import StepOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from slipstream.common.errors import SlipstreamError
    from slipstream.scheduler.records import Sequence


class Delivery(NamedTuple):
    """Something for one gateway's stream."""

    stream: int
    output: StepOutput | PackedStep | None = None
    refusals: tuple[Refusal, ...] = ()


class OutputSink(Protocol):
    """Takes the output out of the loop."""

    def put(self, outgoing: Outgoing) -> None:
        """Called on the loop's thread after each step; returns at once. Keeps the order."""


class Outgoing:
    """The output of a turn of the loop, as arrays. Messages are made of it off the loop's thread."""

    __slots__ = ("aborted", "admitted", "cached_tokens", "refused", "taken_in", "taken_ns")

    def __init__(self) -> None:
        self.taken_in: tuple[tuple[StepOutcome, int, int], ...] = ()
        """The outcome of a step, with what was drafted for each sequence and the time of its publication.

        In two parts if the step is mixed and has drafted: those that it drafted for, and the others.
        """
        # By stream.
        self.admitted: dict[int, list[tuple[int, int]]] = {}
        self.cached_tokens: dict[int, dict[int, int]] = {}
        self.aborted: dict[int, list[int]] = {}
        self.refused: dict[int, list[Refusal]] = {}
        self.taken_ns = 0
        """When it was taken out of the outbox; 0 if it is empty."""

    def deliveries(self) -> list[Delivery]:
        """Returns the messages of all streams, in order. Called once."""
        deliveries = list(self._of_step())
        for stream in {**self.admitted, **self.cached_tokens}:
            output = StepOutput(published_ns=self.taken_ns, **self._beginnings(stream))
            deliveries.append(Delivery(stream, output))
        deliveries += [Delivery(stream, self._aborted(ids)) for stream, ids in self.aborted.items()]
        return deliveries + [Delivery(stream, None, tuple(refusals)) for stream, refusals in self.refused.items()]

    def _of_step(self) -> Iterator[Delivery]:
        for taken_in, num_draft_tokens, published_ns in self.taken_in:
            for stream, part in _by_stream(taken_in):
                packed = _packed(part, num_draft_tokens, published_ns)
                if stream in self.admitted or stream in self.cached_tokens:
                    packed = packed._replace(**self._beginnings(stream))
                yield Delivery(stream, packed)

    def _beginnings(self, stream: int) -> dict[str, Any]:
        admitted = self.admitted.pop(stream, [])
        return {
            "admitted": [number for number, _ in admitted],
            "admitted_ns": [when for _, when in admitted],
            "cached_tokens": self.cached_tokens.pop(stream, {}),
        }

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

    def add_step(
        self, taken_in: StepOutcome, num_draft_tokens: int, published_ns: int, *, is_mixed: bool = False
    ) -> None:
        """Adds the outcome of a step; one at a time. `num_draft_tokens`: drafted in the step for each sequence.

        `is_mixed`: for those that took in their prompts nothing was drafted.
        """
        assert not self._outgoing.taken_in, "the outcome of a step goes out before the next one's comes in"
        if not len(taken_in.rows):
            return
        is_drafted = taken_in.is_speculating
        if not is_mixed or is_drafted.all():
            self._outgoing.taken_in = ((taken_in, num_draft_tokens, published_ns),)
            return
        parts = [(is_drafted.nonzero()[0], num_draft_tokens), ((~is_drafted).nonzero()[0], 0)]
        self._outgoing.taken_in = tuple(
            (_part(taken_in, places), drafted, published_ns) for places, drafted in parts if len(places)
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
        if outgoing.taken_in or outgoing.admitted or outgoing.cached_tokens or outgoing.aborted or outgoing.refused:
            outgoing.taken_ns = time.monotonic_ns()
            self._outgoing = Outgoing()
        return outgoing


def _by_stream(taken_in: StepOutcome) -> Iterator[tuple[int, StepOutcome]]:
    """Yields each stream with its part."""
    streams: list[int] = taken_in.streams.tolist()
    if streams.count(streams[0]) == len(streams):
        yield streams[0], taken_in
        return
    for stream in sorted(set(streams)):
        yield stream, _part(taken_in, (taken_in.streams == stream).nonzero()[0])


def _part(taken_in: StepOutcome, places: NDArray[np.int64]) -> StepOutcome:
    """The outcome for the sequences at these places, which are in order."""
    columns = {name: column[places] for name, column in taken_in._asdict().items() if name != "logprobs"}
    # By place in the part.
    at = {int(place): number for number, place in enumerate(places)} if taken_in.logprobs else {}
    logprobs = {at[place]: likely for place, likely in taken_in.logprobs.items() if place in at}
    return StepOutcome(**columns, logprobs=logprobs)


def _packed(taken_in: StepOutcome, num_draft_tokens: int, published_ns: int) -> PackedStep:
    """The message of a step. STOP and LENGTH have the numbers of `FinishReason` in generation.proto.

    Counts have 32 bits as in the message, and none is negative.
    """
    num_tokens, ids, logprobs = taken_in.num_tokens, taken_in.ids, taken_in.logprobs
    return PackedStep(
        ids.tobytes(),
        num_tokens.tobytes(),
        taken_in.num_accepted.tobytes(),
        taken_in.reasons.tobytes(),
        taken_in.tokens[taken_in.is_new].astype(np.uint32).tobytes(),
        num_draft_tokens,
        published_ns,
        is_beyond_draft=taken_in.is_beyond_draft.tobytes() if taken_in.is_beyond_draft.any() else b"",
        logprobs={int(ids[at]): likely for at, likely in sorted(logprobs.items())},
    )
