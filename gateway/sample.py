"""A sample of a job: its sequence at the scheduler, its output, and its counts and times.

Whatever happens to the scheduler, the sequence can be submitted again with the output that it has. The output is kept
once, and read by any number of readers, from any token on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from array import array
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from slipstream.common.errors import InternalError, InvalidArgumentError
from slipstream.common.wire.job import (
    FinishReason,
    PlainChunkEncoder,
    SampleInfo,
    TokenLogprobs,
    Usage,
    matched_stop_to_pb,
    mean_accept_length,
)
from slipstream.common.wire.sequence import Refusal
from slipstream.gateway.metrics import RequestTimes
from slipstream.gateway.request import MAX_SAMPLES
from slipstream.gateway.text import OutputText
from slipstream.protos import generation_pb2, journal_pb2, scheduler_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from slipstream.common.errors import SlipstreamError
    from slipstream.common.wire.job import MatchedStop
    from slipstream.gateway.metrics import RequestMetrics
    from slipstream.gateway.request import CheckedRequest
    from slipstream.gateway.text import Vocabulary

Chunk = generation_pb2.GenerateResponse
"""A part of a sample's output, as clients get it. One that was returned is not changed: others may have it, too."""

MAX_CHUNK_TOKENS = 4096
"""Tokens of a chunk: a few milliseconds of the event loop's time. Logprobs count like tokens."""
MAX_SHARED_TOKENS = 64
"""Tokens of a chunk that is kept for the next reader, for as long as the sample is."""
BROKEN_OUTPUT = "the output could not be taken in; the server's log has more"
_TOKEN_BYTES = 30
"""Memory of a token with its text, roughly."""

logger = logging.getLogger(__name__)


class Sample:
    """A sequence and its output. Belongs to the event loop; compared by identity. Times are of `time.monotonic`.

    Tokens become text when they are read for the first time, so a job without a reader costs no such work; with stop
    strings they do at once, and the output is cut after the token that completes one.
    """

    def __init__(
        self,
        request: CheckedRequest,
        vocabulary: Vocabulary,
        *,
        index: int = 0,
        number: int = 0,
        attempt: int = 0,
        arrived_at: float | None = None,
        times: RequestTimes | None = None,
    ) -> None:
        """`vocabulary`: see `Vocabulary.for_output`. `number`, `attempt` and `times`: the job's.

        It arrives now if no time is given. Raises InvalidArgumentError if a stop string ends the request's output of
        another server before its last token.
        """
        self.spec = request.samples[index]
        """The sequence, without output."""
        self.index = index
        self.key = self._key(number)
        """Names it in the journal, and orders it among those that wait: it grows from job to job."""
        self.times = times or RequestTimes()
        """Times of the request, which all samples of a job share."""
        self._request = request
        self._attempt = attempt
        # Output.
        self.token_ids = array("I")
        """Tokens so far. Only `add` and `restore` change it."""
        self.num_steps = 0
        """Steps that had tokens for it."""
        self.published_ns = 0
        """When the newest token was published, by `time.monotonic_ns`; 0 if it is of another process."""
        self.published_before_ns = 0
        """The same for the step before that one."""
        self.finish_reason: FinishReason | None = None
        """Why it ended; None while it goes on, and if it failed."""
        self.error: SlipstreamError | None = None
        """Why it could not go on."""
        self.usage: Usage | None = None
        """Tokens, drafts and times; set once it is over."""
        self._is_draft = bytearray()
        self._logprobs = None if self.spec.top_logprobs is None else LogprobColumns(self.spec.top_logprobs)
        self._text = self._new_text(vocabulary)
        self._token_bytes: Callable[[int], bytes] = vocabulary.token_bytes
        self._ends_with_token = False
        self._last_chunk: Chunk | None = None
        self._last_encoded = (0, 0, b"")
        """Offset and end of the tokens that were encoded last, and their message."""
        is_plain = not request.stop and self._logprobs is None
        self._encoder = PlainChunkEncoder(request.job_id, index, attempt) if is_plain else None
        # Counts and times.
        self.total_draft_tokens = 0
        """Tokens that the draft proposed: K for each checked draft, also where fewer may be accepted."""
        self.drafts_by_accepted: list[int] = []
        """[i]: drafts that the target checked, and accepted i tokens of."""
        self.tokens_beyond_draft = 0
        """Tokens that were decoded plainly because the sequence had become too long for the draft."""
        self.cached_tokens = 0
        """Tokens of the prompt that the prefix cache had before the first token."""
        self.arrived_at = time.monotonic() if arrived_at is None else arrived_at
        self.admitted_at: float | None = None
        """When it got its first slot."""
        self.first_token_at: float | None = None
        self._last_token_at: float | None = None
        self._num_measured = 0
        self._measured_at = 0.0
        # At the scheduler; written by the link.
        self.id = 0
        """The id under which the scheduler knows it; 0 if none does."""
        self.added_at = 0.0
        """When the link got it."""
        self.is_cancelled = False
        """True once its end was asked for, or is on its way: no scheduler gets it any more."""
        self.is_in_slot = False
        """True if the scheduler of now has given it a slot."""
        self.num_lost_epochs = 0
        """Epochs of the scheduler in a row that ended while it had a slot and had got no token."""
        self._num_tokens_at_loss = 0
        self._num_continued = 0
        """The first tokens, which another server generated."""
        if index < len(request.outputs) and request.outputs[index]:
            self._continue(request.outputs[index])

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self.token_ids)

    @property
    def num_new_tokens(self) -> int:
        """Tokens so far that this server generated."""
        return len(self.token_ids) - self._num_continued

    @property
    def num_bytes(self) -> int:
        """Memory that its output takes, roughly."""
        return _TOKEN_BYTES * self.num_tokens + (0 if self._logprobs is None else self._logprobs.num_bytes)

    @property
    def is_over(self) -> bool:
        """True if there is no more output, unless it goes on."""
        return self.usage is not None

    @property
    def is_cut(self) -> bool:
        """True once a stop string is complete; output that still arrives is ignored."""
        return self._text.matched is not None

    @property
    def is_whole(self) -> bool:
        """True if the same request would have no more output."""
        has_end = self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        return self.error is None and (has_end or (self.usage is None and self.is_cut))

    @property
    def matched_stop(self) -> MatchedStop | None:
        """The stop string or token that ended it."""
        if self.finish_reason is not FinishReason.STOP:
            return None
        return self._text.matched if self.is_cut else self.token_ids[-1]

    # Its life.

    def add(
        self,
        token_ids: Sequence[int],
        num_accepted: int = 0,
        logprobs: Sequence[TokenLogprobs] = (),
        reason: FinishReason | None = None,
        *,
        num_draft_tokens: int = 0,
        published_ns: int = 0,
        is_beyond_draft: bool = False,
    ) -> bool:
        """Adds the output of a step; ignored after the end. Returns True if the scheduler must end the sequence.

        The first `num_accepted` tokens were the draft's. `is_beyond_draft`: nothing was drafted for it as it is too
        long for the draft.
        """
        if self.is_over:
            return False
        if is_beyond_draft:
            self.tokens_beyond_draft += len(token_ids)
        elif num_draft_tokens and token_ids and self.spec.max_draft_tokens != 0:
            self._count_draft(num_draft_tokens, num_accepted)
        was_cut = self.is_cut
        if not was_cut:
            if token_ids:
                self._extend(token_ids, num_accepted, logprobs, published_ns)
            if reason is not None or self._request.stop:
                self.finish_reason, self._ends_with_token = reason, bool(token_ids)
                if self._request.stop:
                    self.detokenize(self.num_tokens)
        if reason is not None:
            # It may end in any other way at the scheduler after a stop string ended it here.
            self._finish(FinishReason.STOP if self.is_cut else reason)
            return False
        return self.is_cut and not was_cut

    def end(self, reason: FinishReason | None, error: SlipstreamError | None = None) -> None:
        """Ends it where it is, with a reason or an error; output that still arrives is ignored."""
        if reason is not None or self.is_cut:
            self.add((), reason=reason or FinishReason.ABORT)
        elif not self.is_over:
            self.error = error
            self._finish(None)

    def go_on(self, vocabulary: Vocabulary, number: int) -> bool:
        """Begins again from the output kept, under a job's new number.

        Returns False if the output is whole, or broken: then the sample is over.
        """
        self.key = self._key(number)
        if self.is_whole:
            self.end(FinishReason.ABORT)
            return False
        self.id = self.num_lost_epochs = self._num_tokens_at_loss = 0
        self.is_cancelled = self.is_in_slot = False
        self.error = self.usage = self.finish_reason = self._last_chunk = None
        self._ends_with_token = False
        # Its tokens become text anew when they are read.
        self._text = self._new_text(vocabulary)
        self._token_bytes = vocabulary.token_bytes
        with self.failing_alone():
            if self._request.stop:
                self.detokenize(self.num_tokens)
        return not self.is_over

    def lose_epoch(self) -> None:
        """Called when the scheduler dropped it, with all output that it had sent before."""
        if self.is_in_slot:
            has_progress = self.num_tokens > self._num_tokens_at_loss
            self.num_lost_epochs = 1 if has_progress else self.num_lost_epochs + 1
            self._num_tokens_at_loss = self.num_tokens
        self.id, self.is_in_slot = 0, False

    def to_scheduler(self, epoch: int) -> scheduler_pb2.NewSequence:
        """Encodes the sequence with its output so far."""
        spec = replace(self.spec, output=tuple(self.token_ids), arrival=self.key)
        return spec.to_pb(self.id, epoch)

    @contextmanager
    def failing_alone(self) -> Iterator[None]:
        """Fails it, and nothing else, if the output that was kept cannot become text in the context."""
        try:
            yield
        except Exception:
            logger.exception("the output that was kept cannot become text", extra={"job": self.spec.job_id})
            self.end(None, InternalError(BROKEN_OUTPUT))

    # Reading.

    def can_read(self, offset: int) -> bool:
        """Returns whether `read` from there on returns a chunk."""
        return offset < len(self.token_ids) or self.finish_reason is not None

    def read(self, offset: int) -> Chunk | None:
        """Returns a chunk of tokens from `offset` on; None if there are none yet and it has not ended.

        Readers at the same place get the same chunk.
        """
        if not self.can_read(offset):
            return None
        num_tokens = len(self.token_ids)
        end = min(num_tokens, offset + MAX_CHUNK_TOKENS // (1 + (self.spec.top_logprobs or 0)))
        reason = self.finish_reason if end == num_tokens else None
        if (last := self._last_chunk) is not None and (
            (last.token_offset, len(last.token_ids), last.finish_reason != 0)
            == (offset, end - offset, reason is not None)
        ):
            return last
        self.detokenize(end)
        text, lengths = self._text.read(offset, end)
        token_ids = self.token_ids[offset:end]
        chunk = Chunk(
            job_id=self._request.job_id,
            token_offset=offset,
            token_ids=token_ids,
            text=text,
            is_draft=memoryview(self._is_draft)[offset:end].cast("?"),
            text_lengths=lengths,
            logprobs=None if self._logprobs is None else self._logprobs.read(offset, token_ids, self._token_bytes),
            sample_index=self.index,
            attempt=self._attempt,
            published_ns=self.published_ns if offset < end else 0,
        )
        if reason is not None:
            ended = Chunk(finish_reason=reason.to_pb(), **matched_stop_to_pb(self.matched_stop))
            chunk.MergeFrom(ended)
            chunk.text += self._text.rest or ""
            if self.usage is not None:
                chunk.usage.CopyFrom(self.usage.to_pb())
        self._last_chunk = chunk if end - offset <= MAX_SHARED_TOKENS else None
        return chunk

    def read_encoded(self, offset: int) -> bytes | None:
        """Returns the message of all tokens from `offset` on, encoded; None where only `read` can say what follows.

        That is so for a sample with stop strings or logprobs, at its end, and for a reader that lacks many tokens.
        """
        end = len(self.token_ids)
        if self._encoder is None or self.finish_reason is not None or not 0 < end - offset <= MAX_SHARED_TOKENS:
            return None
        last_offset, last_end, encoded = self._last_encoded
        if (last_offset, last_end) == (offset, end):
            return encoded
        if self._text.num_tokens != offset:
            return None
        token_ids = self.token_ids[offset:]
        text, lengths = self._text.decode(token_ids)
        encoded = self._encoder.encode(offset, token_ids, text, self._is_draft[offset:], lengths, self.published_ns)
        self._text.append(text, lengths)
        self._last_encoded = (offset, end, encoded)
        return encoded

    def detokenize(self, end: int) -> None:
        """Turns the tokens before `end` into text. With stop strings, drops those after the one that completes one."""
        is_end = self.finish_reason is not None and end == self.num_tokens
        start, last = self._text.num_tokens, end - (is_end and self._ends_with_token)
        if start < last:
            self._text.add(self.token_ids[start:last])
        if is_end and self._text.rest is None:
            # A token that stops the output is no part of the text.
            token_id = self.token_ids[-1] if self._ends_with_token else None
            self._text.end(token_id, is_shown=self.finish_reason is not FinishReason.STOP)
        if self.is_cut:
            self._truncate(self._text.num_tokens)

    async def detokenize_in_turns(self, end: int) -> None:
        """Detokenizes bit by bit, so that the event loop serves other calls in between."""
        while (start := self._text.num_tokens) < end:
            self.detokenize(min(end, start + MAX_CHUNK_TOKENS))
            await asyncio.sleep(0)

    async def forget_tokenizer(self) -> None:
        """Detokenizes all of an output that is over, in turns, and drops the tokenizer."""
        with suppress(Exception):  # its readers get the error
            await self.detokenize_in_turns(self.num_tokens)
            self.detokenize(self.num_tokens)
        self._text.forget_tokenizer()
        used = set() if self._logprobs is None else {*self.token_ids, *self._logprobs.columns()["top_token_ids"]}
        self._token_bytes = {token: self._token_bytes(token) for token in used}.__getitem__

    # Measuring.

    def measure(self, metrics: RequestMetrics, now: float) -> int:
        """Measures the tokens added since the last call, and returns their number."""
        num_new = self.num_tokens - self._num_measured
        if num_new:
            if self._num_measured > self._num_continued:
                metrics.went_on(num_new, now - self._measured_at)
            elif num_new > 1:
                metrics.went_on(num_new - 1, 0.0)
            self._measured_at = now
            self._num_measured = self.num_tokens
        return num_new

    def info(self) -> SampleInfo:
        """Returns the sample as it is now."""
        return SampleInfo(
            num_tokens=self.num_tokens,
            finish_reason=self.finish_reason,
            matched_stop=self.matched_stop,
            usage=self.usage,
        )

    # The journal.

    def to_journal(self, unix_epoch_ns: int) -> journal_pb2.JournaledSample:
        """Encodes all that `restore` needs. `unix_epoch_ns`: time since 1970 less that of `time.monotonic`."""

        def unix_ns(seconds: float | None) -> int:
            return 0 if seconds is None else round(seconds * 1e9) + unix_epoch_ns

        return journal_pb2.JournaledSample(
            token_ids=self.token_ids,
            is_draft=bytes(self._is_draft),
            **({} if self._logprobs is None else self._logprobs.columns()),
            finish_reason=None if self.finish_reason is None else self.finish_reason.to_pb(),
            ends_with_token=self._ends_with_token,
            is_cut=self.is_cut,
            usage=None if self.usage is None else self.usage.to_pb(),
            error=None if self.error is None else Refusal(0, self.error).to_pb(),
            total_draft_tokens=self.total_draft_tokens,
            drafts_by_accepted=self.drafts_by_accepted,
            cached_tokens=self.cached_tokens,
            tokens_beyond_draft=self.tokens_beyond_draft,
            num_continued=self._num_continued,
            admitted_ns=unix_ns(self.admitted_at),
            first_token_ns=unix_ns(self.first_token_at),
            last_token_ns=unix_ns(self._last_token_at),
        )

    def restore(self, message: journal_pb2.JournaledSample, unix_epoch_ns: int) -> None:
        """Takes over what was kept of it; nothing was added before. `settle` is called after the last step's output."""

        def at(unix_ns: int) -> float | None:
            return min((unix_ns - unix_epoch_ns) / 1e9, time.monotonic()) if unix_ns else None

        self.total_draft_tokens, self.drafts_by_accepted = message.total_draft_tokens, list(message.drafts_by_accepted)
        self.cached_tokens, self.tokens_beyond_draft = message.cached_tokens, message.tokens_beyond_draft
        self.admitted_at, self.first_token_at = at(message.admitted_ns), at(message.first_token_ns)
        self._last_token_at = at(message.last_token_ns)
        self._num_continued = message.num_continued
        self.token_ids.extend(message.token_ids)
        self._is_draft += message.is_draft
        if self._logprobs is not None:
            self._logprobs.restore(message)
        self._ends_with_token = message.ends_with_token
        with self.failing_alone():
            if message.is_cut:
                # The end, whichever it was, was after the cut.
                self.detokenize(self.num_tokens)
            self.finish_reason = FinishReason.from_pb(message.finish_reason)
            if self._request.stop:
                self.detokenize(self.num_tokens)
        if message.HasField("usage"):
            self.usage = Usage.from_pb(message.usage)
        if message.HasField("error"):
            self.error = Refusal.from_pb(message.error).error

    def settle(self) -> None:
        """Called when all of its output was read from the journal: it is not measured again."""
        if self.is_cut:
            # The scheduler's answer to the cut is of no interest.
            self.end(FinishReason.STOP)
        self._num_measured = self.num_tokens
        self._measured_at = time.monotonic()
        self.published_ns = self.published_before_ns = 0

    def _continue(self, output: tuple[int, ...]) -> None:
        """Takes over output of another server, as if its steps had been here; an output that is whole ends at once."""
        reason = None
        if output[-1] in self.spec.stop_token_ids:
            reason = FinishReason.STOP
        elif len(output) == self.spec.max_new_tokens:
            reason = FinishReason.LENGTH
        self._num_continued = self._num_measured = len(output)
        unknown = TokenLogprobs(math.nan, ((0, math.nan),) * (self.spec.top_logprobs or 0))
        self.add(output[:-1], logprobs=[unknown] * (len(output) - 1))
        self.add(output[-1:], logprobs=[unknown], reason=reason)
        if self.num_tokens < len(output):
            accepted = f"at most {self.num_tokens} tokens: a stop string ends the output there"
            raise InvalidArgumentError(f"continuation.outputs[{self.index}].ids", f"{len(output)} tokens", accepted)
        if self.is_cut:
            self.end(FinishReason.STOP)
        self.num_steps, self.first_token_at, self._last_token_at = 0, None, None

    def _new_text(self, vocabulary: Vocabulary) -> OutputText:
        detokenizer = vocabulary.new_detokenizer(self._request.text_before)
        return OutputText(detokenizer, self._request.stop, min_new_tokens=self._request.min_new_tokens)

    def _key(self, number: int) -> int:
        return number * MAX_SAMPLES + self.index

    def _count_draft(self, num_proposed: int, num_accepted: int) -> None:
        self.total_draft_tokens += num_proposed
        missing = max(num_proposed, num_accepted) + 1 - len(self.drafts_by_accepted)
        if missing > 0:
            self.drafts_by_accepted += [0] * missing
        self.drafts_by_accepted[num_accepted] += 1

    def _extend(
        self, token_ids: Sequence[int], num_accepted: int, logprobs: Iterable[TokenLogprobs], published_ns: int
    ) -> None:
        self.token_ids.extend(token_ids)
        self._is_draft += _draft_flags(num_accepted, len(token_ids))
        if self._logprobs is not None:
            self._logprobs.extend(logprobs)
        self.num_steps += 1
        self.published_before_ns, self.published_ns = self.published_ns, published_ns
        self._last_token_at = published_ns / 1e9
        if self.first_token_at is None:
            self.first_token_at = self._last_token_at

    def _truncate(self, num_tokens: int) -> None:
        """Drops the tokens of the same step after the one that completed a stop string; they were never sent."""
        del self.token_ids[num_tokens:]
        del self._is_draft[num_tokens:]
        if self._logprobs is not None:
            self._logprobs.truncate(num_tokens)

    def _finish(self, reason: FinishReason | None) -> None:
        self.finish_reason = reason
        now, num_tokens, counts = time.monotonic(), self.num_new_tokens, self.drafts_by_accepted
        num_accepted, num_verify_steps = sum(number * count for number, count in enumerate(counts)), sum(counts)
        first_token_at = self.arrived_at if self.first_token_at is None else self.first_token_at
        decoding_s = 0.0 if self._last_token_at is None else self._last_token_at - first_token_at
        self.usage = Usage(
            prompt_tokens=len(self.spec.prompt),
            completion_tokens=num_tokens,
            total_draft_tokens=self.total_draft_tokens,
            total_accepted_tokens=num_accepted,
            num_verify_steps=num_verify_steps,
            mean_accept_length=mean_accept_length(num_accepted, num_verify_steps),
            accepted_per_position=tuple(accumulate(reversed(counts[1:])))[::-1],
            seed=self.spec.sampling.seed,
            # Times of another process, by a clock that was set meanwhile, may be in any order.
            queue_seconds=max(0.0, (now if self.admitted_at is None else self.admitted_at) - self.arrived_at),
            time_to_first_token_seconds=max(0.0, first_token_at - self.arrived_at),
            end_to_end_seconds=now - self.arrived_at,
            mean_inter_token_latency_seconds=max(0.0, decoding_s) / max(1, num_tokens - 1) * (num_tokens > 1),
            cached_tokens=self.cached_tokens,
            tokens_beyond_draft=self.tokens_beyond_draft,
        )


class LogprobColumns:
    """The logprobs of a sample in float32: 4 bytes a token, and 8 for each of the top tokens at its place."""

    def __init__(self, num_top: int) -> None:
        """`num_top`: top tokens at each place."""
        self._num_top = num_top
        self._own = array("f")
        self._top_ids = array("I")
        self._top = array("f")

    @property
    def num_bytes(self) -> int:
        """Memory that they take."""
        return 4 * (len(self._own) + len(self._top_ids) + len(self._top))

    def extend(self, tokens: Iterable[TokenLogprobs]) -> None:
        """Appends the logprobs of the next tokens."""
        for token in tokens:
            assert len(token.top) == self._num_top, f"{len(token.top)} logprobs where {self._num_top} were asked for"
            self._own.append(token.logprob)
            self._top_ids.extend(token_id for token_id, _ in token.top)
            self._top.extend(logprob for _, logprob in token.top)

    def truncate(self, num_tokens: int) -> None:
        """Drops all but the first `num_tokens`."""
        del self._own[num_tokens:]
        del self._top_ids[num_tokens * self._num_top :]
        del self._top[num_tokens * self._num_top :]

    def columns(self) -> dict[str, Any]:
        """Returns the fields of `JournaledSample` that have them."""
        return {"logprobs": self._own, "top_token_ids": self._top_ids, "top_logprobs": self._top}

    def restore(self, message: journal_pb2.JournaledSample) -> None:
        """Takes over what `columns` returned."""
        self._own.extend(message.logprobs)
        self._top_ids.extend(message.top_token_ids)
        self._top.extend(message.top_logprobs)

    def read(
        self, start: int, token_ids: Iterable[int], token_bytes: Callable[[int], bytes]
    ) -> Iterator[generation_pb2.TokenLogprobs]:
        """Yields the logprobs of tokens, of which the first is number `start`, with the bytes of each."""
        for index, token in enumerate(token_ids, start):
            row = slice(index * self._num_top, (index + 1) * self._num_top)
            top_ids = self._top_ids[row]
            yield generation_pb2.TokenLogprobs(
                logprob=self._own[index],
                top_token_ids=top_ids,
                top_logprobs=self._top[row],
                token=token_bytes(token),
                top_tokens=map(token_bytes, top_ids),
            )


@lru_cache(maxsize=256)
def _draft_flags(num_draft: int, num_tokens: int) -> bytes:
    """Returns a flag for each token: 1 for the first `num_draft`, else 0."""
    num_draft = min(num_draft, num_tokens)
    return b"\1" * num_draft + bytes(num_tokens - num_draft)
